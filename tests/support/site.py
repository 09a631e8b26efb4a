"""Decisions about checkpoints of a small run, driven by hand."""

from __future__ import annotations

from typing import Any, TypeVar

from jurymast.core.checkpoints.agreement import NextSave
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Launch, Record, Send
from jurymast.core.state.images import SHARED, StateId
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.settings import Settings
from jurymast.core.state.within import Skip
from support.reports import hello

ACTIVE = ("n1", "n2", "n3")

Order = TypeVar("Order", bound=msg.ToAgent)


class Site:
    """Three active nodes of one rank each and a spare; keeps what is ordered and journalled. Invariants are
    checked after every event."""

    def __init__(self, *, by_hand: bool = False, **settings: Any) -> None:
        self.time, self.by_hand = 100.0, by_hand  # whether replicas are looked for by `slice` only
        self.orders: list[tuple[str, msg.ToAgent]] = []
        self.leads: dict[str, str] = {}  # by the write's id
        self.events: list[ev.Event] = []
        self.state = RunState(Settings(cadence_steps=10, **settings), active=3, spares=1)
        self.state.nodes = {name: Node(name, i, incarnation=name) for i, name in enumerate([*ACTIVE, "s1"])}
        self.state.placement, self.state.phase, self.state.attempt = ACTIVE, Phase.RUNNING, 1
        for name, node in self.state.nodes.items():
            node.role = Role.ACTIVE if name in ACTIVE else Role.SPARE
        self.here: set[str] = set()
        self.next_save: NextSave | None = None
        self.checkpoints = Checkpoints(self.state, lambda: self.next_save)
        for name in self.state.nodes:
            self.joined(name)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert effect.node in self.here
                self.orders.append((effect.node, effect.message))
                if isinstance(effect.message, msg.Write) and effect.message.lead:
                    self.leads[effect.message.id] = effect.node
            else:
                assert isinstance(effect, Record)
                self.events.append(effect.event)
                step(self.state, effect.event)
        self.checkpoints.check()

    def joined(self, name: str, **fields: Any) -> None:
        self.here.add(name)
        first = hello(name, **{"address": f"at-{name}", "data_port": 7, **fields})
        self.do(self.checkpoints.on_agent_joined(name, first, self.time))
        self.replicate()

    def lost(self, name: str) -> None:
        self.here.discard(name)
        self.do(self.checkpoints.on_node_lost(name, self.time))

    def hear(self, node: str, message: msg.AboutCheckpoints) -> None:
        self.do(self.checkpoints.on_message(node, message, self.time))
        self.replicate()

    def look(self) -> None:
        self.do(self.checkpoints.on_time(self.time))
        self.replicate()

    def replicate(self) -> None:
        while self.checkpoints.replicas.under_way and not self.by_hand:
            self.slice()

    def slice(self, took_s: float = 0.0) -> None:
        self.do(self.checkpoints.replicas.slice(self.time))
        self.checkpoints.replicas.took(took_s, self.time)

    def skip(self, step_number: int, rank: int, why: Skip = Skip.BUSY, attempt: int = 1) -> None:
        self.do(self.checkpoints.on_save_skipped(attempt, step_number, rank, why, self.time))

    def choose(self, launch: Launch) -> ev.RestorePlanned:
        self.do(self.checkpoints.choose(launch, self.time))
        planned = self.events[-1]
        assert isinstance(planned, ev.RestorePlanned)
        return planned

    @property
    def shared(self) -> dict[StateId, int]:
        return self.checkpoints.writes.shared

    def secured(self) -> bool:
        self.do(self.checkpoints.secure(self.time))
        return self.checkpoints.final_write.secured

    def hold(self, rank: int, node: str = "", at: int = 10, tier: str = "memory", part: str = "all") -> None:
        self.hear(node or ACTIVE[rank], msg.Held(copies=(self.report(rank, at, tier, part),)))

    def report(self, rank: int, at: int = 10, tier: str = "memory", part: str = "all") -> msg.CopyReport:
        return msg.CopyReport(
            step=at, attempt=self.state.attempt, rank=rank, world=3, tier=tier, part=part, size_bytes=100,
            common_bytes=60, common_id=f"same at {at}", stall_s=0.01 * rank,
        )  # fmt: skip

    def save(self, at: int = 10) -> None:
        for rank in range(3):
            self.hold(rank, at=at)
        self.look()

    def replicas_made(self, at: int = 10) -> None:
        """The spare does as it was told."""
        for rank in range(3):
            self.hold(rank, "s1", at=at, tier="peer", part="own")
        self.look()

    def ordered(self, what: type[Order]) -> list[tuple[str, Order]]:
        found = [(node, message) for node, message in self.orders if isinstance(message, what)]
        self.orders = [order for order in self.orders if not isinstance(order[1], what)]
        return found

    def reach(self, node: str, id: str, phase: WritePhase) -> None:
        self.hear(node, msg.WriteReached(id=id, phase=phase))

    def go_on(self, id: str, until: WritePhase = WritePhase.WRITE) -> None:
        """All nodes do as they are told, up to where this phase of a write begins."""
        self.reach(self.leads[id], id, WritePhase.OPEN)
        while orders := [(node, order) for node, order in self.orders if self._is_before(order, until)]:
            for one in orders:
                self.orders.remove(one)
                assert isinstance(one[1], msg.ContinueWrite)
                self.reach(one[0], id, one[1].phase)

    @staticmethod
    def _is_before(order: msg.ToAgent, phase: WritePhase) -> bool:
        return isinstance(order, msg.ContinueWrite) and order.phase < phase

    def answer(self, writes: list[tuple[str, msg.Write]], why: str = "") -> None:
        """These nodes do all that they can, or fail."""
        for node, order in writes:
            leads = order.tier == SHARED and order.lead
            if order.tier == SHARED and not why:
                self.go_on(order.id)
            if leads and not why:
                self.reach(node, order.id, WritePhase.WRITE)
            else:
                self._written(node, order, why)
        for node, order in writes:
            seal = msg.ContinueWrite(id=order.id, phase=WritePhase.SEAL)
            if (node, seal) in self.orders:
                self._written(node, order)

    def _written(self, node: str, order: msg.Write, why: str = "") -> None:
        self.hear(node, msg.Written(id=order.id, tier=order.tier, ok=not why, why=why, size_bytes=50))

    def saved(self, tier: str) -> list[tuple[int, bool]]:
        return [(e.step, e.ok) for e in self.events if isinstance(e, ev.Saved) and e.tier == tier]


def launch(*placement: str) -> Launch:
    """The second attempt, on these nodes."""
    return Launch(attempt=2, placement=placement, master_address="", master_port=0, reason="")


def unreplicated(order: msg.Replicate, why: str) -> msg.Unreplicated:
    """What a node says that has not done as `order` says."""
    return msg.Unreplicated(step=order.step, attempt=order.attempt, rank=order.rank, part=order.part, why=why)
