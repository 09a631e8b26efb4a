"""`jurymast simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from jurymast.cli.main import main
from jurymast.cli.simulate import command

SMALL = ["--nodes", "64", "--days", "5", "--seeds", "2"]


def asked(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(command, [*SMALL, *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
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


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--cadence", "often"], "'often' is not a cadence"),
        (["--faults", "lemon"], "did you mean lemons"),
        (["--faults", "weibull:0"], "'0' is not a number above 0"),
        (["--trace", "infinitehbd", "--rate", "3"], "--rate and --trace do not go together"),
        (["--spares", "few"], "a number, or auto"),
        (["--trace", "/nowhere.csv"], "cannot read /nowhere.csv"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *words]) == 64
    assert complaint in capfd.readouterr().err
