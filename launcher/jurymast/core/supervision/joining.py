"""What a hello tells that nobody has heard, or an earlier supervisor has not recorded: how ranks and tasks
have ended, and what the agent has missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import asdict

from jurymast.core.run import tasks
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.run import Phase, RunState


def ended_before(state: RunState, node: str, hello: msg.Hello, now: float) -> Iterator[ev.Event]:
    """Tell which ranks have failed on this node, how tasks, each for itself, have ended, or that they train.
    Each recorded launch knew of what ended before it, and some of that may have begun anew. To be recorded
    one by one: what follows depends on it."""
    for said in hello.ended:
        if said.attempt < (state.launched if state.alone else state.attempt):
            continue
        if isinstance(said, msg.Finished):
            yield from tasks_done(state, state.attempt, said.ranks, now)
        elif (node, said.rank, said.error) not in state.findings.failures and (
            said.rank not in tasks.ended(state)
        ):
            yield ev.WorkerFailed(t=now, node=node, **asdict(said) | {"attempt": state.attempt})
    if hello.group_made and state.alone:
        rank = state.places.get(node, 0) * state.ranks_per_node
        yield ev.GroupMade(t=now, attempt=state.attempt, node=node, rank=rank)


def tasks_done(state: RunState, attempt: int, ranks: Sequence[int], now: float) -> list[ev.Event]:
    """Tell at once which tasks, each for itself, have ended with exit code 0: they are not done again,
    whichever node is lost next."""
    new = tuple(rank for rank in ranks if rank not in state.done)
    return [ev.RanksEnded(t=now, attempt=attempt, ranks=new)] if new and state.alone else []


def is_half_told(state: RunState, node: str, hello: msg.Hello, told_by_another: int, *, ours: bool) -> bool:
    """Whether this node missed what to restore, which the others were told, by an earlier supervisor, in the
    attempt `told_by_another`, and which is no longer known. In another attempt all are told the same."""
    launching = (state.phase, state.attempt) == (Phase.LAUNCHING, told_by_another)
    told = ours and hello.ranks in ("starting", "running", "finished")
    return launching and not told and node in state.places


def missed(state: RunState, node: str, hello: msg.Hello, now: float, *, ours: bool) -> ev.Event | None:
    """Return what the agent may have reported while there was no connection. `ours`: it has this attempt's
    ranks."""
    attempt, ranks, port = hello.attempt, hello.ranks, hello.store_port
    if ranks == "finished" and ours:
        return ev.NodeFinished(t=now, node=node, attempt=attempt)
    if ranks in ("waiting", "finished"):
        if ours and state.phase in (Phase.RUNNING, Phase.STOPPING):
            return ev.WorkersStopped(t=now, node=node, attempt=attempt, store_port=port, spared=hello.spared)
        return ev.NodeReady(t=now, node=node, store_port=port)
    if ranks == "warming" and ours:  # its host died, and with it the ranks
        return ev.WorkersStopped(t=now, node=node, attempt=attempt, store_port=0)
    if ranks == "running" and ours:
        return ev.WorkersStarted(t=now, node=node, attempt=attempt, pids=hello.pids)
    return None
