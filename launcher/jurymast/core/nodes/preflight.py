"""Has nodes tested: decides when tests are due, orders them from agents in rounds of pairs, gives the verdict
on each node, and decides what follows for the node.

One test runs at a time, and none while the node's own ranks run. Whatever goes wrong with a test, its time is
up at `RunState.test_until`, and the run continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jurymast.core.judges import blame
from jurymast.core.judges.tests import ROUNDS_MAX, Pairing, judge, next_round
from jurymast.core.judges.tests import limit_s as whole_s
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Instruction, Record, Send, TestNodes
from jurymast.core.state.events import HealthFound, NodeTested
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.findings import HARDWARE, Verdict
from jurymast.core.state.run import Node, Phase, Role, RunState

# ---- carrying tests out

# Shares of the time allowed: for tests alone, and for all of it, so that the verdicts come before its end.
ALONE_SHARE = 0.5
ALL_SHARE = 0.9
# A round that has less than its share of all the time that nodes may take shows nothing of who does not
# answer in it: a supervisor that took over has only the rest.
FAIR_SHARE = 0.99 * (ALL_SHARE - ALONE_SHARE) / ROUNDS_MAX
# Agents that were not connected receive an order when it is repeated.
REPEAT_S = 1.0


@dataclass
class Tests:
    """One order that is being carried out. `waiting`: whose answers are missing for the tests that run at
    most until `until`: for tests of a node alone, ("", node); for a round, (name of the pair, node)."""

    order: TestNodes
    began: float
    until: float
    asked_at: float
    waiting: set[tuple[str, str]] = field(default_factory=set)
    alone: dict[str, NodeTimes] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)  # the pairs of this round, by name
    answers: dict[tuple[str, str], msg.TestedPair] = field(default_factory=dict)
    played: list[Pairing] = field(default_factory=list)
    rounds: int = 0
    fair: bool = True  # the present round has its share of the time

    @property
    def nodes(self) -> list[str]:
        return [*self.order.nodes, *self.order.partners]

    @property
    def fit(self) -> list[str]:
        """Return the nodes that can be tested with others."""
        return [name for name in self.nodes if self.ports.get(name) and not self.alone[name].error]


class Preflight:
    """Carries out one `TestNodes` at a time; a new one ends it."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._tests: Tests | None = None

    def begin(self, order: TestNodes, now: float) -> list[Effect]:
        before = self._tests
        until = now + ALONE_SHARE * order.limit_s
        self._tests = tests = Tests(order, now, until, asked_at=now)
        tests.waiting = self._awaited(tests)
        effects = _over(before) if before is not None else []
        return effects + _test_alone(tests) + self._go_on(now)

    def on_test_result(
        self, node: str, message: msg.TestedAlone | msg.TestedPair, now: float
    ) -> list[Effect]:
        tests = self._tests
        if tests is None:
            return []
        if isinstance(message, msg.TestedPair):
            tests.answers[message.name, node] = message
            tests.waiting.discard((message.name, node))
        else:
            tests.ports[node], tests.alone[node] = message.port, message.found
            tests.waiting.discard(("", node))
        return self._go_on(now)

    def on_time(self, now: float) -> list[Effect]:
        """Do what is due. To be called often."""
        tests = self._tests
        if tests is None:
            return []
        tests.waiting = self._awaited(tests)
        effects = self._go_on(now)
        if self._tests is tests and not tests.rounds and now >= tests.asked_at + REPEAT_S:
            tests.asked_at = now
            effects += _test_alone(tests)
        return effects

    def _awaited(self, tests: Tests) -> set[tuple[str, str]]:
        """The answers that are still to come. A node that has left or runs ranks by now will not answer."""
        if not tests.rounds:
            return {("", name) for name in tests.nodes if name not in tests.alone and self._is_here(name)}
        expected = {(pair, name) for pair, both in tests.pairs.items() for name in both}
        return {key for key in expected - set(tests.answers) if self._is_here(key[1])}

    def _is_here(self, name: str) -> bool:
        node = self._state.nodes.get(name)
        return node is not None and node.role not in (Role.FAILED, Role.ACTIVE)

    def _go_on(self, now: float) -> list[Effect]:
        """Start the next round, or return the verdicts, once all have answered or their time is up."""
        tests = self._tests
        if tests is None or (tests.waiting and now < tests.until):
            return []
        tests.played += [_outcome(tests, name, pair) for name, pair in tests.pairs.items()]
        left = ROUNDS_MAX - tests.rounds
        pairs = next_round(tests.fit, tests.played) if left else []
        left_s = tests.began + ALL_SHARE * tests.order.limit_s - now
        if not pairs or left_s <= 0:
            self._tests = None
            return _over(tests) + _verdicts(tests, now)
        return self._play(tests, pairs, left_s / left, now) + self._go_on(now)

    def _play(self, tests: Tests, pairs: list[tuple[str, str]], limit_s: float, now: float) -> list[Effect]:
        """Test all pairs at the same time, until the slowest has finished or `limit_s` has passed."""
        tests.pairs = {f"{tests.rounds}-{first}-{second}": (first, second) for first, second in pairs}
        tests.rounds += 1
        tests.until = now + limit_s
        gpus = max((node.gpus for name in tests.nodes if (node := self._state.nodes.get(name))), default=0)
        tests.fair = limit_s >= FAIR_SHARE * whole_s(self._state.settings, gpus)
        tests.waiting = self._awaited(tests)
        return [
            Send(
                node,
                msg.TestPair(
                    name=name, host=self._state.nodes[pair[0]].address, port=tests.ports[pair[0]], rank=rank,
                    limit_s=0.9 * limit_s,
                ),
            )
            for name, pair in tests.pairs.items()
            for rank, node in enumerate(pair)
        ]  # fmt: skip

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        if (tests := self._tests) is not None:
            assert tests.waiting, "tests that wait for nobody are not over"
            assert tests.rounds <= ROUNDS_MAX, "too many rounds"
            awaited = {name for name, _ in tests.waiting}
            assert awaited <= (set(tests.pairs) if tests.rounds else {""}), (
                "an answer of another round is awaited"
            )


