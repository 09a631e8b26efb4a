"""What each fault costs, and where the state comes back from: every tier on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.core import events as ev
from jurymast.core.state import RunState
from support.slurm_runs import TRAIN, SlurmRun, jurymast, power_loss, submit, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    state = submit(cluster, folder, "--nodes", "3", "--spares", "2").wait_end()
    assert (state.exit_code, state.incidents) == (0, [])
    return weights(cluster, folder)


def policy(cluster: Cluster, folder: Path, tiers: dict[str, object]) -> tuple[str, str]:
    path = cluster.shared / f"{folder.name}.yaml"
    path.write_text(json.dumps({"checkpoint": {"tiers": tiers}}))
    path.chmod(0o644)
    return ("--policy", str(path))


def ended_well(cluster: Cluster, folder: Path, run: SlurmRun, undisturbed: str) -> RunState:
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    assert weights(cluster, folder) == undisturbed
    return state


def whole(run: SlurmRun) -> int:
    """Bytes of all ranks' images together."""
    return max(e.size_bytes for e in run.events() if isinstance(e, ev.Saved) and e.tier == "memory" and e.ok)


def test_a_killed_worker_is_restored_from_its_own_memory(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "2")
    victim = run.wait_safe(60).placement[1]
    cluster.fault("kill", victim, pid=run.pids(victim)[0], signal="KILL")
    incident = ended_well(cluster, tmp_path, run, undisturbed).incidents[0]
    assert set(incident.tiers) == {"memory"}
    assert incident.tiers["memory"] == pytest.approx(whole(run), rel=0.01)
    assert (incident.step_restored or 0) >= run.newest_saved("peer")


def test_after_a_power_loss_the_lost_shards_come_from_peers_and_the_rest_stays(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "2")
    power_loss(run, run.wait_safe(60).placement[1])
    incident = ended_well(cluster, tmp_path, run, undisturbed).incidents[0]
    assert set(incident.tiers) == {"memory", "peer"}
    assert incident.tiers["peer"] == pytest.approx(whole(run) / 3, rel=0.05)
    assert (incident.step_restored or 0) >= run.newest_saved("peer") >= 60


def test_two_nodes_lost_at_once_come_back_from_the_spares_that_hold_their_replicas(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "2")
    state = run.wait_safe(60)
    for node in state.placement[:2]:
        power_loss(run, node)
    state = ended_well(cluster, tmp_path, run, undisturbed)
    restored = [e for e in run.events() if isinstance(e, ev.Restored) and e.step]
    assert restored[-1].tier == "memory", run.story()
    assert restored[-1].step >= 60


def test_two_nodes_lost_with_their_replicas_come_back_from_shared_storage(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    """Nobody has their own part any more: the newest step on shared storage it is."""
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "2", *policy(cluster, tmp_path, {"peer": False}),
        arguments=(*TRAIN, "--step-time", "0.06"),
    )  # fmt: skip
    run.wait("a checkpoint on shared storage", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
    state = run.state()
    for node in state.placement[:2]:
        power_loss(run, node)
    ended_well(cluster, tmp_path, run, undisturbed)
    planned = [e for e in run.events() if isinstance(e, ev.RestorePlanned)]
    assert planned[-1].tier == "shared", run.story()
    assert planned[-1].step >= 20


@pytest.mark.parametrize("local", [True, False])
def test_a_requeue_restores_from_what_outlived_the_job(
    cluster: Cluster, tmp_path: Path, undisturbed: str, local: bool
) -> None:
    tiers: dict[str, object] = {"local": {"path": "/scratch"}} if local else {}
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "0", *policy(cluster, tmp_path, tiers))
    victim = run.wait_safe(60).placement[1]
    before = run.state().saved["peer"].step or 0
    power_loss(run, victim)
    run.wait("the requeue", lambda s: s.restarts == 1, limit_s=120)
    state = ended_well(cluster, tmp_path, run, undisturbed)
    incident = state.incidents[0]
    assert incident.action == "requeue"
    assert (incident.step_restored or 0) >= before, run.story()
    assert set(incident.tiers) <= {"local", "peer", "shared"}


def test_before_a_job_is_ended_its_newest_checkpoint_gets_to_shared_storage(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The policy copies there once an hour; scancel gives 30 s (KillWait)."""
    rarely = policy(cluster, tmp_path, {"shared": {"every": "1h"}})
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", *rarely,
        arguments=("--steps", "100000", "--step-time", "0.02", "--save-every", "20 steps"),
    )  # fmt: skip
    run.wait("the hourly copy", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
    hourly = run.state().saved["shared"].step or 0
    newest = run.wait_safe(hourly + 60).saved["peer"].step or 0
    cluster.login(["scancel", str(run.job)])
    state = run.wait_end()
    assert state.phase.value == "cancelled"
    wait_until("last copy", lambda: (run.state().saved["shared"].step or 0) >= newest)


def test_storage_that_turns_read_only_costs_no_training_and_is_caught_up_with(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit(
        cluster, tmp_path, "--nodes", "2", "--spares", "0",
        arguments=("--steps", "1200", "--step-time", "0.02", "--save-every", "20 steps"),
    )  # fmt: skip
    run.wait("the first copy", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
    run.directory.checkpoints.chmod(0o500)
    state = run.wait("the gap", lambda s: s.saved["shared"].failures > 0)
    assert "permission" in state.saved["shared"].error
    code, told, _ = jurymast(cluster, "status", str(run.directory.root))
    assert (code, "copying to the shared tier failed" in told) == (0, True), told
    run.directory.checkpoints.chmod(0o700)
    state = run.wait("catching up", lambda s: s.saved["shared"].failures == 0)
    assert state.incidents == []
    assert run.wait_end().exit_code == 0
    wait_until("last copy", lambda: run.state().saved["shared"].step == 1200)
