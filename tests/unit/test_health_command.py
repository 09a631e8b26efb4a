"""`jurymast health`: what it prints and the code it ends with, over a third party's probe in a real child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jurymast.health import once
from support.outputs import checked
from support.probes import Acme

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def acme(tmp_path: Path) -> Acme:
    (tmp_path / "package").mkdir()
    return Acme(tmp_path / "package", "acme", "other")


def health(acme: Acme | None, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JURYMAST_SITE": "", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "110"}
    if acme is not None:
        environment["PYTHONPATH"] = acme.python_path
    return subprocess.run(
        [sys.executable, "-m", "jurymast", "health", *words],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("ok", 0, "OK: "),
        ("find unknown", 0, "OK: "),
        ("find suspect", 1, "WARNING: "),
        ("find bad", 2, "CRITICAL: "),
        ("raise", 3, "UNKNOWN: "),
        ("abort", 3, "UNKNOWN: "),
        ("nothing", 3, "UNKNOWN: "),
        ("refuse", 3, "UNKNOWN: "),
    ],
)
def test_the_code_is_nagios_and_the_first_line_says_it(acme: Acme, word: str, code: int, said: str) -> None:
    acme.tell("acme", word)
    done = health(acme, "--probe", "acme")
    assert (done.returncode, done.stdout[: len(said)]) == (code, said), done
    if word.startswith("find"):
        assert "acme is high" in done.stdout
        assert "acme0" in done.stdout


def test_a_probe_that_hangs_is_told_of_within_the_limit_and_the_others_look(acme: Acme) -> None:
    acme.tell("acme", "hang")
    done = health(acme, "--probe", "acme", "--probe", "other", "--limit", "3", "--json")
    view: dict[str, Any] = checked(json.loads(done.stdout), "health")
    assert done.returncode == view["exit_code"] == 1
    assert view["verdict"] == "suspect"
    assert view["probes"] == [{"name": "acme", "state": "left out"}, {"name": "other", "state": "looked"}]
    (finding,) = view["findings"]
    assert (finding["probe"], finding["code"], finding["kind"]) == ("acme", "driver-wedged", "host")
    assert finding["at"] > 0


def test_this_machine_is_seen_without_options() -> None:
    """Whatever state it is in: some probe looks, and the two forms agree."""
    done = health(None, "--json")
    view = json.loads(done.stdout)
    assert done.returncode == view["exit_code"]
    assert done.stderr == ""
    states = {probe["name"]: probe["state"] for probe in view["probes"]}
    assert states["host"] == "looked"
    assert states["storage"] == "nothing"  # no path was named
    assert health(None).stdout.startswith(("OK", "WARNING", "CRITICAL", "UNKNOWN")[done.returncode])


def test_the_policy_names_probes_to_skip_and_paths_to_look_at(acme: Acme, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    missing = tmp_path / "missing"
    policy.write_text(f"health:\n  skip: [acme, host]\n  data: [{tmp_path}, {missing}]\n")
    view = json.loads(health(acme, "--policy", str(policy), "--json").stdout)
    assert {probe["name"] for probe in view["probes"]}.isdisjoint({"acme", "host"})
    told = [f for f in view["findings"] if f["probe"] == "storage"]
    assert [(f["code"], f["device"], f["kind"]) for f in told] == [("storage-error", str(missing), "storage")]


def test_a_probe_that_is_not_there_is_a_mistake(acme: Acme) -> None:
    done = health(acme, "--probe", "acne")
    assert done.returncode == 64
    assert "there is no probe acne (did you mean acme?)" in done.stderr


def test_explain_tells_the_packaged_reading_and_the_policy_s(tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("health:\n  xid:\n    79: suspect\n")
    plain = health(None, "--explain", "79").stdout
    for part in (
        "fallen off the bus",
        "drain",
        "bad (hardware)",
        "reboot",
        "docs.nvidia.com",
        "does not change this",
    ):
        assert part in plain
    changed = health(None, "--explain", "79", "--policy", str(policy)).stdout
    assert "suspect (hardware)" in changed
    assert f"reads it as suspect ({policy}:3)" in changed
    view = json.loads(health(None, "--explain", "154", "--json").stdout)
    assert (view["class"], view["policy"]) == ("text", None)
    unknown = health(None, "--explain", "5")
    assert unknown.returncode == 64
    assert "Xid 5 is not in the table" in unknown.stderr


def test_thresholds_show_where_each_value_comes_from(tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("health:\n  thresholds: {shm-used: 0.5}\n")
    view = json.loads(health(None, "--thresholds", "--policy", str(policy), "--json").stdout)
    limits = {limit["name"]: limit for limit in view}
    assert (limits["shm-used"]["value"], limits["shm-used"]["source"]) == (0.5, f"{policy}:2")
    assert limits["disk-used"]["value"] == 0.98
    assert "shm-used" in health(None, "--thresholds").stdout


def test_root_s_probes_run_where_nothing_but_jurymast_is_installed(tmp_path: Path) -> None:
    """As root's health check runs them, in an environment that holds the package's own files and no other."""
    venv.create(tmp_path / "root", symlinks=True)
    (packages,) = (tmp_path / "root").glob("lib/python*/site-packages")
    (packages / "own.pth").write_text("\n".join(str(ROOT / name) for name in ("launcher", "plugins")))
    installed = metadata.distribution("jurymast")
    (packages / "jurymast-0.dist-info").mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (packages / "jurymast-0.dist-info" / name).write_text(installed.read_text(name) or "")
    done = subprocess.run(
        [str(tmp_path / "root/bin/python"), "-I", "-m", "jurymast.health.once", "--threshold", "disk-used=2"],
        capture_output=True, text=True, timeout=120, check=False, cwd="/", env={"PATH": ""},
    )  # fmt: skip
    assert done.stderr == ""
    states = {probe["name"]: probe["state"] for probe in json.loads(done.stdout)["probes"]}
    assert states.keys() == {"amd", "host", "infiniband", "nvidia", "storage"}
    assert states["host"] == "looked"
    assert set(states.values()) <= {"looked", "nothing"}


@pytest.mark.parametrize(
    "words", [["--threshold", "no-such=1"], ["--xid", "94=fine"], ["--probe", "no-such"]]
)
def test_a_mistake_of_root_s_command_is_no_verdict(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        once.main(words)
    assert ended.value.code == once.UNKNOWN
    assert words[1].partition("=")[0] in capsys.readouterr().err
