"""Has nodes tested: sends orders to their agents, in rounds of pairs, and returns an event with the verdict
on each node."""

from __future__ import annotations

from dataclasses import dataclass, field

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.effects import Effect, Record, Send
from jurymast.core.nodes.tests import ROUNDS_MAX, Alone, Pairing, judge, next_round
from jurymast.core.run.instructions import TestNodes
from jurymast.core.run.state import Role, RunState

# Shares of the time allowed: for tests alone, and for all of it, so that the verdicts come before its end.
ALONE_SHARE = 0.5
ALL_SHARE = 0.9
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
    alone: dict[str, Alone] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)  # the pairs of this round, by name
    answers: dict[tuple[str, str], msg.TestedPair] = field(default_factory=dict)
    played: list[Pairing] = field(default_factory=list)
    rounds: int = 0

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

    def heard(self, node: str, message: msg.TestedAlone | msg.TestedPair, now: float) -> list[Effect]:
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

    def tick(self, now: float) -> list[Effect]:
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
    answers = [tests.answers.get((name, node)) for node in pair]
    errors = [answer.error if answer else "no answer in time" for answer in answers]
    if any(errors):
        return Pairing(pair, error="; ".join(error for error in errors if error))
    first, second = (answer.times for answer in answers if answer)
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
