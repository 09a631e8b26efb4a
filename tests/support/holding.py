"""Agents that hold images, as `core.checkpoints` sees them: they copy, refuse, fail, forget and are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from jurymast.core.checkpoints.copies import Copies
from jurymast.core.state import messages as msg
from jurymast.core.state.images import LOCAL, MEMORY, OWN, PEER, SHARED, Source, StateId, age
from support.reports import hello

SLOTS = 2


def report(tier: str, key: StateId, rank: int, world: int, part: str = "all") -> msg.CopyReport:
    return msg.CopyReport(
        tier=tier, step=key[0], attempt=key[1], rank=rank, world=world, part=part, size_bytes=100,
        common_bytes=60, common_id=f"alike at {key}",
    )  # fmt: skip


def without(copies: Copies, node: str) -> Copies:
    """What is left when this node is lost."""
    left = Copies()
    for copy in copies.every():
        if copy.node != node:
            left.hold(copy)
    return left


def source(tier: str, node: str, part: str, rank: int, **more: Any) -> Source:
    """A source on a node whose address is not known."""
    return Source(tier=tier, node=node, hosts=(), port=0, part=part, rank=rank, **more)


def key_of(copy: msg.CopyReport) -> StateId:
    return StateId(copy.step, copy.attempt)


@dataclass
class Agent:
    """`orders` are on their way to it, `words` on their way to the supervisor; both arrive in their order."""

    name: str
    incarnation: int = 0
    held: set[msg.CopyReport] = field(default_factory=set)
    orders: deque[msg.ToAgent] = field(default_factory=deque)
    words: deque[msg.AboutCheckpoints] = field(default_factory=deque)
    written: set[str] = field(default_factory=set)  # by the order's id
    writes: msg.Write | None = None  # to shared storage
    reached: msg.WritePhase = msg.WritePhase.HOLD

    def hello(self) -> msg.Hello:
        return hello(self.name, incarnation=str(self.incarnation), copies=tuple(self.held))

    def hold(self, copy: msg.CopyReport) -> None:
        self.held.add(copy)
        self.words.append(msg.Held(copies=(copy,)))

    def has_slot(self) -> bool:
        return len({key_of(copy) for copy in self.held if copy.tier == MEMORY}) < SLOTS

    def say_again(self) -> None:
        """What was on its way is lost with the connection, but for this."""
        self.orders.clear()
        self.words = deque(word for word in self.words if isinstance(word, msg.Kept))
        if self.writes is not None:
            self.words.append(msg.WriteReached(id=self.writes.id, phase=self.reached))

    def start_again(self) -> None:
        self.incarnation += 1
        self.words.clear()
        self.writes = None
        self.held = {copy for copy in self.held if copy.tier == LOCAL}

    def give_up(self, gone: Iterable[msg.CopyReport]) -> None:
        """As ordered, so that nothing is said."""
        self.held -= set(gone)

    def in_memory(self) -> list[msg.CopyReport]:
        return [copy for copy in self.held if copy.tier != LOCAL]


@dataclass
class Nodes:
    """The agents that are here, by name; what they do by themselves `chance` decides."""

    chance: Random
    world: int
    agents: dict[str, Agent] = field(default_factory=dict)
    refuses: float = 0.02
    fails: float = 0.1

    def truth(self) -> Copies:
        copies = Copies()
        for agent in self.agents.values():
            for held in agent.held:
                copies.hold(held.on(agent.name))
        return copies

    def obey(self, agent: Agent, order: msg.ToAgent) -> None:
        match order:
            case msg.Replicate():
                self._replicate(agent, order)
            case msg.Committed():
                newest = order.attempt, order.step
                agent.give_up([copy for copy in agent.in_memory() if age(key_of(copy)) < newest])
            case msg.Void():
                key = StateId(order.step, order.attempt)
                agent.give_up([copy for copy in agent.in_memory() if key_of(copy) == key])
            case msg.ForgetNewer():
                agent.give_up([copy for copy in agent.held if copy.step > order.step])
            case msg.Write():
                self._write(agent, order)
            case msg.ContinueWrite():
                self._go_on(agent, order)
            case msg.CancelWrite() if agent.writes is not None and agent.writes.id == order.id:
                agent.writes = None
            case _:
                pass

    def _replicate(self, agent: Agent, order: msg.Replicate) -> None:
        key = StateId(order.step, order.attempt)
        why = self._why_not(agent, order)
        if why:
            agent.words.append(
                msg.Unreplicated(step=key[0], attempt=key[1], rank=order.rank, part=order.part, why=why)
            )
            return
        agent.hold(report(PEER, key, order.rank, self.world, order.part))

    def _why_not(self, agent: Agent, order: msg.Replicate) -> str:
        if self.chance.random() < self.refuses:
            agent.words.append(msg.Refused(why="no memory"))
            return "no memory"
        if self.chance.random() < self.fails:
            return "timed out"
        key = StateId(order.step, order.attempt)
        return "" if self.serves(key, order.rank, order.part, order.sources) else "nobody has the image"

    def serves(self, key: StateId, rank: int, part: str, sources: Iterable[msg.Source]) -> bool:
        """Whether one of the sources that were named still has this rank's own part at least."""
        return any(
            key_of(copy) == key and copy.rank == rank
            for source in sources
            if source.node in self.agents and source.part in ("all", OWN, part)
            for copy in self.agents[source.node].held
        )

    def _write(self, agent: Agent, order: msg.Write) -> None:
        if order.id in agent.written:
            return
        agent.written.add(order.id)
        key = StateId(order.step, order.attempt)
        mine = {copy.rank for copy in agent.held if key_of(copy) == key and copy.part == "all"}
        if not set(order.ranks) <= mine:
            self._end(agent, order, "an image is no longer here")
        elif order.tier != SHARED:
            self._end(agent, order, self._error())
        else:
            agent.writes, agent.reached = order, msg.WritePhase.HOLD
            if order.lead:
                self._reach(agent, order, msg.WritePhase.OPEN)

    def _go_on(self, agent: Agent, turn: msg.ContinueWrite) -> None:
        order = agent.writes
        if order is not None and order.id == turn.id and turn.phase > agent.reached:
            self._reach(agent, order, turn.phase)

    def _reach(self, agent: Agent, order: msg.Write, phase: msg.WritePhase) -> None:
        why = self._error()
        if why or phase is (msg.WritePhase.SEAL if order.lead else msg.WritePhase.WRITE):
            self._end(agent, order, why)
        else:
            agent.reached = phase
            agent.words.append(msg.WriteReached(id=order.id, phase=phase))

    def _error(self) -> str:
        return "no space left" if self.chance.random() < self.fails else ""

    def _end(self, agent: Agent, order: msg.Write, why: str) -> None:
        agent.writes = None if order.tier == SHARED else agent.writes
        agent.words.append(
            msg.Written(id=order.id, tier=order.tier, ok=not why, why=why, size_bytes=100 if not why else 0)
        )
