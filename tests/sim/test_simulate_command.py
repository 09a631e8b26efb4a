"""`jurymast simulate` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from jurymast.cli.main import main
from jurymast.cli.simulate import command
from support.outputs import checked

SMALL = ["--nodes", "64", "--days", "5", "--seeds", "2"]


def asked(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(command, [*SMALL, *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = checked(json.loads(result.stdout), "simulate")
    return found


def test_json_has_the_promised_keys() -> None:
    found = asked("--rate", "40", "--spares", "2")
    assert set(found) >= {"goodput", "mtbf_hours", "categories", "incidents", "seeds", "wall_seconds"}
    goodput = found["goodput"]
    assert isinstance(goodput, dict)
    assert 0.9 < goodput["p5"] <= goodput["mean"] <= goodput["p95"] < 1.0
    assert found["seeds"] == 2
    categories, total = found["categories"], found["total_node_seconds"]
    assert isinstance(categories, dict)
    assert sum(categories.values()) == pytest.approx(total)
    assert total == pytest.approx(66 * 5 * 86_400)


def test_a_policy_decides(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("spares: 3\ncheckpoint: {cadence: 10m}\n")
    found = asked("--policy", str(policy))
    assert (found["spares"], found["cadence"]) == (3, "600s")


@pytest.mark.parametrize("words", [["--faults", "lemons:0.1"], ["--trace", "infinitehbd", "--trace-repairs"]])
def test_text(words: list[str]) -> None:
    result = CliRunner().invoke(command, [*SMALL, *words], catch_exceptions=False)
    assert "runtime goodput" in result.output
    assert "spare_idle" in result.output
    assert "100.00 %" in result.output


def test_what_is_assumed_is_told_and_what_is_said_is_not() -> None:
    assumed = "\n".join(asked()["assumed"])  # type: ignore[arg-type]
    for words in ("benchmarks", "--checkpoint-bytes", "--stall", "--step", "--rate", "not measured"):
        assert words in assumed
    said = ["--restart", "1m", "--stall", "1s", "--step", "2s", "--rate", "5", "--storage-gb-per-s", "100"]
    assumed = "\n".join(asked(*said)["assumed"])  # type: ignore[arg-type]
    for words in ("benchmarks", "--checkpoint-bytes", "--stall", "--step", "--rate)", "--storage"):
        assert words not in assumed


def test_the_size_of_a_checkpoint_says_what_saves_and_restores_take() -> None:
    small, large = (asked("--checkpoint-bytes", size) for size in ("64e9", "6400e9"))
    assert small["stall_seconds"] == pytest.approx(1e9 / 5.06e9)
    assert large["stall_seconds"] == pytest.approx(100e9 / 5.06e9)
    assert large["restart_seconds"] - small["restart_seconds"] == pytest.approx(99e9 / 1.74e9)  # type: ignore[operator]


def test_the_page_is_one_file_with_pictures(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    words = ["--rate", "100", "--faults", "multi,lemons", "--hang-rate", "20", "--html", str(file)]
    found = asked(*words)
    page = file.read_text()
    assert page.count("<svg") == page.count("</svg>") >= 4
    for words_ in (
        "Goodput of each run",
        "Goodput over time",
        "Incidents of the first run",
        "hang",
        "Assumed",
    ):
        assert words_ in page
    assert not re.search(r"https?://|src=|<script src|@import", page)
    embedded = re.search(r'id="simulation">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["incidents"] == found["incidents"]
    assert len(page) < 1_000_000


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--cadence", "often"], "'often' is not a cadence"),
        (["--faults", "lemon"], "did you mean lemons"),
        (["--faults", "weibull:0"], "'0' is not a number above 0"),
        (["--trace", "infinitehbd", "--rate", "3"], "--rate and --trace exclude each other"),
        (["--spares", "few"], "a number, or auto"),
        (["--faults", "multi,lemon"], "did you mean lemons"),
        (["--durations", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["--trace", "/nowhere.csv"], "cannot read /nowhere.csv"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *words]) == 64
    assert complaint in capfd.readouterr().err


def test_recovery_in_process_is_simulated_beside_restarts(tmp_path: Path) -> None:
    words = ["--rate", "100", "--spares", "6", "--cadence", "10m"]
    restart, spared = asked(*words), asked(*words, "--recovery", "in-process")
    assert (restart["recovery"], restart["kept"], restart["goodput_by_restart"]) == ("restart", 0.0, None)
    assert spared["recovery"] == "in process"
    assert spared["goodput_by_restart"] == restart["goodput"]
    assert spared["goodput"]["mean"] > restart["goodput"]["mean"]  # type: ignore[index]
    assert 0.5 < spared["kept"] < 1.0  # type: ignore[operator]
    file = tmp_path / "page.html"
    asked(*words, "--recovery", "in-process", "--html", str(file))
    result = CliRunner().invoke(command, [*SMALL, *words, "--recovery", "in-process"], catch_exceptions=False)
    told = re.search(r"in process: after (.*) if all ranks restart", result.output)
    assert told
    assert told[1] in file.read_text()
