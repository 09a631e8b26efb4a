"""Ranks that leave after a signal that they caught: some before others, as under srun. Those that lose their
peers by that have not failed, and the others may save for as long as `RunState.may_leave` says."""

from __future__ import annotations

from jurymast.core.judges.attribution import Cause
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase, RunState

# A rank may lose its peer some time before it is known that this one has left: heartbeats tell.
NEWS_S = 2.0
# How a shell tells of an end by a signal, and a script of one that it caught: HUP, INT, QUIT, USR1, USR2,
# ALRM, TERM.
BY_SIGNAL = frozenset(128 + number for number in (1, 2, 3, 10, 12, 14, 15))


def may_explain(state: RunState, failure: ev.WorkerFailed) -> bool:
    """Whether a rank may have failed because others leave, or leaves itself."""
    return failure.rank >= 0 and failure.exit_code != 0 and _waits(state)


def note_done(state: RunState, event: ev.RanksEnded) -> None:
    """Take in which ranks have ended with exit code 0."""
    if state.may_leave(state.now):
        state.done.update({*event.ranks} - {*event.unknown})


def done_on(state: RunState, node: str) -> None:
    """Take in that a node's ranks have all ended: with exit code 0 unless it has told of another."""
    if not state.alone and state.may_leave(state.now):
        first = state.places[node] * state.ranks_per_node
        failed = {failure.rank for failure in state.findings.failures.values()}
        state.done.update({*range(first, first + state.ranks_per_node)} - failed)


def ended(state: RunState, event: ev.WorkersStopped) -> bool:
    """Whether all ranks of a node have ended, some of them with an error, as others leave."""
    failed = {failure.node for failure in state.findings.failures.values()}
    return event.attempt == state.attempt and event.node in failed and _waits(state)


def failed_at(state: RunState) -> float | None:
    """When a rank failed that is explained by nothing; None if none has."""
    if state.phase is not Phase.RUNNING or state.alone or not state.findings.failures or _waits(state):
        return None
    return _first(state)


def explains(state: RunState, cause: Cause) -> bool:
    """Whether the ranks have left, and no other attempt is wanted."""
    return cause.kind == "worker_exit" and cause.exit_code in BY_SIGNAL and state.may_leave(state.now)


def as_ordered(state: RunState) -> bool:
    """Whether ranks that end with exit code 0 may do so because Slurm ends the job, so that this is no end
    of the training. It is, if Slurm does not end the job after all."""
    order = state.end_order
    caught = order is not None and state.warned_at >= order.at and state.may_leave(state.now)
    return caught and not state.alone


def begun(state: RunState) -> bool:
    """Whether some ranks are known to have left, if they caught a signal."""
    failures = state.findings.failures.values()
    finished = state.finished - {one.node for one in failures}
    return bool(state.done or finished) or any(one.exit_code in BY_SIGNAL for one in failures)


def _waits(state: RunState) -> bool:
    if state.phase is not Phase.RUNNING or not state.may_leave(state.now):
        return False
    return begun(state) or state.now < _first(state) + NEWS_S


def _first(state: RunState) -> float:
    return min((failure.t for failure in state.findings.failures.values()), default=state.now)
