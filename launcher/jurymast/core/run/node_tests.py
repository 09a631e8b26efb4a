"""The state machine's part in tests of nodes: when they are due, and what a result means for a node.

One test runs at a time, and none while the node's own ranks run. Whatever goes wrong with a test, its time is
up at `RunState.test_until`, and the run continues.
"""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.events import HealthFound, NodeTested
from jurymast.core.nodes.findings import HARDWARE, Verdict
from jurymast.core.nodes.tests import limit_s
from jurymast.core.run import blame
from jurymast.core.run.instructions import Instruction, TestNodes
from jurymast.core.run.state import Node, Phase, Role, RunState

# With two partners that are known to work, a test can show whose fault a slow connection is.
PARTNERS = 2
SUSPECT_REASON = "suspect nodes are tested before use"
# A bad node's finding.
PROBE, WRONG_RESULT = "preflight", "wrong-result"


def going_on(state: RunState) -> bool:
    """Return whether results are still worth waiting for; forgets tests whose time is up."""
    if state.testing and state.now >= state.test_until:
        for name in state.testing:
            if name in state.nodes:
                state.nodes[name].tested = Verdict.UNKNOWN.value
        state.testing = set()
    return any(name in state.nodes and state.nodes[name].role is not Role.FAILED for name in state.testing)


def before_first_attempt(state: RunState) -> list[Instruction]:
    """Test every node that has joined, once per allocation, also while its torchrun host is warming up."""
    if state.pretested:
        return []
    state.pretested = True
    due = [node for node in state.nodes.values() if node.incarnation and _is_due(state, node)]
    return [_order(state, due, "before the first attempt on these nodes")] if due else []


def before_use(state: RunState, nodes: Sequence[Node]) -> list[Instruction] | None:
    """Return None if these suspects may be used now; otherwise the tests to carry out first."""
    waiting = going_on(state)
    due = [node for node in nodes if _is_due(state, node)]
    if waiting and (due or any(node.name in state.testing for node in nodes)):
        return []
    return [_order(state, due, SUSPECT_REASON)] if due else None


def suspects(state: RunState) -> list[Instruction]:
    """While the run continues without them, test suspects whose ranks are gone, with idle spares as
    partners."""
    if state.phase is not Phase.RUNNING or going_on(state):
        return []
    left = [node for node in state.nodes.values() if node.role is Role.SUSPECT and node.ready]
    due = [node for node in left if _is_due(state, node)]
    if not due:
        return []
    partners = [node.name for node in state.spare_nodes() if node.role is Role.SPARE][:PARTNERS]
    return [_order(state, due, SUSPECT_REASON, tuple(partners))]


def again(state: RunState, reason: str) -> list[Instruction]:
    """Return what a supervisor that takes over must order again."""
    if not going_on(state):
        return []
    limit = state.test_until - state.now
    return [TestNodes(nodes=tuple(sorted(state.testing)), limit_s=limit, reason=reason)]


def result(state: RunState, event: NodeTested) -> HealthFound | None:
    """A node's tests are over. Returns what they found, to be judged like findings of probes.

    Nodes that run ranks by now were needed more urgently.
    """
    state.testing.discard(event.node)
    node = state.nodes.get(event.node)
    if node is None or node.role not in (Role.SPARE, Role.SUSPECT, Role.JOINING):
        return None
    node.slowness = event.slowness
    verdict = Verdict(event.verdict)
    if verdict is Verdict.SUSPECT or (verdict is Verdict.BAD and state.settings.bad_nodes != "report"):
        node.become(Role.SUSPECT, f"tested: {event.message}", event.t)
    elif verdict is Verdict.OK and node.role is Role.SUSPECT:
        role = Role.SPARE if node.ready else Role.JOINING
        node.become(role, f"passed its tests after: {node.reason}", event.t)
        blame.passed_tests(state, node)
    node.tested = verdict.value
    if verdict not in (Verdict.BAD, Verdict.OK):
        return None
    return HealthFound(
        t=event.t, node=node.name, probe=PROBE, code=WRONG_RESULT, verdict=event.verdict, kind=HARDWARE,
        message=event.message, at=event.t,
    )  # fmt: skip


def _is_due(state: RunState, node: Node) -> bool:
    out = node.role is Role.FAILED
    return not out and not node.tested and limit_s(state.settings, node.gpus) > 0


def _order(state: RunState, due: Sequence[Node], reason: str, partners: tuple[str, ...] = ()) -> TestNodes:
    limit = max(limit_s(state.settings, node.gpus) for node in due)
    state.testing = {node.name for node in due}
    state.test_until = state.now + limit
    return TestNodes(nodes=tuple(node.name for node in due), partners=partners, limit_s=limit, reason=reason)