def _test_alone(tests: Tests) -> list[Effect]:
    test = msg.TestAlone(limit_s=tests.order.limit_s)
    return [Send(name, test) for name in tests.nodes if ("", name) in tests.waiting]


def _over(tests: Tests) -> list[Effect]:
    over = msg.TestOver()
    return [Send(name, over) for name in tests.nodes]


def _outcome(tests: Tests, name: str, pair: tuple[str, str]) -> Pairing:
    """Return what a test of two nodes shows. A node that works answers within the limit, with an error if
    the other is silent: so the silent one may be at fault; where both are, a loss may have hit either."""
    answers = {node: tests.answers.get((name, node)) for node in pair}
    found = [answer for answer in answers.values() if answer]
    if not found or (len(found) < len(pair) and not tests.fair):
        return Pairing(pair)
    if len(found) < len(pair):
        return Pairing(pair, errors={node: "no answer in time" for node in pair if not answers[node]})
    if wrong := "; ".join(answer.error for answer in found if answer.error):
        return Pairing(pair, errors=dict.fromkeys(pair, wrong))
    first, second = (answer.times for answer in found)
    return Pairing(
        pair, {measure: max(first[measure], second[measure]) for measure in first if measure in second}
    )


def _verdicts(tests: Tests, now: float) -> list[Effect]:
    return [
        Record(
            ev.NodeTested(
                t=now, node=found.node, verdict=found.verdict.value, slowness=found.slowness,
                message=found.message, seconds=round(now - tests.began, 3), partner=found.partner,
            )
        )
        for found in judge(tests.nodes, tests.alone, tests.played)
        if found.node in tests.order.nodes
    ]  # fmt: skip


# ---- when tests are due, and what follows

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
    return not out and not node.tested and whole_s(state.settings, node.gpus) > 0


def _order(state: RunState, due: Sequence[Node], reason: str, partners: tuple[str, ...] = ()) -> TestNodes:
    limit = max(whole_s(state.settings, node.gpus) for node in due)
    state.testing = {node.name for node in due}
    state.test_until = state.now + limit
    return TestNodes(nodes=tuple(node.name for node in due), partners=partners, limit_s=limit, reason=reason)
