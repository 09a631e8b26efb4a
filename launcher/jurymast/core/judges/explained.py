"""What is known of an incident only after it was told.

A node whose agent's connection was reset is lost, or only its agent was killed for want of memory. Then
another agent starts there at once, and tells so, maybe when the node has been replaced already. The program
used the memory, so the node is not at fault.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from jurymast.core.judges.attribution import OF_A_LOSS, Cause, Surroundings, lost_cause
from jurymast.core.state.events import NodeLost
from jurymast.core.state.incident import INFRASTRUCTURE, Incident
from jurymast.core.state.run import Node, Role, RunState

# The next agent of a node that lives connects within this time (seconds). If Slurm has ended the step of all
# agents, the batch process says so within the second.
LIMIT_S, NOBODY_LIMIT_S = 5.0, 10.0


def awaited(state: RunState) -> bool:
    """Whether the word of a next agent is waited for, or, if none is left, that of the batch process. Ready
    spares take over at once, but a requeue costs more than that moment."""
    lost = {name for name in state.placement if state.nodes[name].role is Role.FAILED}
    if state.end_order is not None or sum(node.usable for node in state.nodes.values()) >= len(lost):
        return False
    if len(lost) == len(state.placement) and may_have_ended(state):
        return True
    return any(
        e.node in lost and e.how == "closed" and state.now < e.t + LIMIT_S for e in state.findings.lost
    )


def may_have_ended(state: RunState) -> bool:
    """Whether Slurm may have ended the step of all agents a moment ago. The last ones end a second after the
    first."""
    nodes = state.nodes.values()
    ended = [
        node.since for node in nodes if node.role is Role.FAILED and node.lost_how in ("closed", "taken")
    ]
    limit_s = LIMIT_S if any(node.role is not Role.FAILED for node in nodes) else NOBODY_LIMIT_S
    return state.end_order is None and bool(ended) and state.now < max(ended) + limit_s


def explain(state: RunState, node: Node, kills: int) -> Cause | None:
    """Take in that the agent of a node that counts as lost was killed for want of memory. Nothing counts
    against the node. An incident that was told as its loss is told anew, also if it is over: return what it
    is told as."""
    lost_at = node.since
    node.cleared = True
    node.become(Role.JOINING, "warming up after its memory ran out", state.now)
    state.excluded.pop(node.name, None)
    if (frail := state.frail.get(node.name)) is not None and frail.fresh_until is None:
        state.frail[node.name] = replace(frail, fresh_until=0.0)
    if node.name in state.places:
        state.stopped.add(node.name)

    def told(lost: NodeLost) -> NodeLost:
        this = (lost.node, lost.t) == (node.name, lost_at)
        return structs.replace(lost, oom_kills=kills) if this else lost

    state.findings.lost = [told(lost) for lost in state.findings.lost]
    for incident in reversed(state.incidents):
        if (lost := tuple(map(told, incident.lost))) != incident.lost:
            incident.lost = lost
            if incident.cause in OF_A_LOSS:
                cause = lost_cause(lost, Surroundings(nodes=len(state.placement)))
                recharge(state, incident, cause)
                return cause
    return None


def recharge(state: RunState, incident: Incident, cause: Cause) -> None:
    """Give an incident another cause, now that more is known."""
    if state.failures is not None and incident.charged == INFRASTRUCTURE != cause.charged:
        state.failures.withdraw(incident.fault_at)
    state.recount()
    was = incident.evidence
    enter(incident, cause)
    incident.evidence = f"{cause.evidence}; before that was known: {was}" if was else cause.evidence


def enter(incident: Incident, cause: Cause) -> None:
    incident.cause, incident.charged, incident.signature = cause.kind, cause.charged, cause.signature
    incident.node, incident.rank, incident.evidence = cause.node, cause.rank, cause.evidence
