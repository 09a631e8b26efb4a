"""Faults that come while another is being answered, on a real cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.journal import initial_state
from support.saves import check_restores
from support.slurm_runs import TRAIN, SlurmRun, crash, kill_rank, submit, weights
from testcluster import Cluster, ClusterError

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

STEPS = 500
MORE = 20  # steps that are saved before the next fault


def test_a_fault_in_the_answer_to_a_fault_costs_no_bit_and_no_healthy_node(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """A node and a spare that cannot talk to each other from the beginning; a second failure right after a
    recovery; a supervisor that ends while ranks are stopped, and one that ends while nodes are told to
    start."""
    train = (*TRAIN, "--steps", str(STEPS))
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "3", arguments=train)
    run.wait_step(1)
    state = run.wait("all spares", lambda s: len(s.spare_nodes()) == 3)
    best, *others = [node.name for node in state.spare_nodes() if node.name != state.host]
    cluster.fault("part", state.placement[0], other=others[0])
    run.wait_safe(MORE)

    kill_rank(run, state.placement[1])
    run.wait("the next attempt", lambda s: (s.attempt, s.phase) == (2, Phase.RUNNING))
    kill_rank(run, state.placement[2])
    saved_more(run)

    with frozen_host(cluster, state.placement[1]):  # it does not stop its ranks
        kill_rank(run, state.placement[0])
        run.wait("the stop", lambda s: s.phase is Phase.STOPPING)
        kill_supervisor(run)
    saved_more(run)

    with frozen_host(cluster, best):  # it starts none
        crash(run, state.placement[2])
        run.wait("the launch", lambda s: s.phase is Phase.LAUNCHING and s.restore is not None)
        kill_supervisor(run)
    saved_more(run)

    end = run.wait_end()
    assert end.exit_code == 0, run.story()
    # There may be more: on a busy machine a node takes over, and the batch process then from that one.
    assert {Phase.STOPPING, Phase.LAUNCHING} <= {*phases_at_take_over(run)}, run.story()
    failed, suspect = (
        {node.name for node in end.nodes.values() if node.role is role}
        for role in (Role.FAILED, Role.SUSPECT)
    )
    # The agent of a host that was frozen for long has ended it; then the spare that is cut off may be tried.
    ended = {e.node for e in run.events() if isinstance(e, ev.WorkersStopped) and not e.store_port}
    assert failed == {state.placement[2]}, run.story()
    assert suspect <= ended & {state.placement[1], best, others[0]}, run.story()
    assert (end.saved["peer"].step or 0) > STEPS / 2, "the spare that could not be reached held all up"
    check_restores(run, least=3 * MORE)
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=3)


@contextmanager
def frozen_host(cluster: Cluster, node: str) -> Iterator[None]:
    """The node's torchrun host."""
    pid = next(one.node_pid for one in cluster.processes(node) if named(one.pid) == "jurymast-host")
    cluster.fault("kill", node, pid=pid, signal="STOP")
    yield
    with suppress(ClusterError):  # on a busy machine its agent may have ended it by now
        cluster.fault("kill", node, pid=pid, signal="CONT")


def named(pid: int) -> str:
    """Its name; "" if it has ended by now."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def saved_more(run: SlurmRun) -> RunState:
    """The recovery is over, and more than before is safe."""
    state = run.wait("the recovery", lambda s: bool(s.incidents) and s.incident is None)
    return run.wait_safe(state.best_step + MORE)


def kill_supervisor(run: SlurmRun) -> None:
    """And wait for the one that its batch process starts in its place."""
    state = run.state()
    run.cluster.fault("kill", state.host, match=r" jurymast\.supervisor ", signal="KILL")
    run.wait("another supervisor", lambda s: s.epoch > state.epoch)


def phases_at_take_over(run: SlurmRun) -> list[Phase]:
    state, phases = initial_state(run.directory.plan()), list[Phase]()
    for event in run.events():
        if isinstance(event, ev.SupervisorStarted) and event.epoch > 1:
            phases.append(state.phase)
        step(state, event)
    return phases
