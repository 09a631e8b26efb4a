"""Recovery in process on a real cluster: a rank is killed, then a node loses power, and the others live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.runs import SCRIPTS
from support.slurm_runs import SlurmRun, policy_file, power_loss, submit, weights
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

SCRIPT = SCRIPTS / "train_in_process.py"
TRAIN = ("--steps", "260")
FAULT_AT = 40


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN, nodes=3, each=1, script=SCRIPT.name)


def pids(run: SlurmRun, attempt: int) -> dict[str, tuple[int, ...]]:
    return {e.node: e.pids for e in run.events() if isinstance(e, ev.WorkersStarted) and e.attempt == attempt}


def test_ranks_live_on_beside_a_killed_one_and_a_node_without_power(
    cluster: Cluster, tmp_path: Path, undisturbed: str
) -> None:
    policy = policy_file(cluster, tmp_path, "health: {straggler: off}")
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", "--policy", policy, script=SCRIPT,
        arguments=(*TRAIN, "--step-time", "0.04", "--save-every", "20 steps",
                   "--fault", f"SIGKILL:{FAULT_AT}:1:begin"),
    )  # fmt: skip
    state = run.wait("the first recovery", lambda s: len(s.incidents) == 1 and s.incident is None)
    killed, first = state.placement[1], state.incidents[0]
    assert (first.cause, first.action, first.node) == ("worker_killed", "in process", killed), run.story()
    assert first.step_restored == FAULT_AT, "a step was lost"
    before, after = pids(run, 1), pids(run, 2)
    assert {node for node in before if before[node] == after[node]} == {*state.placement} - {killed}
    safe = run.wait_safe(80)
    lost = next(name for name in reversed(safe.placement) if name != safe.host)
    power_loss(run, lost)
    state = run.wait_end()
    second = state.incidents[1]
    assert (second.action, second.node) == ("swap", lost), run.story()
    assert "2 of 3 ranks go on in their processes" in second.why
    assert (second.step_restored or 0) >= 80
    last = pids(run, 3)
    stayed = {*safe.placement} - {lost}
    assert {node: last[node] for node in stayed} == {node: after[node] for node in stayed}
    assert (state.phase.value, len(state.incidents)) == ("succeeded", 2), run.story()
    assert weights(cluster, tmp_path) == undisturbed
