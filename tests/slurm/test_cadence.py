"""A run that fails more often saves more often. That it saves less often again once that is past is shown in
simulated time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from jurymast.core.judges.forecast import Saving, optimal_interval_s
from jurymast.core.state.events import CadenceSet
from jurymast.core.state.run import RunState, expected_mtbf_s
from support.saves import agreed, all_alike
from support.slurm_runs import SlurmRun, jurymast, kill_rank, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.timeout(500)]

# Three nodes that fail every 5 minutes by what the policy says, so that saves are seconds apart and little is
# done again after a failure. Two of them one second apart are two.
POLICY = {"failures": {"rate": 96000, "burst": "1s"}, "health": {"preflight": "off"}}
# What the policy says weighs as much as ten failures: with so many more the rate is worth another cadence.
HURRIED, KILLS_MOST = 0.6, 24


def working(state: RunState) -> bool:
    return state.incident is None and state.first_step_at is not None and state.cadence is not None


def optimal(cadence: CadenceSet) -> bool:
    """The interval goes with the failure rate and with what a save costs, which varies on a busy machine."""
    saving = Saving(cadence.stall_s, cadence.copy_s, cadence.slowdown)
    best_s = max(cadence.step_s, optimal_interval_s(saving, cadence.mtbf_s))
    return cadence.interval_s == pytest.approx(best_s, rel=0.03)


def shown_as_agreed(cluster: Cluster, run: SlurmRun) -> bool:
    """A user sees the newest cadence, or the one before it if it changes just then."""
    code, told, error = jurymast(cluster, "status", str(run.directory.root), "--json")
    assert code == 0, error
    return json.loads(told)["cadence"]["every_steps"] in [e.every_steps for e in agreed(run)[-2:]]


@pytest.mark.long
def test_failures_shorten_the_cadence_at_one_step_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    policy = cluster.shared / f"{tmp_path.name}.yaml"
    policy.write_text(json.dumps(POLICY))
    policy.chmod(0o644)
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", "--policy", str(policy),
        arguments=("--steps", "1000000", "--step-time", "0.05", "--save-every", "auto", "--tell-saves"),
    )  # fmt: skip
    run.wait_step(20)
    assert jurymast(cluster, "save", str(run.directory.root))[0] == 0  # now it is known what a save costs
    state = run.wait("a cadence", lambda s: bool(s.cadence and s.cadence.stall_s and s.cadence.interval_s))
    before = state.cadence
    assert before is not None
    run.wait("saves by it", lambda s: (s.saved_step or 0) >= before.first_step + before.every_steps)

    for number in range(KILLS_MOST):
        state = run.wait("the next steps", lambda s: working(s) and s.step > s.best_step - 1)
        if expected_mtbf_s(state, time.time()) < HURRIED * before.mtbf_s:
            break
        so_far = len(state.incidents)
        kill_rank(run, state.placement[number % 3])
        run.wait("its end", lambda s, so_far=so_far: len(s.incidents) > so_far)  # type: ignore[misc]
    state = run.wait("the shorter cadence", lambda s: working(s) and bool(s.cadence and s.cadence.stall_s))
    hurried = state.cadence
    assert hurried is not None
    assert hurried.mtbf_s < 0.7 * before.mtbf_s
    assert optimal(before)
    assert optimal(hurried)
    assert shown_as_agreed(cluster, run)
    attempt = state.attempt
    run.wait("saves by it", lambda s: (s.saved_step or 0) >= hurried.first_step + 3 * hurried.every_steps, 60)
    assert jurymast(cluster, "cancel", str(run.directory.root))[0] == 0
    run.wait_end()
    assert len(all_alike(run, attempt)) >= 3
