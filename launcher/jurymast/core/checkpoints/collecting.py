"""Brings what another number of ranks saved into the memory of every node that is about to run ranks: from
there they restore it without shared storage. As soon as anything of that fails, it is given up, and the state
is written to shared storage, from which any number of ranks restore it. What was collected stays until a
newer state is safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jurymast.core.checkpoints.copies import RATES, Copies, collectable
from jurymast.core.checkpoints.replicas import Order, Replicas, missing_images
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect
from jurymast.core.state.images import StateId
from jurymast.core.state.run import RunState

# It is given up if no image has come for so long, in seconds, and as many times as the largest one takes.
STILL_S = 10.0
STILL_TIMES = 5.0


class Collecting:
    """Times are Unix times in seconds. `failed`: it was given up for the newest launch."""

    def __init__(
        self, state: RunState, copies: Copies, replicas: Replicas, rooms: Mapping[str, msg.Room]
    ) -> None:
        self._state, self._copies, self._replicas, self._rooms = state, copies, replicas, rooms
        self._of = (0, StateId(0, 0))  # the attempt that is to be launched, and what it would restore
        self._moved_at = -math.inf
        self._failed = False

    def look(self, key: StateId, now: float) -> tuple[list[Effect], str] | None:
        """Have the nodes of the newest launch get what they lack of this state. Return also what is waited
        for, "" for nothing; None if that is not possible. To be called repeatedly."""
        if self._of != (self._state.attempt, key):
            self._begin(key, now)
        orders = [] if self._failed else missing_images(self._copies, key, self._state.placement)
        if orders and not self._goes_on(key, orders, now):
            self._failed = True
        if self._failed:
            return None
        effects = [effect for node, order in orders for effect in self._replicas.order(node, order)]
        world = self._copies.world(key)
        return effects, f"step {key.step}, of which each node gets all {world} images" if orders else ""

    def _begin(self, key: StateId, now: float) -> None:
        self._of, self._moved_at = (self._state.attempt, key), now
        placement, count = self._state.placement, self._state.ranks_per_node
        self._failed = key in self._state.failed_to_restore() or not collectable(
            self._copies, key, placement, count, self._rooms
        )

    def _goes_on(self, key: StateId, orders: Sequence[Order], now: float) -> bool:
        """Whether it may still succeed."""
        full = any(self._copies.holders[node].full for node, _ in orders)
        largest = max(self._copies.of(key, rank)[0].size_bytes for rank in range(self._copies.world(key)))
        still_s = STILL_S + STILL_TIMES * largest / RATES[im.PEER]
        return not full and self._copies.restorable(key) and now <= self._moved_at + still_s

    def on_held(self, key: StateId, now: float) -> None:
        """Some node has got another image of this state."""
        if key == self._of[1]:
            self._moved_at = now

    def on_replicate_failed(self, message: msg.Unreplicated) -> None:
        if (message.step, message.attempt) == self._of[1]:
            self._failed = True
