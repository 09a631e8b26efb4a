"""Writes the newest state to the shared tier before the nodes are released, because their memory is lost with
them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.commit import Commit
from jurymast.core.checkpoints.copies import Copies, Key
from jurymast.core.checkpoints.holders import Holder
from jurymast.core.checkpoints.replicas import Replicas
from jurymast.core.checkpoints.retries import RETRY_S
from jurymast.core.checkpoints.writes import Writes
from jurymast.core.effects import Effect, Send

# How long others are tried after one node could not write: its storage may recover meanwhile.
GATHER_LIMIT_S = 15.0


class Securing:
    """`secured`: the newest state is written, or none can be. `holders` are the nodes that are here; times
    are Unix times in seconds."""

    def __init__(
        self, copies: Copies, holders: Mapping[str, Holder], commit: Commit, replicas: Replicas,
        writes: Writes,
    ) -> None:  # fmt: skip
        self._copies, self._holders = copies, holders
        self._commit, self._replicas, self._writes = commit, replicas, writes
        self._gather_at, self._not_gathered = -math.inf, 0
        self._hopeless: set[Key] = set()  # no node has memory to put these together
        self._kept_older = False  # older states stayed when room was made, in case the newest has none
        self.secured = False

    def not_gathered(self, now: float) -> None:
        """An image could not be put together. What failed just now fails again here, but maybe not on another
        node."""
        self._gather_at = now + RETRY_S
        self._not_gathered += 1

    def secure(self, now: float) -> list[Effect]:
        """Order what is due. Called repeatedly until `secured`."""
        keys = [key for key in self._writes.unsaved() if key not in self._hopeless] or self._press()
        self.secured = not keys
        if not keys or not self._writes.free(cp.SHARED, now, hurry=True):
            return []
        key, unfit = keys[0], self._writes.unfit(cp.SHARED, now)
        writers = [self._writes.writer(key, rank, unfit) for rank in range(self._copies.world(key))]
        ranks = [rank for rank, node in enumerate(writers) if not node or node in unfit]
        whole = all(writers)
        late = whole and now > self._writes.failed_at(cp.SHARED) + GATHER_LIMIT_S
        if not ranks or late:
            return self._writes.write(cp.SHARED, key, now)
        effects = self._have_room_made(keys)
        takers = self._with_room(unfit) or ([] if whole else self._with_room(()))
        if not takers and not whole:
            self._hopeless.add(key)
        if takers and now >= self._gather_at:
            return effects + self._gather(key, ranks, takers)
        return effects + self._writes.write(cp.SHARED, key, now)  # nothing, unless it is whole

    def _press(self) -> list[Key]:
        """Try again to write the newest state that had no room to be gathered. Older states are in the shared
        tier by now, or had no room either, and are dropped."""
        if not self._kept_older:
            return []
        self._kept_older = False
        newest = self._writes.unsaved()[:1]
        self._hopeless.difference_update(newest)
        for node in self._holders.values():
            node.slotless = False
        return newest

    def _with_room(self, without: Collection[str]) -> list[str]:
        return [name for name, node in self._holders.items() if not node.full and name not in without]

    def _gather(self, key: Key, ranks: Iterable[int], takers: Sequence[str]) -> list[Effect]:
        """Have these images put together on nodes that can write them: they exist only in parts, or on nodes
        that could not write just now."""
        effects: list[Effect] = []
        for number, rank in enumerate(ranks):
            holder = takers[(number + self._not_gathered) % len(takers)]
            sources = self._copies.sources(key, rank, holder)
            effects += self._replicas.order(key, cp.Replication(holder, rank, cp.ALL, sources))
        return effects

    def _have_room_made(self, keys: list[Key]) -> list[Effect]:
        """Ask each node once to make room. It may have memory now although it had refused some: ranks save no
        more, and everything older is in the shared tier unless it is one of these."""
        fresh = {name: node for name, node in self._holders.items() if not node.slotless}
        for node in fresh.values():
            node.full, node.slotless = False, True
            self._kept_older = len(keys) > 1
        older: list[Effect] = []
        if fresh and len(keys) == 1:
            self._commit.go_on_from(keys[0])
            older = self._replicas.give_up_older(keys[0], fresh)
        return [*older, *(Send(name, msg.GiveSlotsUp()) for name in fresh)]
