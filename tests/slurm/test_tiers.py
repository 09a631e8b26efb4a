"""What each fault costs, and where the state comes back from: every tier on a real cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import RunState
from support.runs import result
from support.slurm_runs import TRAIN, SlurmRun, jurymast, power_loss, submit, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN, nodes=3)


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


def test_what_is_lost_comes_from_the_nearest_copy(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """A worker is killed, a node loses power, then two at once: none needs shared storage."""
    train = (*TRAIN, "--steps", "200")
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "3", arguments=train)
    victim = run.wait_safe(30).placement[1]
    cluster.fault("kill", victim, pid=run.pids(victim)[0], signal="KILL")
    killed = recovered(run, 1)
    assert set(killed.tiers) == {"memory"}
    assert killed.tiers["memory"] == pytest.approx(whole(run), rel=0.01)
    assert (killed.step_restored or 0) >= run.newest_saved("peer")

    power_loss(run, run.wait_safe((killed.step_restored or 0) + 30).placement[1])
    lost = recovered(run, 2)
    assert set(lost.tiers) == {"memory", "peer"}  # its own shard comes from a peer, and the rest stays
    assert lost.tiers["peer"] == pytest.approx(whole(run) / 3, rel=0.05)
    assert (lost.step_restored or 0) >= run.newest_saved("peer", attempt=2) >= 60

    # The spares hold the replicas of both.
    for node in run.wait_safe((lost.step_restored or 0) + 30).placement[:2]:
        power_loss(run, node)
    run.wait_end()
    restored = [e for e in run.events() if isinstance(e, ev.Restored) and e.step]
    assert restored[-1].tier == "memory", run.story()
    assert restored[-1].step >= 90
    ended_well(cluster, tmp_path, run, trained_plainly(*train, nodes=3))


def recovered(run: SlurmRun, number: int) -> Incident:
    """The incident of that number, once it is over."""
    state = run.wait(f"recovery {number}", lambda s: len(s.incidents) == number and s.incident is None)
    return state.incidents[-1]


def test_two_nodes_lost_with_their_replicas_come_back_from_shared_storage(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """Nobody has their own part any more: the newest step on shared storage it is."""
    enough = cluster.shared / f"{tmp_path.name}.end"
    enough.unlink(missing_ok=True)  # an earlier session's
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "2", *policy(cluster, tmp_path, {"peer": False}),
        arguments=(*TRAIN, "--steps", "100000", "--until", str(enough)),
    )  # fmt: skip
    run.wait("a checkpoint on shared storage", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
    for node in run.state().placement[:2]:
        power_loss(run, node)
    run.wait("the recovery", lambda s: bool(s.incidents) and s.incident is None)
    enough.touch()
    assert run.wait_end().exit_code == 0, run.story()
    found = result(cluster.shared / f"{tmp_path.name}.json")
    assert found["sha256"] == trained_plainly("--steps", str(found["steps"]), nodes=3), run.story()
    planned = [e for e in run.events() if isinstance(e, ev.RestorePlanned)]
    assert planned[-1].tier == "shared", run.story()
    assert planned[-1].step >= 10


def test_without_a_spare_a_requeue_restores_from_what_outlived_the_job(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    tiers: dict[str, object] = {"local": {"path": "/scratch"}}
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "0", *policy(cluster, tmp_path, tiers))
    victim = run.wait_safe(30).placement[1]
    before = run.state().saved["peer"].step or 0
    began = time.monotonic()
    power_loss(run, victim)
    run.wait("the requeue", lambda s: s.restarts == 1)
    assert time.monotonic() - began < 115, run.story()  # Slurm alone would not start it before 121 s
    run.wait("the recovery", lambda s: s.incident is None)
    state = ended_well(cluster, tmp_path, run, undisturbed)
    incident = state.incidents[0]
    assert incident.action == "requeue"
    assert (incident.step_restored or 0) >= before, run.story()
    assert set(incident.tiers) <= {"local", "peer", "shared"}
    assert victim in state.excluded
    assert victim not in state.placement
    job = cluster.job(run.job)
    assert job["Restarts"] == "1"
    assert victim in job["ExcNodeList"]
    print(json.dumps({"requeue": incident.seconds()}))


def test_before_a_job_is_ended_its_newest_checkpoint_gets_to_shared_storage(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The policy copies there once an hour; scancel gives 30 s (KillWait)."""
    rarely = policy(cluster, tmp_path, {"shared": {"every": "1h"}})
    run = submit(
        cluster, tmp_path, "--nodes", "2", "--spares", "0", *rarely,
        arguments=("--steps", "100000", "--step-time", "0.05", "--save-every", "10 steps"),
    )  # fmt: skip
    run.wait("the hourly copy", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
    hourly = run.state().saved["shared"].step or 0
    newest = run.wait_safe(hourly + 30).saved["peer"].step or 0
    cluster.login(["scancel", str(run.job)])
    state = run.wait_end()
    assert (state.phase.value, state.incidents) == ("cancelled", []), run.story()
    wait_until("last copy", lambda: (run.state().saved["shared"].step or 0) >= newest)
    cluster.wait_job(run.job, "CANCELLED", "FAILED")


@pytest.mark.long
def test_storage_that_turns_read_only_costs_no_training_and_is_caught_up_with(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit(
        cluster, tmp_path, "--nodes", "2", "--spares", "0",
        arguments=("--steps", "300", "--step-time", "0.08", "--save-every", "5 steps"),
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
    wait_until("last copy", lambda: run.state().saved["shared"].step == 300)
