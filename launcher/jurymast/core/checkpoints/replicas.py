"""Has other nodes hold what the loss of a node would destroy, and lets older states go once that is done.

Going through the copies of a hundred thousand ranks takes a while, so it is done a few nodes at a time. In
between, the caller handles messages and measures the time this takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints import parity
from jurymast.core.checkpoints.commit import Commit
from jurymast.core.checkpoints.copies import Copies, Copy, Key
from jurymast.core.checkpoints.retries import RETRY_S, Reachability
from jurymast.core.effects import Effect, Send
from jurymast.core.run.state import Phase, Role, RunState
from jurymast.core.run.telling import copied

SLICE_NODES = 32
# At most a tenth of the time is spent on looking.
REST_SHARE = 9.0


@dataclass
class _Pass:
    """A pass over the missing replicas of the state `key`, some nodes at a time. `place` is the next node's
    group rank. It counts what was ordered. `kept`: who is to hold what, once the first node was handled."""

    key: Key
    kept: parity.Protection | None = None
    place: int = 0
    ordered: int = 0


class Replicas:
    """Decides about replicas. Times are Unix times in seconds."""

    def __init__(self, state: RunState, copies: Copies, commit: Commit) -> None:
        self._state, self._copies, self._commit = state, copies, commit
        self._holders = copies.holders
        self._domains: dict[str, str] = {}
        self._reach = Reachability()
        self._ordered: dict[str, set[tuple[Key, str, int, tuple[int, ...]]]] = {}  # by holder
        self._pass: _Pass | None = None
        self._safe: Key | None = None
        self._bare = False  # no node had memory for some of its replicas
        self._told_safe: Key | None = None
        self._dirty = False
        self._retry_at = math.inf
        self._took_s = 0.0  # the pass that is under way, or was the last
        self._rest_until = 0.0

    # ---- what is heard

    def joined(self, node: str, domain: str) -> None:
        if domain:
            self._domains[node] = domain
        self._dirty = True
        if self._bare:  # it may have the memory that nobody had
            self._safe = None
        self._ordered.pop(node, None)
        self._reach.forget(node)

    def tell_safe(self, node: str) -> list[Effect]:
        """Tell a node that is here again which state is safe, as it may have missed that. Otherwise it would
        keep older images and have no room for newer ones."""
        return [] if self._safe is None else self.give_up_older(self._safe, [node])

    def lost(self, node: str) -> None:
        self._ordered.pop(node, None)

    def held(self, copy: Copy) -> None:
        self._dirty = True
        if copy.tier == cp.PEER:
            self._reach.worked(self._pair(copy.node, copy.rank, copy.group))

    def refused(self, node: str, *, parity: bool) -> None:
        """The node has no memory for more replicas, nor (`parity`) for XORs."""
        self._holders[node].full = True
        self._holders[node].packed |= parity
        self._dirty = True

    def failed(self, node: str, message: msg.Unreplicated, now: float) -> bool:
        """An order could not be carried out. Returns True if that is news. It is tried again, or by other
        nodes."""
        key = message.step, message.attempt
        self._ordered.get(node, set()).discard((key, message.part, message.rank, message.group))
        self._retry_at = now + RETRY_S
        pair = self._pair(node, message.rank, message.group)
        news = self._reach.failed(pair, now)
        if pair in self._reach.given_up(now):
            self._dirty = True  # others may hold it
        return news

    def _pair(self, node: str, rank: int, group: tuple[int, ...]) -> tuple[str, str]:
        return node, "" if group else self._state.node_of(rank)

    def order_anew(self, now: float) -> None:
        """Start again, because copies are lost: what was ordered, or looked at, no longer counts."""
        self._ordered.clear()
        self._dirty, self._safe = True, None
        self._give_pass_up(now)

    # ---- looking for what is missing

    @property
    def under_way(self) -> bool:
        """Whether to call `slice` again as soon as other work had its turn."""
        return self._pass is not None

    def look(self, key: Key, now: float) -> None:
        """Start a pass over the committed state, if one is due."""
        if self._pass is not None and self._pass.key != key:
            self._give_pass_up(now)
        due = (self._dirty and now >= self._rest_until) or now > self._retry_at
        if self._pass is not None or not due or self._state.phase is not Phase.RUNNING:
            return
        self._dirty, self._retry_at = False, math.inf
        if key != self._safe:
            self._forget_orders_before(key)
            self._pass, self._took_s = _Pass(key), 0.0

    def _forget_orders_before(self, key: Key) -> None:
        for node, names in list(self._ordered.items()):
            self._ordered[node] = {name for name in names if cp.age(name[0]) >= cp.age(key)}

    def slice(self, now: float) -> list[Effect]:
        """Order what some nodes lack. Once nothing is missing anywhere, older images may go."""
        under_way = self._pass
        if under_way is None:
            return []
        if self._state.phase is not Phase.RUNNING:
            self._give_pass_up(now)
            return []
        kept = under_way.kept = under_way.kept or self.kept(now)
        orders = self._missing(under_way, kept)
        under_way.ordered += len(orders)
        effects = [effect for holder, order in orders for effect in self.order(holder, order)]
        if under_way.place >= len(self._state.placement):
            self._pass = None
            self._rest_until = now + REST_SHARE * self._took_s
            if not under_way.ordered and self._commit.whole():
                effects += self._settle(under_way.key, now, safe=not kept.bare)
        return effects

    def took(self, seconds: float, now: float) -> None:
        """The last slice took the caller this long. A tenth of the time may be used for it."""
        self._took_s += seconds
        if self._pass is None:
            self._rest_until = now + REST_SHARE * self._took_s

    def _missing(self, under_way: _Pass, kept: parity.Protection) -> list[parity.Order]:
        placement, count = self._state.placement, self._state.ranks_per_node
        places = range(under_way.place, min(under_way.place + SLICE_NODES, len(placement)))
        under_way.place = places.stop
        found = parity.missing_replicas(self._copies, under_way.key, placement, count, kept.whole, places)
        if under_way.place >= len(placement):
            found += parity.missing_parity(self._copies, under_way.key, placement, count, kept.parity)
        return found

    def _give_pass_up(self, now: float) -> None:
        """Start again from the first node after a pause, because the state has changed meanwhile."""
        if self._pass is not None:
            self._dirty, self._rest_until = True, now + REST_SHARE * self._took_s
            self._pass = None

    def kept(self, now: float) -> parity.Protection:
        """Return which nodes are to hold whose replicas."""
        state, settings = self._state, self._state.settings
        return parity.keeping(
            state.placement, state.ranks_per_node, self._spares(), self._domains,
            copies=settings.replicas, parity=settings.parity,
            full={name for name, node in self._holders.items() if node.full},
            packed={name for name, node in self._holders.items() if node.packed},
            apart=self._reach.given_up(now),
        )  # fmt: skip

    def _spares(self) -> list[str]:
        if not self._state.settings.prefer_spares:
            return []
        spares = [node.name for node in self._state.nodes.values() if node.role is Role.SPARE]
        return [name for name in spares if name in self._holders]

    # ---- orders

    def order(self, holder: str, order: msg.Replicate) -> list[Effect]:
        """Send an order once, to a node that is here."""
        if holder not in self._holders:
            return []
        key, ordered = (order.step, order.attempt), self._ordered.setdefault(holder, set())
        name = key, order.part, order.rank, order.group
        if name in ordered:
            return []
        ordered.add(name)
        room = self._make_room(key, holder, order.group) if order.group else []
        return [*room, Send(holder, order)]

    def _make_room(self, key: Key, holder: str, group: tuple[int, ...]) -> list[Effect]:
        """Drop whole replicas that a full node has of some ranks of a group, to make room for the XOR of the
        group."""
        if not self._holders[holder].full or not self._copies.in_memory(key):
            return []
        useless = [
            copy
            for rank in group
            for copy in self._copies.of(key, rank)
            if copy.node == holder and copy.tier == cp.PEER and not copy.group
        ]
        for copy in useless:
            self._copies.drop(copy)
        ranks = tuple(copy.rank for copy in useless)
        return [Send(holder, msg.Forget(step=key[0], attempt=key[1], ranks=ranks))] if ranks else []

    # ---- what may go

    def _settle(self, key: Key, now: float, *, safe: bool) -> list[Effect]:
        """Finish: every part is on as many nodes as wanted, or (not `safe`) as have memory for it. Agents may
        now give up older images."""
        self._safe, self._bare = key, not safe
        effects: list[Effect] = []
        replicated = safe and self._state.settings.replicas and len(self._holders) > 1
        if replicated and key != self._told_safe:
            self._told_safe = key
            size_bytes, took_s = self._copies.replica_bytes(key), now - self._commit.at
            effects.append(copied(cp.PEER, key, now, size_bytes=size_bytes, seconds=took_s))
        effects += self.give_up_older(key, self._holders)
        self._ordered.clear()
        return effects

    def give_up_older(self, key: Key, nodes: Collection[str]) -> list[Effect]:
        committed = msg.Committed(step=key[0], attempt=key[1])
        older = [one for one in self._copies.newest_first() if cp.age(one) < cp.age(key)]
        for one in older:
            self._ask_again(one)
            for node in [""] if len(nodes) == len(self._holders) else nodes:  # "": all
                self._copies.drop_where(one, node=node, tiers=(cp.MEMORY, cp.PEER))
        return [Send(node, committed) for node in nodes]

    def _ask_again(self, key: Key) -> None:
        """Ask nodes again that give up their replicas of these images: they may have room for parity now."""
        packed = {name for name, node in self._holders.items() if node.packed and not node.retried}
        held = self._copies.every() if packed else ()
        for name in packed & {copy.node for copy in held if copy.key == key and copy.tier == cp.PEER}:
            self._holders[name].packed, self._holders[name].retried = False, True

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert self._ordered.keys() <= self._holders.keys(), "replicas are ordered of nodes that are not here"
        if self._pass is not None:
            assert self._pass.key == self._commit.key, "replicas are looked for of what is not committed"
