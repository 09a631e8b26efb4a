"""What a node writes of its images: which order replaces which, and what has to be ready for it."""

from __future__ import annotations

from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent.effects import CancelWrite, Effect, SayForeseen, StartWrite, WarmWriter


class NodeWrites:
    """Decides about the node's writes, at most one to each tier."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._running: dict[str, str] = {}  # the tier by id, until the write has ended
        self._newest: dict[str, str] = {}  # by tier, its id
        self._cancelled: set[str] = set()
        self._foreseen: dict[int, within.Foreseen] = {}  # by local rank
        self._leads = False  # rank 0 is here: this node brings shared checkpoints together
        self._warm = False

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        going = [tier for id, tier in self._running.items() if id not in self._cancelled]
        assert len(going) == len(set(going)), "two writes to a tier"
        assert self._cancelled <= self._running.keys(), "a write that is not there is remembered"

    def launch(self, order: msg.Launch) -> None:
        """Prepare for the ranks of this attempt, which are about to start."""
        self._leads = order.rank == 0
        self._foreseen.clear()

    def begin(self, order: msg.Write, now: float) -> list[Effect]:
        """Start a write. A supervisor orders one write to a tier at a time, so an earlier order is void: its
        supervisor may be dead, and it may wait for a lost node. Orders that were lost with a connection are
        repeated."""
        if self._newest.get(order.tier) == order.id:
            return []
        self._newest[order.tier] = order.id
        void = [id for id, tier in self._running.items() if tier == order.tier]
        effects = [effect for id in void for effect in self.cancel(id, now)]
        self._running[order.id] = order.tier
        return [*effects, StartWrite(order)]

    def cancel(self, id: str, now: float) -> list[Effect]:
        if id not in self._running or id in self._cancelled:
            return []
        self._cancelled.add(id)
        return [CancelWrite(id)]

    def ended(self, id: str, now: float) -> list[Effect]:
        self._running.pop(id, None)
        self._cancelled.discard(id)
        return []

    def rank_said(self, event: within.CheckpointsKept | within.Foreseen, now: float) -> list[Effect]:
        if isinstance(event, within.CheckpointsKept):
            warm, self._warm = self._leads and not self._warm, self._leads or self._warm
            return [WarmWriter()] if warm else []
        self._foreseen[event.local_rank] = event
        if len(self._foreseen) < self._ranks_per_node:
            return []
        known = self._foreseen.values()
        return [SayForeseen(sum(one.image_bytes for one in known), sum(one.own_bytes for one in known))]
