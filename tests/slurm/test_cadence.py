"""A run that fails more often saves more often, and less often again once that is past."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.core.state import RunState
from support.saves import agreed, all_alike
from support.slurm_runs import SlurmRun, jurymast, kill_rank, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(500)]

# Three nodes that fail every 50 minutes by what the policy says. A failure is forgotten within minutes here,
# and two of them one second apart are two.
POLICY = {"failures": {"rate": 9600, "half_life": "45s", "burst": "1s"}, "health": {"preflight": "off"}}
KILLS = 12


def working(state: RunState) -> bool:
    return state.incident is None and state.first_step_at is not None and state.cadence is not None


def every_steps(cluster: Cluster, run: SlurmRun) -> int:
    """As a user sees it."""
    code, told, error = jurymast(cluster, "status", str(run.directory.root), "--json")
    assert code == 0, error
    found: int = json.loads(told)["cadence"]["every_steps"]
    return found


def test_failures_shorten_the_cadence_and_quiet_lengthens_it_at_one_step_on_all_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    policy = cluster.shared / f"{tmp_path.name}.yaml"
    policy.write_text(json.dumps(POLICY))
    policy.chmod(0o644)
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", "--policy", str(policy),
        arguments=("--steps", "1000000", "--step-time", "0.02", "--save-every", "auto", "--tell-saves"),
    )  # fmt: skip
    run.wait_step(20)
    assert jurymast(cluster, "save", str(run.directory.root))[0] == 0  # now it is known what a save costs
    state = run.wait("a cadence", lambda s: bool(s.cadence and s.cadence.stall_s and s.cadence.interval_s))
    before = state.cadence
    assert before is not None
    run.wait("saves by it", lambda s: (s.saved_step or 0) >= before.first_step + before.every_steps)

    for number in range(KILLS):
        state = run.wait("the next steps", lambda s: working(s) and s.step > s.best_step - 1)
        so_far = len(state.incidents)
        kill_rank(run, state.placement[number % 3])
        run.wait("its end", lambda s, so_far=so_far: len(s.incidents) > so_far)  # type: ignore[misc]
    state = run.wait("the shorter cadence", lambda s: working(s) and bool(s.cadence and s.cadence.stall_s))
    hurried = state.cadence
    assert hurried is not None
    assert hurried.mtbf_s < 0.7 * before.mtbf_s
    # A stall's own length varies on a busy machine: without its part of it the interval goes with the rate.
    assert hurried.interval_s / hurried.stall_s**0.5 < 0.85 * before.interval_s / before.stall_s**0.5
    assert every_steps(cluster, run) == (run.state().cadence or hurried).every_steps
    attempt = state.attempt

    def calm(state: RunState) -> bool:
        told = state.cadence
        return told is not None and told.mtbf_s > 1.3 * hurried.mtbf_s and not told.by

    state = run.wait("the longer cadence", calm, limit_s=240)
    quiet = state.cadence
    assert quiet is not None
    assert state.attempt == attempt
    assert quiet.interval_s / quiet.stall_s**0.5 > 1.15 * hurried.interval_s / hurried.stall_s**0.5
    run.wait("saves by it", lambda s: (s.saved_step or 0) >= quiet.first_step + quiet.every_steps, 60)
    assert every_steps(cluster, run) == quiet.every_steps
    assert jurymast(cluster, "cancel", str(run.directory.root))[0] == 0
    run.wait_end()
    # Two cadences in one attempt: every rank has changed at the very same step.
    assert len([e for e in agreed(run) if e.attempt == attempt]) >= 2
    assert len(all_alike(run, attempt)) >= 3
