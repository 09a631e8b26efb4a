"""Ends of the job that Slurm or somebody ordered: preemptions, requeues by hand, cancellations, time limits.

None of them is a failure. Slurm signals all processes of a job, so some ranks and agents may end before the
supervisor knows the reason; what they report belongs to the order.
"""

from __future__ import annotations

import math

from jurymast.core.judges import explained, loops
from jurymast.core.judges.attribution import OF_AN_END, cause_of_end
from jurymast.core.run.ladder import spent
from jurymast.core.run.recovery import finish, open_incident, settle
from jurymast.core.state.effects import Instruction
from jurymast.core.state.incident import NOBODY, ORDERED, PREEMPTION, Incident
from jurymast.core.state.run import EndOrder, Phase, Role, RunState
from jurymast.errors import RunFailedError

# So long before the order may come what it does to ranks and agents, in seconds.
BEFORE_ORDER_S = 5.0


def finish_from_outside(state: RunState, how: str, exit_code: int, reason: str) -> list[Instruction]:
    """A user or Slurm ends the run. Ranks that ended just before are part of that and make no incident."""
    _explain(state)
    if state.phase is Phase.STOPPING and state.incident is not None and not state.findings.lost:
        state.incidents.pop()
    return finish(state, how, exit_code, reason)


def step_ended(state: RunState) -> None:
    """Slurm ended the step of all agents. Those that it killed first may have been taken for lost."""
    state.end_order, state.step_alone = EndOrder(state.now, "cancelled"), True
    _acquit(state, state.end_order)


def lost_nodes(state: RunState) -> list[str]:
    """The nodes that later steps of the job cannot use. Whose agents ended with their step, or their job, is
    well."""
    order = state.end_order if state.ended else None
    until = math.inf if order is None else order.at - BEFORE_ORDER_S
    return sorted(n.name for n in state.nodes.values() if n.role is Role.FAILED and n.since < until)


def end_ordered(state: RunState) -> list[Instruction]:
    """Slurm ends the job, and may have said why. The run goes on when it starts the job again, if the budget
    for that is not spent."""
    order = state.end_order
    if order is None or not order.why:
        return []
    _explain(state)
    incident = _part_of(state, order)
    known = incident is not None and incident.cause == "preempted"
    if order.why == "preempted" and (why := spent(state, PREEMPTION, coming=not known)):
        if not known:
            open_incident(state, state.now, state.now)
        return _stop(state, settle(state, cause_of_end(order)), why)
    return []  # the incident begins when the ranks are gone


def goes_on(state: RunState) -> None:
    """Slurm does not end the job after all: what waited for that goes on."""
    ordered, state.end_order = state.end_order is not None, None
    if ordered and state.phase is Phase.WAITING:
        state.not_before = min(state.not_before, state.now)


def undecided(state: RunState) -> bool:
    """Whether an allocation that is gone ended without a decision of this run."""
    return not state.ended and state.phase not in (Phase.QUEUED, Phase.REQUEUED)


def unexplained(state: RunState) -> bool:
    """Whether the run goes on, and Slurm has not said why an allocation that is gone ended. Slurm may have
    ended it before the run, which had decided to leave, did so."""
    gone = not state.ended and state.phase is not Phase.QUEUED
    return gone and (state.end_order is None or not state.end_order.why)


def next_allocation(state: RunState, t: float, told: str) -> list[Instruction]:
    """At `t` there is another allocation. `told`: how the one before ended, as Slurm says afterwards, or
    ""."""
    if told and unexplained(state):
        since = state.end_order.at if state.end_order is not None else _gone_since(state, t)
        state.end_order = EndOrder(since, told)
    if undecided(state) or _preempted_while_leaving(state):
        return _allocation_gone(state, t)
    return []


def _gone_since(state: RunState, t: float) -> float:
    """Since when the allocation may have been gone, of which nobody saw the end: since the last step, or
    since what made the run leave it, which may have been a part of the end."""
    left = state.phase is Phase.REQUEUED and state.incidents
    return state.incidents[-1].detected_at if left else state.stepped_at or t


def _preempted_while_leaving(state: RunState) -> bool:
    """Whether Slurm preempted the job when the run had decided to leave it for another reason. That is one
    more cause; any other end is what the run wanted."""
    preempted = state.end_order is not None and state.end_order.why == "preempted"
    return state.phase is Phase.REQUEUED and preempted


def _allocation_gone(state: RunState, t: float) -> list[Instruction]:
    """The allocation did not end by a decision of this run, or not by that alone."""
    order, cause = state.end_order, cause_of_end(state.end_order)
    _explain(state)
    if order is not None and cause.kind in ORDERED:
        _acquit(state, order)
    begun = _part_of(state, order)
    if begun is None or begun.cause not in ("", cause.kind):
        decided_at = state.incidents[-1].decided_at if state.incidents else None
        at = t if order is None else min(t, max(order.at, state.stepped_at, decided_at or 0.0))
        open_incident(state, at, (state.stepped_at or t) if order is None else at)
    incident = settle(state, cause)
    if order is not None:  # all the time since then was spent in Slurm's queue
        incident.stopped_at = incident.decided_at = incident.detected_at
        state.ordered_restarts += incident.cause in ORDERED
    incident.action = "requeue"
    why = "" if cause.charged == NOBODY else spent(state, cause.charged)
    if cause.kind not in ORDERED:
        why = loops.endless(state) or why
    return _stop(state, incident, why) if why else []


def _stop(state: RunState, incident: Incident, why: str) -> list[Instruction]:
    incident.action, incident.why = "stop", why
    return finish(state, "failed", RunFailedError.exit_code, incident.reason)


def count_exposure(state: RunState, t: float) -> None:
    """A new allocation is there at `t`: nodes could fail until the end of the one before, and none while the
    job was in the queue."""
    if state.failures is None or not state.incidents:
        return
    newest = state.incidents[-1]
    ended_at = newest.fault_at if newest.cause == "allocation_lost" else newest.decided_at or newest.fault_at
    state.failures.watched(ended_at, state.exposed, state.fresh_until())
    state.failures.watched(t, 0)


def _explain(state: RunState) -> None:
    """Charge what the order itself did to ranks and agents to the order, and not to them."""
    order = state.end_order
    incident = _part_of(state, order)
    if order is not None and incident is not None and incident.cause in OF_AN_END:
        explained.recharge(state, incident, cause_of_end(order))


def _acquit(state: RunState, order: EndOrder) -> None:
    """Nodes that were lost just before count for nothing against them: their agents were ended, too."""
    for node in state.nodes.values():
        own = node.bad or node.drained  # a fault that was found, or a wish
        if node.role is Role.FAILED and not own and node.since >= order.at - BEFORE_ORDER_S:
            state.acquitted[node.name] = (node.since, state.now)
            state.excluded.pop(node.name, None)


def _part_of(state: RunState, order: EndOrder | None) -> Incident | None:
    """The open incident, if it is what the order did."""
    incident = state.incident
    if order is None or incident is None or incident.detected_at < order.at - BEFORE_ORDER_S:
        return None
    return incident
