"""Tasks that may each be for themselves: until one of them makes a process group, srun's rules hold. A task
that has ended is not started again, even if a node is lost that has others: see `ended`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jurymast.core.judges.attribution import NEAR_S
from jurymast.core.state import events as ev
from jurymast.core.state.run import Findings, Phase, Role, RunState
from jurymast.core.state.texts import count


def ended(state: RunState) -> tuple[int, ...]:
    """The tasks that the next attempt does not start: those that have ended, with or without an error. None
    if they are ranks of one training."""
    failed = {rank for _, rank, _ in state.findings.failures if rank >= 0}
    return tuple(sorted(state.done | failed)) if state.alone else ()


def told(state: RunState) -> str:
    """What people are told of tasks at a launch."""
    over = len(ended(state))
    text = f"; {count(over, 'task')} that ended before not started again" if over else ""
    again = state.alone and state.attempt > 1
    return text + (
        "; all others begin anew (with srun --no-kill, those of other nodes go on)" if again else ""
    )


def none_left(state: RunState, node: str) -> bool:
    """Whether all tasks of a placed node have ended, so that its loss concerns nobody."""
    known = state.done | {one.rank for one in remembered(state, [node]).failures.values()}
    return state.alone and set(_of(state, node)) <= known


def ended_alone(state: RunState, event: ev.WorkersStopped) -> bool:
    """Whether a node's tasks, each for itself, have all ended, and not because they were stopped: a
    supervisor that is gone may have ordered that."""
    runs = state.alone and state.phase in (Phase.LAUNCHING, Phase.RUNNING) and event.attempt == state.attempt
    return runs and event.node in state.places and {*_of(state, event.node)} <= {*ended(state)}


def is_told_by_trusted(state: RunState, node: str) -> bool:
    """Whether what this node says of tasks that failed counts in any phase: it is not out for a reason that
    may be theirs as well."""
    return node in state.nodes and state.nodes[node].role not in (Role.FAILED, Role.SUSPECT)


def done_on(state: RunState, node: str) -> None:
    """All tasks of a placed node have ended, those that did not fail with exit code 0."""
    note_done(state, set(_of(state, node)) - set(ended(state)))


def note_done(state: RunState, ranks: Iterable[int]) -> None:
    if state.alone:
        state.done.update(ranks)


def are_ranks(state: RunState) -> list[ev.WorkerFailed]:
    """The tasks are ranks of one training. Return those that failed before, which count now."""
    state.alone, state.done = False, set()
    return list(state.findings.failures.values())


def remembered(state: RunState, out: Collection[str] = ()) -> Findings:
    """What is still known when the next attempt begins: which tasks have failed, but for those that may have
    failed because their nodes are `out` now."""
    failures = state.findings.failures.items() if state.alone else ()
    since = state.now - NEAR_S
    known = {key: one for key, one in failures if one.rank >= 0 and one.exit_code}
    return Findings(failures={key: one for key, one in known.items() if one.node not in out or one.t < since})


def _of(state: RunState, node: str) -> range:
    each = state.ranks_per_node
    return range(state.places[node] * each, (state.places[node] + 1) * each)
