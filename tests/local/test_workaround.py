"""A port of a node fails: its ranks leave it out from the next attempt on, until it is well again."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.findings import Verdict
from support.runs import RunUnderTest, jurymast, local_run, result, wait_gone
from support.sysfs_trees import Sysfs

pytestmark = pytest.mark.torch

STATE = "class/infiniband/mlx5_1/ports/1/state"
# The real probe over files of the test's, found as anybody's package is.
PROBE = """
from pathlib import Path
from jurymast_infiniband import InfinibandProbe

class Quick(InfinibandProbe):
    interval_s = 0.1

def probe(context):
    return Quick(context, Path({root!r}))
"""
POLICY = "health: {skip: [host, storage, infiniband], thresholds: {ib-down-s: 0}}\n"


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    sysfs = Sysfs(tmp_path / "sys", "infiniband")
    packages = tmp_path / "packages"
    info = packages / "planted_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "planted_probe.py").write_text(PROBE.format(root=str(sysfs.root)))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jurymast.probes]\nplanted = planted_probe:probe\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("NCCL_IB_HCA", "^=mlx5_9")  # the user's own
    return sysfs


def network_of(folder: Path, attempt: int) -> str:
    return str(result(folder / f"{attempt}.json")["NCCL_IB_HCA"])


def last_word(run: RunUnderTest, code: str) -> str:
    found = [e for e in run.events() if isinstance(e, ev.HealthFound) and e.code == code]
    return found[-1].verdict if found else ""


def restart(run: RunUnderTest, attempt: int) -> None:
    told = jurymast("restart", str(run.directory.root))
    assert told.returncode == 0, told.stderr
    run.wait(f"attempt {attempt}", lambda s: s.attempt == attempt and s.step >= 1 and s.incident is None)


def test_ranks_leave_a_failing_port_out(tmp_path: Path, sysfs: Sysfs) -> None:
    policy, folder = tmp_path / "policy.yaml", tmp_path / "environments"
    policy.write_text(POLICY)
    folder.mkdir()
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", "--policy", str(policy),
                   script="show_environment.py",
                   arguments=(str(folder), "--steps", "100000", "--step-time", "0.05")) as run:  # fmt: skip
        run.wait("the first look", lambda _: last_word(run, "ib-unused") != "")
        run.wait_step(1)
        assert network_of(folder, 1) == "^=mlx5_9"
        sysfs.set(STATE, "1: DOWN")
        run.wait("the finding", lambda _: last_word(run, "ib-link-down") == Verdict.SUSPECT.value)
        restart(run, 2)
        assert network_of(folder, 2) == "^=mlx5_9,mlx5_1"
        sysfs.set(STATE, "4: ACTIVE")
        run.wait("its end", lambda _: last_word(run, "ib-link-down") == Verdict.OK.value)
        restart(run, 3)
        assert network_of(folder, 3) == "^=mlx5_9"
        told = [
            (e.device, e.verdict) for e in run.events()
            if isinstance(e, ev.HealthFound) and e.code == "worked-around"
        ]  # fmt: skip
        assert told == [("mlx5_1:1", "unknown"), ("mlx5_1:1", "ok")]
        assert jurymast("cancel", str(run.directory.root)).returncode == 0
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert all(incident.node == "" for incident in state.incidents), (
        "no node is to blame for a restart by hand"
    )
