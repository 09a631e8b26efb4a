"""Nodes in place of those that a run has lost: each comes with a small Slurm job of its own, whose agent
joins as a spare. While one may come in time, a run without spares holds its nodes, memory and all, instead of
being requeued."""

from __future__ import annotations

from jurymast.core.state import events as ev
from jurymast.core.state.run import Node, Phase, Refill, Role, RunState

# So many small jobs in a row that Slurm refuses, or that end before their nodes are ready, show that no node
# can be had; a run that needs none at once asks again after this long, in seconds.
RETRY_S, FAILURES_MAX = 2.0, 3
ASK_AGAIN_S = 600.0
# Phases in which the run has nodes and goes on.
_GOES_ON = (Phase.RUNNING, Phase.LAUNCHING, Phase.STOPPING, Phase.WAITING)


def asked(state: RunState, event: ev.RefillAsked) -> None:
    state.refills[event.number] = Refill(event.number, event.t)
    state.refills_asked = max(state.refills_asked, event.number)


def refused(state: RunState, event: ev.RefillRefused) -> None:
    if state.refills.pop(event.number, None) is not None:
        _failed(state, event.why, event.t)


def expected(state: RunState, event: ev.RefillExpected) -> None:
    if (refill := state.refills.get(event.number)) is not None:
        refill.job, refill.starts_at = event.job, event.starts_at


def started(state: RunState, event: ev.RefillStarted) -> None:
    """The agent of a small job that has just been ended may still join: that node goes at any time."""
    refill = state.refills.get(event.number)
    if refill is not None:
        if refill.node:
            return
        refill.node, refill.starts_at = event.node, None
    if event.node not in state.nodes:
        reason = "its small job has " + ("ended" if refill is None else "started")
        node = Node(event.node, len(state.nodes), reason=reason, since=event.t, returned=refill is None)
        state.nodes[event.node] = node


def ended(state: RunState, event: ev.RefillEnded) -> None:
    refill = state.refills.pop(event.number, None)
    if refill is None:
        return
    node = state.nodes.get(refill.node)
    if node is not None:
        node.returned = True
        if not node.incarnation:
            node.faultless = True
            node.become(Role.FAILED, event.why, event.t)
    if not (event.unneeded or refill.served):
        _failed(state, event.why, event.t)


def came(state: RunState, node: str) -> None:
    """A node is ready. If a small job has brought it, nodes can be had. One that only joins may lack what all
    others lack as well, and the run would ask for one after the other."""
    for refill in state.refills.values():
        if refill.node == node:
            refill.served = True
            state.refill_failures, state.refill_trouble = 0, ""


def _failed(state: RunState, why: str, t: float) -> None:
    state.refill_failures += 1
    state.refill_trouble, state.refill_failed_at = why, t


# ---- what is wanted


def lacking(state: RunState) -> int:
    """How many nodes the run has too few (below 0: too many), besides those that are asked for."""
    here = sum(_stays(node) for node in state.nodes.values())
    return state.active + state.spares - here - len(coming(state))


def _stays(node: Node) -> bool:
    return (node.role is not Role.FAILED or node.may_return) and not node.going


def coming(state: RunState) -> list[Refill]:
    """Those that are asked for, and have no node yet."""
    return [refill for refill in state.refills.values() if not refill.node]


def may_ask(state: RunState) -> bool:
    """Whether the run may ask for a node, if it lacks one. Slurm could give two small jobs the same node, so
    one is asked for after the other."""
    if not state.may_refill or state.phase not in _GOES_ON or state.end_order is not None:
        return False
    if coming(state) or state.now < state.refill_failed_at + RETRY_S:
        return False
    return state.refill_failures < FAILURES_MAX or state.now >= state.refill_failed_at + ASK_AGAIN_S


def hold_until(state: RunState) -> float:
    """Until when the run holds its nodes for one in place of the last that was lost (Unix time)."""
    decided = state.incidents[-1].decided_at if state.incidents else None
    return (state.now if decided is None else decided) + state.settings.hold_s


def why_not_held(state: RunState, until: float | None = None) -> str:
    """Why the run does not wait for a node that comes with a small job; "" if it does. It holds its nodes
    `until` then, by default for the node that was lost last."""
    until = hold_until(state) if until is None else until
    if not state.may_refill:
        return "no spare came in time"
    if state.end_order is not None:
        return "Slurm ends the job"
    starting = any(_starts(state, refill) for refill in state.refills.values())
    if state.now >= until and not starting:
        return f"no node came in {state.settings.hold_s:.0f} s"
    late = [refill.starts_at for refill in coming(state) if refill.starts_at is not None]
    if late and min(late) > until:
        return f"Slurm expects a node in {min(late) - state.now:.0f} s, later than the policy's hold"
    if not coming(state) and not starting and state.refill_failures >= FAILURES_MAX:
        return f"Slurm gives no other node: {state.refill_trouble}"
    return ""


def would_hold(state: RunState) -> bool:
    """Whether the run would hold its nodes if it lost one now, and no spare were ready."""
    return not why_not_held(state, state.now + state.settings.hold_s)


def _starts(state: RunState, refill: Refill) -> bool:
    """Whether its node has yet to join, or to get ready, and may do so in time."""
    node = state.nodes.get(refill.node)
    late = node is None or state.now >= node.since + state.settings.join_limit_s
    return node is not None and node.role is Role.JOINING and not late
