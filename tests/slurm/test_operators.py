"""What administrators and users do to a running job by hand, on a real cluster: no bit is lost, and nothing
of it is a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.slurm_runs import TRAIN, hurried, policy_file, submit, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# On a busy machine some rank may be slow for long.
SLOW_MAY_BE = "health: {straggler: off}"
LONG = (*TRAIN[:1], "1500", *TRAIN[2:])


def test_an_administrator_drains_a_node_and_its_ranks_save_and_move(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    options = ("--policy", policy_file(cluster, tmp_path, SLOW_MAY_BE))
    run = submit(cluster, tmp_path, "--nodes", "2", "--spares", "1", *options, arguments=LONG)
    before = run.wait_safe(20)
    victim = next(node for node in before.placement if node != before.host)
    why = "a new | firmware"
    command = ["scontrol", "update", f"NodeName={victim}", "State=DRAIN", f"Reason={why}"]
    cluster.login(command, root=True)
    try:
        moved = run.wait("the move", lambda s: bool(s.incidents) and s.incident is None, limit_s=240.0)
        assert victim not in moved.placement
        incident = moved.incidents[0]
        assert (incident.cause, incident.charged, incident.action) == ("drain_asked", "nobody", "swap")
        assert why in incident.reason
        restored = next(e for e in run.events() if isinstance(e, ev.Restored) and e.attempt == 2)
        done = [e.step for e in run.events() if isinstance(e, ev.Progress) and e.t <= restored.t]
        assert restored.step == max(done), "no step is done again"
        assert run.wait_end(300.0).exit_code == 0, run.story()
    finally:
        cluster.login(["scontrol", "update", f"NodeName={victim}", "State=RESUME"], root=True)
    assert len(run.state().incidents) == 1, run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*LONG, nodes=2)


@pytest.mark.long
def test_a_run_that_is_suspended_goes_on_as_if_nothing_had_happened(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    train = (*TRAIN[:1], "600", *TRAIN[2:])
    # Slurm lets one node after the other go on.
    options = ("--policy", policy_file(cluster, tmp_path, f"{SLOW_MAY_BE}\ndetect: {{node_lost_after: 10s}}"))
    run = submit(cluster, tmp_path, "--nodes", "2", "--spares", "1", *options, arguments=train)
    run.wait_safe(20)
    cluster.login(["scontrol", "suspend", str(run.job)], root=True)
    cluster.wait_job(run.job, "SUSPENDED")
    still = run.state().step
    end = time.monotonic() + 30.0  # longer than any node may be silent
    wait_until("time has passed", lambda: time.monotonic() > end, limit_s=60.0)
    assert run.state().step <= still + 5
    cluster.login(["scontrol", "resume", str(run.job)], root=True)
    state = run.wait_end(300.0)
    assert (state.exit_code, [i.cause for i in state.incidents]) == (0, []), run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=2)


def test_a_run_that_is_requeued_by_hand_goes_on(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    train = (*TRAIN[:1], "400", *TRAIN[2:])
    run = submit(cluster, tmp_path, "--nodes", "2", "--spares", "0", arguments=train)
    written = run.wait("a checkpoint on storage", lambda s: s.saved_on("shared") > 0).saved_on("shared")
    cluster.login(["scontrol", "requeue", str(run.job)])
    wait_until(
        "its next life",
        lambda: hurried(cluster, run.job)["JobState"] == "RUNNING" and run.state().restarts == 1,
        limit_s=240.0,
    )
    state = run.wait_end(300.0)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    # The cluster's KillWait is short: a busy supervisor may not be told why in time.
    assert (incident.cause in ("requeued", "job_ended"), incident.charged) == (True, "nobody"), run.story()
    restored = next(e for e in run.events() if isinstance(e, ev.Restored) and e.attempt == state.attempt)
    assert restored.step >= written, run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=2)


def test_a_run_goes_on_beyond_the_time_limit_of_its_job(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    policy = policy_file(
        cluster, tmp_path, f"{SLOW_MAY_BE}\nfailures: {{at_time_limit: requeue, requeues: 0}}"
    )
    train = LONG  # longer than a minute
    options = ("--nodes", "2", "--spares", "0", "--time", "1", "--policy", policy)
    run = submit(cluster, tmp_path, *options, arguments=train)
    state = run.wait_end(500.0)
    assert state.exit_code == 0, run.story()
    assert state.restarts >= 1, run.story()
    causes = {(i.cause, i.charged, i.action) for i in state.incidents}
    assert causes == {("requeue_asked", "nobody", "requeue")}, run.story()
    restored = {e.attempt: e.step for e in run.events() if isinstance(e, ev.Restored)}
    for incident in state.incidents:
        lost = incident.step_lost_from - restored[incident.attempt + 1]
        assert lost <= 50, "what was saved in memory is written before the job ends"
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=2)
