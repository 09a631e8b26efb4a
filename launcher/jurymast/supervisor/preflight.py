"""Has nodes tested: orders to their agents, rounds of pairs, and an event with the verdict on each node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.instructions import Test
from jurymast.core.preflight import ROUNDS_MAX, Alone, Pairing, judge, next_round
from jurymast.core.state import Role, RunState

# Shares of the time allowed: for tests alone, and for all of it, so that the verdicts come before its end.
ALONE_SHARE = 0.5
ALL_SHARE = 0.9
# Agents that were not connected hear an order when it is repeated.
REPEAT_S = 1.0
LOOK_S = 0.02


class Preflight:
    """Carries out one `Test` at a time; another one ends it."""

    def __init__(
        self,
        state: RunState,
        tell: Callable[[str, msg.ToAgent], None],
        feed: Callable[[ev.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._state, self._tell, self._feed, self._now = state, tell, feed, now
        self._current: Test | None = None
        self._alone: dict[str, Alone] = {}
        self._ports: dict[str, int] = {}
        self._answers: dict[tuple[str, str], msg.TestedPair] = {}  # (name of the pair, node)

    def hear(self, node: str, message: msg.TestedAlone | msg.TestedPair) -> None:
        if isinstance(message, msg.TestedPair):
            self._answers[message.name, node] = message
        else:
            self._ports[node], self._alone[node] = message.port, message.found

    async def carry_out(self, order: Test) -> None:
        began = time.monotonic()
        self._current, self._alone, self._ports, self._answers = order, {}, {}, {}
        nodes = [*order.nodes, *order.partners]
        played: list[Pairing] = []
        end = began + ALL_SHARE * order.limit_s
        try:
            await self._test_alone(order, nodes, began + ALONE_SHARE * order.limit_s)
            fit = [name for name in nodes if self._ports.get(name) and not self._alone[name].error]
            for number in range(ROUNDS_MAX):
                pairs = next_round(fit, played)
                left_s = (end - time.monotonic()) / (ROUNDS_MAX - number)
                if not pairs or left_s <= 0 or self._current is not order:
                    break
                played += await self._play(number, pairs, left_s)
        finally:
            over = msg.TestOver()
            for name in nodes:
                self._tell(name, over)
        if self._current is order:
            self._tell_verdicts(order, nodes, played, time.monotonic() - began)

    def _tell_verdicts(self, order: Test, nodes: list[str], played: list[Pairing], seconds: float) -> None:
        for found in judge(nodes, self._alone, played):
            if found.node in order.nodes:
                self._feed(
                    ev.NodeTested(
                        t=self._now(), node=found.node, verdict=found.verdict.value, slowness=found.slowness,
                        message=found.message, seconds=round(seconds, 3), partner=found.partner,
                    )
                )  # fmt: skip

    async def _test_alone(self, order: Test, nodes: list[str], end: float) -> None:
        asked_at = -REPEAT_S
        while self._current is order and time.monotonic() < end:
            missing = [name for name in nodes if name not in self._alone and self._is_here(name)]
            if not missing:
                return
            if time.monotonic() >= asked_at + REPEAT_S:
                asked_at, test = time.monotonic(), msg.TestAlone(limit_s=order.limit_s)
                for name in missing:
                    self._tell(name, test)
            await asyncio.sleep(LOOK_S)

    def _is_here(self, name: str) -> bool:
        """And has no ranks."""
        node = self._state.nodes.get(name)
        return node is not None and node.role not in (Role.FAILED, Role.ACTIVE)

    async def _play(self, number: int, pairs: list[tuple[str, str]], limit_s: float) -> list[Pairing]:
        """All pairs at the same time, as long as the slowest takes or `limit_s`."""
        names = {f"{number}-{first}-{second}": (first, second) for first, second in pairs}
        for name, (first, second) in names.items():
            host, port = self._state.nodes[first].address, self._ports[first]
            for rank, node in enumerate((first, second)):
                test = msg.TestPair(name=name, host=host, port=port, rank=rank, limit_s=0.9 * limit_s)
                self._tell(node, test)
        end = time.monotonic() + limit_s
        expected = {(name, node) for name, pair in names.items() for node in pair}
        while time.monotonic() < end and any(
            key not in self._answers and self._is_here(key[1]) for key in expected
        ):
            await asyncio.sleep(LOOK_S)
        return [self._outcome(name, pair) for name, pair in names.items()]

    def _outcome(self, name: str, pair: tuple[str, str]) -> Pairing:
        answers = [self._answers.get((name, node)) for node in pair]
        errors = [answer.error if answer else "no answer in time" for answer in answers]
        if any(errors):
            return Pairing(pair, error="; ".join(error for error in errors if error))
        first, second = (answer.times for answer in answers if answer)
        return Pairing(
            pair, {measure: max(first[measure], second[measure]) for measure in first if measure in second}
        )
