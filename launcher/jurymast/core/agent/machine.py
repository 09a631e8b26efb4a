"""Everything that an agent decides, as one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent.effects import (
    NEVER,
    Beat,
    Effect,
    EndTests,
    Leave,
    Obey,
    Prepare,
    Send,
    StartProbes,
    WakeAt,
)
from jurymast.core.agent.hearing import Hearing
from jurymast.core.agent.link import Link
from jurymast.core.agent.ranks import Ranks
from jurymast.core.agent.succession import Succession
from jurymast.core.agent.writes import Writes
from jurymast.core.endpoint import Endpoint
from jurymast.core.message import Strange
from jurymast.core.nodes.heartbeat import answer_every_s, patience_s
from jurymast.core.settings import RunPlan

# Probes wait for the torchrun host; one that does not get warm may have its reason in what they would find.
PROBE_ANYWAY_S = 60.0


class AgentMachine:
    """Whoever drives it tells it what happens, and carries out what it returns, in order. `now` is monotonic,
    in seconds. Each method is one event; after a Leave nothing follows from any."""

    def __init__(
        self,
        plan: RunPlan,
        node: str,
        allocation: str,
        nodes: Sequence[str],
        hint: tuple[str, int] | None,
        share: float,
    ) -> None:
        """`nodes`: of the allocation, in its order. `hint`, `share`: see Link."""
        patience = patience_s(plan.settings.heartbeat_s, plan.nodes)
        hearing = Hearing(answer_every_s(plan.settings.heartbeat_s, plan.nodes))
        self.ranks = Ranks(plan.settings.stop_grace_s)
        self.link = Link(node, allocation, hint, patience, plan.nodes, share, self.ranks, hearing)
        self.succession = Succession(node, nodes, hearing, enabled=plan.cluster == "slurm")
        self.writes = Writes(plan.ranks_per_node)
        self.left = False
        self._wake_at = self._probe_at = NEVER
        self._was_connected = False

    def check(self) -> None:
        """What holds between any two events. Raises AssertionError."""
        for part in (self.ranks, self.link, self.succession, self.writes):
            part.check()

    def _out(self, effects: list[Effect], now: float) -> list[Effect]:
        """What follows from an event for the other parts, and when to wake next."""
        if self.left:
            return []
        for effect in effects:
            if isinstance(effect, Prepare):
                self.writes.launch(effect.order)
            self.left = self.left or isinstance(effect, Leave)
        if self.link.connected != self._was_connected:
            self._was_connected = self.link.connected
            news = self.succession.answered if self.link.connected else self.succession.unanswered
            effects = effects + news(now)
        wake_at = min(self.ranks.wake_at, self.link.wake_at, self.succession.wake_at, self._probe_at)
        if wake_at != self._wake_at:
            self._wake_at = wake_at
            effects = [*effects, WakeAt(wake_at)]
        return effects

    def _said(self, effects: list[Effect]) -> list[Effect]:
        """What is to be said waits for a supervisor, or is left out, when none is there."""
        out: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                out += self.link.say(effect.message)
            elif self.link.connected or not isinstance(effect, Beat):
                out.append(effect)
        return out

    # The agent's own life.

    def start(self, now: float, *, reachable: bool) -> list[Effect]:
        """`reachable`: this node's address on the way to a supervisor is known, and its first host can start:
        torch's import takes longer than finding the supervisor."""
        self._probe_at = now + PROBE_ANYWAY_S
        begun = self.ranks.begin(now) if reachable else []
        return self._out(begun + self.link.start(now), now)

    def tick(self, now: float) -> list[Effect]:
        self._wake_at = NEVER  # that was now
        ranks = self._said(self.ranks.tick(now)) + (self._probe() if now >= self._probe_at else [])
        return self._out(ranks + self.link.tick(now) + self.succession.tick(now), now)

    def _probe(self) -> list[Effect]:
        """Once."""
        wanted, self._probe_at = self._probe_at < NEVER, NEVER
        return [StartProbes()] if wanted else []

    def terminated(self, now: float) -> list[Effect]:
        return self._out(self.link.terminated(now) + self.ranks.terminated(now), now)

    def say(self, message: msg.ToSupervisor, now: float) -> list[Effect]:
        return self._out(self.link.say(message), now)

    # The supervisor.

    def found(self, place: Endpoint | None, now: float) -> list[Effect]:
        return self._out(self.link.found(place, now), now)

    def unreached(self, now: float, *, refused: bool = False) -> list[Effect]:
        """`refused`: nobody listens there."""
        if refused:
            self.succession.refused(now)
        return self._out(self.link.unreached(now), now)

    def connected(self, now: float) -> list[Effect]:
        begun = self.ranks.begin(now)
        return self._out([*self.link.connected_to(now), self.ranks.beat(), *begun], now)

    def lost(self, now: float) -> list[Effect]:
        """The connection was closed."""
        if self.link.connected:
            self.succession.closed(now)
        return self._out(self.link.lost(now), now)

    def heard(self, order: msg.Order, now: float) -> list[Effect]:
        heard = self.link.heard(order, now)
        return self._out([*heard, *self.succession.heard(now), *self._said(self._ordered(order, now))], now)

    def _ordered(self, order: msg.Order, now: float) -> list[Effect]:
        match order:
            case msg.Launch():
                return self.ranks.launch(order, now)
            case msg.Stop():
                return self.ranks.stop(order.attempt, now, stacks=order.stacks)
            case msg.Dismiss():
                return self.ranks.dismiss(now)
            case msg.Look():
                return self.ranks.look(order, now)
            case msg.Cadence():
                if order.attempt != self.ranks.attempt:
                    return []
                # The supervisor waits for a heartbeat that shows it.
                return [Obey(order), Beat(order.attempt, self.ranks.pids)]
            case msg.TestOver():
                return [EndTests()]
            case msg.TestAlone() | msg.TestPair():
                idle = self.ranks.state in ("warming", "waiting")  # nothing is tested beside ranks
                return [Obey(order) if idle else EndTests()]
            case msg.Drain():
                return self.writes.begin(order, now)
            case msg.CancelDrain():
                return self.writes.cancel(order.id, now)
            case msg.Leave() | msg.Moved() | Strange():
                return []  # the link's, and nobody's
            case _:
                return [Obey(order)]

    # The ranks and their host.

    def prepared(self, attempt: int, now: float) -> list[Effect]:
        return self._out(self._said(self.ranks.prepared(attempt, now)), now)

    def stacks_taken(self, attempt: int, now: float) -> list[Effect]:
        return self._out(self._said(self.ranks.stacks_taken(attempt, now)), now)

    def host_said(
        self, message: within.Waiting | within.Started | within.Finished, now: float
    ) -> list[Effect]:
        warm = self._probe() if isinstance(message, within.Waiting) else []
        return self._out(warm + self._said(self.ranks.host_said(message, now)), now)

    def rank_failed(self, failed: within.Failed, evidence: Mapping[str, Any], now: float) -> list[Effect]:
        """`evidence`: what the node shows of it, fields of `messages.Failed`."""
        return self._out(self._said(self.ranks.rank_failed(failed, evidence, now)), now)

    def host_ended(self, code: int, evidence: Mapping[str, Any], now: float) -> list[Effect]:
        return self._out(self._said(self.ranks.host_ended(code, evidence, now)), now)

    def rank_said(
        self, event: within.ForSupervisor | within.Checkpoints | within.Foreseen, now: float
    ) -> list[Effect]:
        if isinstance(event, within.Checkpoints | within.Foreseen):
            return self._out(self.writes.rank_said(event, now), now)
        return self._out(self._said(self.ranks.rank_said(event, now)), now)

    # Succession, and writes.

    def pulse(self, value: str | None, now: float) -> list[Effect]:
        return self._out(self.succession.pulse(value, now), now)

    def supervisor_ended(self, now: float) -> list[Effect]:
        return self._out(self.succession.supervisor_ended(now), now)

    def write_ended(self, id: str, now: float) -> list[Effect]:
        return self._out(self.writes.ended(id, now), now)
