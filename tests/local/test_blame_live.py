"""Findings and ends of ranks in real local runs: who leaves, who stays, and that no bit is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import Role
from support.runs import RunUnderTest, jurymast, local_run, result, wait_gone
from support.saves import check_restores
from support.waiting import wait_until

pytestmark = pytest.mark.torch

TRAIN = ("--steps", "100000", "--step-time", "0.05", "--save-every", "10 steps")
# On which nodes something is found says a directory with a file a node, which holds the verdict.
PROBE = """
from pathlib import Path
from jurymast.health.probe import Finding, Verdict

class Gauge:
    name, interval_s = "gauge", 0.1
    def __init__(self, node):
        self.file = Path(__file__).parent / "nodes" / node
    def look(self, now):
        if not self.file.exists():
            return []
        return [Finding(probe="gauge", code="gpu-broken", verdict=Verdict(self.file.read_text()),
                        kind="hardware", message="its smoke is out", device="gpu0", at=now)]
    def close(self):
        pass

def gauge(context):
    return Gauge(context.node)
"""


@pytest.fixture
def nodes_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory to put a verdict a node into; runs started after this have the probe."""
    package = tmp_path / "package"
    (package / "nodes").mkdir(parents=True)
    (package / "gauge_probe.py").write_text(PROBE)
    metadata = package / "gauge_probe-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gauge-probe\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[jurymast.probes]\ngauge = gauge_probe:gauge\n")
    paths = filter(None, (str(package), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return package / "nodes"


def findings(run: RunUnderTest) -> list[ev.HealthFound]:
    return [e for e in run.events() if isinstance(e, ev.HealthFound) and e.probe == "gauge"]


@pytest.mark.long
def test_a_suspect_node_is_swapped_out_and_no_bit_is_lost(
    tmp_path: Path, trained_plainly: Callable[..., str], nodes_found: Path
) -> None:
    """A bad one leaves the run on the real cluster."""
    out, enough = tmp_path / "out.json", tmp_path / "enough"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", script="train_tiny.py",
                   arguments=(*TRAIN, "--out", str(out), "--until", str(enough))) as run:  # fmt: skip
        victim = run.wait_safe(20).placement[1]
        (nodes_found / victim).write_text("suspect")
        run.wait("the swap", lambda s: bool(s.incidents) and s.incident is None)
        enough.touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    (incident,) = state.incidents
    assert (incident.cause, incident.node, incident.action) == ("gpu_suspect", victim, "swap"), run.story()
    assert state.nodes[victim].role is Role.SUSPECT
    assert victim not in state.excluded
    assert [blame.node for blame in state.blames] == [victim]
    assert state.exit_code == 0, run.story()
    assert result(out)["sha256"] == trained_plainly("--steps", str(result(out)["steps"]))
    check_restores(run, least=20)
    told = jurymast("events", str(run.directory.root)).stdout
    assert "gpu-broken on gpu0: its smoke is out (hardware, gauge probe)" in told


@pytest.mark.long
def test_the_same_on_every_node_stops_nobody_for_long_and_alerts(tmp_path: Path, nodes_found: Path) -> None:
    enough = tmp_path / "enough"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", script="train_tiny.py",
                   arguments=(*TRAIN, "--until", str(enough))) as run:  # fmt: skip
        nodes = list(run.wait_safe(20).nodes)
        for node in nodes:
            (nodes_found / node).write_text("bad")
        wait_until("finding on every node", lambda: {e.node for e in findings(run)} == set(nodes))
        enough.touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert state.excluded == {}
    assert all(node.role is not Role.FAILED for node in state.nodes.values()), run.story()
    assert "so none is blamed" in jurymast("status", str(run.directory.root)).stdout


def test_a_rank_that_crashes_leaves_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # the user's wish, which ranks get as under torchrun
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--steps", "160")) as run:  # fmt: skip
        state = run.wait_saved(10)
        pid = run.pids(state.placement[0])[0]
        os.kill(pid, signal.SIGSEGV)
        state = run.wait_end()
        wait_gone(run.directory.root)
    (failed,) = [e for e in run.events() if isinstance(e, ev.WorkerFailed)]
    assert failed.exit_code == -signal.SIGSEGV
    assert not failed.oom_kills
    assert failed.log.startswith("Fatal Python error: Segmentation fault"), failed.log
    assert (state.incidents[0].cause, state.exit_code) == ("worker_crash", 0)
    assert "its log ends: " in state.incidents[0].evidence
