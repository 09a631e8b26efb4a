"""A node whose agent's connection was reset: the node is lost, or only its agent was killed for want of
memory. Then another agent starts there at once, and tells so. The program used the memory, so the node is not
at fault."""

from __future__ import annotations

from msgspec import structs

from jurymast.core.run.attribution import out_of_memory
from jurymast.core.run.state import Node, Phase, Role, RunState

# The next agent of a node that lives connects within this time (seconds).
LIMIT_S = 5.0


def awaited(state: RunState) -> bool:
    """Whether the word of a next agent is waited for. Ready spares take over at once, but a requeue costs
    more than that moment."""
    lost = {name for name in state.placement if state.nodes[name].role is Role.FAILED}
    closed = [e for e in state.findings.lost if e.how == "closed" and state.now < e.t + LIMIT_S]
    if state.end_order is not None or not any(e.node in lost for e in closed):
        return False
    return sum(node.usable for node in state.nodes.values()) < len(lost)


def explain(state: RunState, node: Node, kills: int) -> None:
    """Take in that the agent of a node that counts as lost was killed for want of memory. An incident that
    was told as the node's loss is told anew, as long as it is open."""
    node.cleared = True
    node.become(Role.JOINING, "warming up after its memory ran out", state.now)
    if node.name in state.places:
        state.stopped.add(node.name)
    findings, incident = state.findings, state.incident
    findings.lost = [structs.replace(e, oom_kills=kills) if e.node == node.name else e for e in findings.lost]
    told = state.phase is not Phase.STOPPING and incident is not None
    if told and incident is not None and (incident.cause, incident.node) == ("node_crash", node.name):
        cause = out_of_memory(node.name, kills)
        incident.cause, incident.charged, incident.signature = cause.kind, cause.charged, cause.signature
        incident.evidence = cause.evidence
