"""The main job on a real cluster, as an unprivileged user: a fault in mid-run, and not a bit is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.report.which_run import find_run
from support.runs import SCRIPTS
from support.saves import check_restores
from support.slurm_runs import (
    TRAIN,
    SlurmRun,
    jurymast,
    policy_file,
    power_loss,
    submit,
    weights,
)
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN, nodes=3)


def never_left_running(run: SlurmRun) -> None:
    """The Slurm job is the one that started, and was not requeued."""
    job = run.cluster.job(run.job)
    assert job["JobState"] in ("RUNNING", "COMPLETING", "COMPLETED")
    assert job["Restarts"] == "0"


@pytest.mark.parametrize("spares", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_batch_host_dies(cluster: Cluster, tmp_path: Path, undisturbed: str, spares: int) -> None:
    """Another node's agent takes the supervision over; the ranks go on, or are placed anew. With a spare the
    host has ranks only if another node's agent was late, as on a busy machine, where nodes that are well may
    also be silent for longer than 1.5 s."""
    patient = policy_file(cluster, tmp_path, "detect: {node_lost_after: 8s}\nhealth: {straggler: off}")
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", str(spares), "--policy", patient)
    state = run.wait_safe(30)
    host, placed = state.host, state.host in state.placement
    power_loss(run, host)
    state = run.wait_end()
    assert (state.phase.value, state.epoch >= 2) == ("succeeded", True), run.story()
    expected = ["swap" if spares else "requeue"] if placed else []
    assert [i.action for i in state.incidents] == expected, run.story()
    check_restores(run, least=30 if placed else 0)
    assert weights(cluster, tmp_path) == undisturbed
    cluster.wait_job(run.job, "COMPLETED", "CANCELLED", "NODE_FAIL", "FAILED")


def test_a_script_that_always_crashes_ends_the_job_with_its_code(cluster: Cluster, tmp_path: Path) -> None:
    runs = cluster.shared / tmp_path.name
    code, told, error = jurymast(
        cluster, "submit", "--runs", str(runs), "--parsable", "--nodes", "2", "--spares", "0", "--",
        str(SCRIPTS / "crash.py"), "--rank", "1",
    )  # fmt: skip
    assert code == 0, error
    job = told.strip()
    run = SlurmRun(cluster, find_run(job, runs).root, int(job))
    state = run.wait_end()
    victim, incident = state.placement[1], state.incidents[-1]
    assert (incident.action, incident.rank, incident.node) == ("stop", 1, victim)
    assert "ZeroDivisionError" in incident.traceback
    assert len(state.incidents) == 3
    code, told, _ = jurymast(cluster, "status", "--runs", str(runs), job)
    assert code == 0
    for words in ("failed", "ZeroDivisionError", "rank 1", victim, "crash loop"):
        assert words in told, told
    ended = cluster.wait_job(run.job, "FAILED")
    assert ended["ExitCode"] == "1:0"


@pytest.mark.long
def test_cancel_ends_the_job_and_the_run(cluster: Cluster, tmp_path: Path) -> None:
    run = submit(
        cluster,
        tmp_path,
        "--nodes",
        "2",
        "--spares",
        "0",
        arguments=("--steps", "100000", "--step-time", "0.05"),
    )
    run.wait_step(5)
    code, _, error = jurymast(cluster, "cancel", str(run.directory.root))
    assert code == 0, error
    state = run.wait_end()
    assert (state.phase.value, state.incidents) == ("cancelled", []), run.story()
    cluster.wait_job(run.job, "CANCELLED", "FAILED")


@pytest.mark.parametrize(
    ("options", "script", "exit_code", "words"),
    [
        (("--nodes", "3"), "/nowhere/train.py", 66, "/nowhere/train.py"),
        (("--nodes", "4", "--spares", "3"), str(SCRIPTS / "train_tiny.py"), 64, "6"),
        (("--nodes", "2", "--runs", "/proc/runs"), str(SCRIPTS / "train_tiny.py"), 73, "/proc/runs"),
        (("--nodes", "2", "--partion=main"), str(SCRIPTS / "train_tiny.py"), 64, "--partition"),
        (("--nodes", "2", "--partition=nowhere"), str(SCRIPTS / "train_tiny.py"), 64, "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_and_submits_nothing(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...], script: str, exit_code: int, words: str
) -> None:
    runs = cluster.shared / tmp_path.name
    told_runs = () if "--runs" in options else ("--runs", str(runs))
    code, out, error = jurymast(cluster, "submit", *told_runs, *options, "--", script)
    assert (code, out) == (exit_code, ""), error
    assert words in error
    assert len([line for line in error.splitlines() if line.startswith("jurymast: error:")]) == 1
    assert cluster.squeue() == []
    assert not runs.exists() or not any(runs.iterdir())


@pytest.mark.alone  # a slow link and a machine that other tests keep busy are two things
def test_what_is_no_failure_raises_no_alarm(cluster: Cluster, tmp_path: Path, undisturbed: str) -> None:
    """A link that becomes slow, and a controller that restarts, in mid-run."""
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "0")
    victim = run.wait_saved(10).placement[1]
    cluster.fault("slow", victim, delay_ms=100)
    cluster.fault("slurmctld-restart")
    run.wait_saved(20)
    cluster.fault("slow", victim, off=True)
    state = run.wait_end()
    assert (state.exit_code, state.incidents) == (0, []), run.story()
    assert weights(cluster, tmp_path) == undisturbed


def test_a_node_cut_off_is_replaced_and_its_return_harms_nothing(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "1")
    victim = run.wait_safe(30).placement[1]
    cluster.fault("partition", victim)
    run.wait("the swap", lambda s: bool(s.incidents) and s.incident is None)
    cluster.fault("heal", victim)
    run.wait("its return", lambda s: s.nodes[victim].role.value == "suspect")
    state = run.wait_end()
    assert [(i.cause, i.action) for i in state.incidents] == [("node_lost", "swap")], run.story()
    assert victim not in state.placement
    check_restores(run, least=30)
    assert weights(cluster, tmp_path) == undisturbed
