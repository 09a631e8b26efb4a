"""Has other nodes hold what the loss of a node would destroy, and lets older states go once that is done.

Each image gets a replica on another node or, where memory is short, the XOR of a group of images is kept: the
XOR of N ranks' parts, on a node that has none of them, takes 1/N of the memory. Like a replica it survives
the loss of any one node, but not the loss of two nodes of one group.

Going through the copies of a hundred thousand ranks takes a while, so it is done a few nodes at a time. In
between, the caller handles messages and measures the time this takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.commit import Commit
from jurymast.core.checkpoints.copies import (
    ALL,
    COMMON,
    NODES_PER_SPARE,
    OWN,
    RETRY_S,
    Copies,
    Copy,
    Pair,
    Reachability,
    StateId,
)
from jurymast.core.effects import Effect, Send
from jurymast.core.run.recording import copied
from jurymast.core.run.state import Phase, Role, RunState

# ---- who holds what

# Nodes in a group when nodes turn out to have no memory for whole replicas.
AUTO_NODES = 4
XOR = ""  # in a pair, for the nodes whose images are in it
NODES_MIN = 3

Group = tuple[int, ...]
Order = tuple[str, msg.Replicate]  # the node that gets it
_Load = tuple[bool, int, str]  # whether it is no spare with room, what it holds, node


def holders(
    placement: Sequence[str],
    spares: Sequence[str],
    domains: Mapping[str, str],
    copies: int,
    full: Iterable[str],
    apart: Collection[Pair] = (),
) -> dict[str, tuple[str, ...]]:
    """Return, for each active node, the nodes that hold its replicas: spares while they have room, then
    partners.

    A partner is in another failure domain (`domains`: node -> switch or similar) where possible, and half the
    placement away, so that neighbors that fail together are not each other's partners. Nodes in `full` have
    no memory left, and pairs (holder, node) in `apart` cannot copy.
    """
    no_room = set(full)
    far: dict[str, set[str]] = {}
    for holder, node in apart:
        far.setdefault(node, set(no_room)).add(holder)
    load: dict[str, int] = {}
    result: dict[str, tuple[str, ...]] = {}
    roomy = [spare for spare in spares if spare not in no_room]  # soon none, where there are many nodes
    for index, node in enumerate(placement):
        out = far.get(node, no_room)
        free = [spare for spare in roomy if spare not in out]
        free.sort(key=lambda name: (_together(domains, name, node), load.get(name, 0)))
        partners = _partners(placement, index, domains, out, copies - len(free[:copies]))
        result[node] = (*free[:copies], *partners)
        for name in result[node]:
            load[name] = load.get(name, 0) + 1
        for name in free[:copies]:
            if load[name] == NODES_PER_SPARE:
                roomy.remove(name)
    return result


def _partners(
    placement: Sequence[str], index: int, domains: Mapping[str, str], no_room: Set[str], count: int
) -> list[str]:
    """Return up to `count` active nodes, from half the placement away on, those of other domains first."""
    node, many = placement[index], len(placement)
    apart: list[str] = []
    together: list[str] = []
    for k in range(many):
        if len(apart) >= count:
            break
        name = placement[(index + many // 2 + k) % many]
        if name != node and name not in no_room:
            (together if _together(domains, name, node) else apart).append(name)
    return [*apart, *together][: max(0, count)]


def _together(domains: Mapping[str, str], one: str, other: str) -> bool:
    return one in domains and domains.get(one) == domains.get(other)


def missing_replicas(
    copies: Copies,
    key: StateId,
    placement: Sequence[str],
    ranks_per_node: int,
    holding: Mapping[str, tuple[str, ...]],
    places: range | None = None,
) -> list[Order]:
    """Return what must be copied so that every part of the ranks of these `places` (group ranks; None: all)
    is on one more node for each holder.

    A common part that as many other nodes have, as data-parallel ranks do, needs no replica.
    """
    orders: list[Order] = []
    for index in places if places is not None else range(len(placement)):
        wanted = holding.get(placement[index], ())
        for rank in range(index * ranks_per_node, (index + 1) * ranks_per_node):
            have_common, have_own = copies.nodes_with(key, rank, COMMON), copies.nodes_with(key, rank, OWN)
            part = OWN if len(have_common) > len(wanted) else ALL
            for holder in wanted:
                lacks_common = part == ALL and holder not in have_common
                if lacks_common or not (holder in have_own or len(have_own) > len(wanted)):
                    sources = copies.sources(key, rank, holder, part)
                    orders.append((holder, _replicate(key, rank, part, sources=sources)))
    return orders


@dataclass(frozen=True)
class Protection:
    """`whole`: for each active node the nodes that hold its replicas; `parity`: for each group of ranks the
    node that holds their XOR; `bare`: the nodes for whose images no node has memory."""

    whole: Mapping[str, tuple[str, ...]]
    parity: Mapping[Group, str]
    bare: frozenset[str] = frozenset()


def keeping(
    placement: Sequence[str],
    ranks_per_node: int,
    spares: Sequence[str],
    domains: Mapping[str, str],
    *,
    copies: int,
    parity: int,
    full: Collection[str] = (),
    packed: Collection[str] = (),
    apart: Collection[Pair] = (),
) -> Protection:
    """Return who holds what: whole replicas, unless groups of `parity` nodes are requested. Nodes in `full`
    have refused memory, and what finds no holder among the others is kept in groups; nodes in `packed` have
    refused that, too. Pairs (holder, node) in `apart` cannot copy; with node "" the holder cannot make
    XORs."""
    whole = holders(placement, spares, domains, copies, full, apart)
    packed = {*packed, *(holder for holder, node in apart if not node)}
    if not copies:
        return Protection(whole, {})
    grouped = [node for node in placement if parity > 1 or not whole[node]]
    if parity < 2 and (len(grouped) < 2 or len({*placement, *spares}) < NODES_MIN):
        return Protection(whole, {}, frozenset(grouped))
    no_room = {*full, *packed} if parity > 1 else set(packed)
    nodes = [node for node in dict.fromkeys([*spares, *placement]) if node not in no_room]
    count = -(-len(grouped) // (parity if parity > 1 else AUTO_NODES))
    if set(nodes) <= set(grouped):
        count = max(2, count)  # somebody must be left outside of each group
    groups = [group for group in parity_groups(grouped, count, domains) if len(group) > 1]
    held = _parity_holders(groups, placement, ranks_per_node, nodes, spares, domains)
    in_groups = {node for group in groups for node in group}
    whole = {node: () if node in in_groups else whole[node] for node in placement}
    held_ranks = {rank for group in held for rank in group}
    bare = [
        node
        for index, node in enumerate(placement)
        if not whole[node] and index * ranks_per_node not in held_ranks
    ]
    return Protection(whole, held, frozenset(bare))


def parity_groups(nodes: Sequence[str], count: int, domains: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return `count` groups of nodes of nearly equal size. Where possible no group has two nodes of one
    failure domain, or neighbors, which may fail together as well."""
    spread = sorted(nodes, key=lambda node: domains.get(node, ""))  # stable: neighbours stay neighbours
    return [tuple(spread[first::count]) for first in range(min(count, len(spread)))]


def _parity_holders(
    groups: Iterable[tuple[str, ...]],
    placement: Sequence[str],
    ranks_per_node: int,
    nodes: Sequence[str],
    spares: Sequence[str],
    domains: Mapping[str, str],
) -> dict[Group, str]:
    """Choose for each group of ranks, one per node, a node outside: spares first, while they have room, then
    a node in another failure domain than all members, then the node that has least to hold."""
    first_rank = {node: index * ranks_per_node for index, node in enumerate(placement)}
    room = dict.fromkeys(spares, NODES_PER_SPARE * ranks_per_node)
    queue = [(room.get(node, 0) <= 0, 0, node) for node in nodes]
    heapq.heapify(queue)
    found: dict[Group, str] = {}
    for members in groups:
        for local in range(ranks_per_node):
            chosen = _take(queue, set(members), domains)
            if chosen is None:
                break
            _, load, holder = chosen
            heapq.heappush(queue, (room.get(holder, 0) <= load + 1, load + 1, holder))
            found[tuple(sorted(first_rank[node] + local for node in members))] = holder
    return found


def _take(queue: list[_Load], members: Set[str], domains: Mapping[str, str]) -> _Load | None:
    """Take the first node out of the queue that is not a member; prefer one outside all members' domains if
    it has as much room."""
    theirs = {domains[node] for node in members if node in domains}
    passed: list[_Load] = []
    chosen: _Load | None = None
    while queue and (chosen is None or queue[0][0] == chosen[0]):
        one = heapq.heappop(queue)
        apart = domains.get(one[2]) not in theirs
        if one[2] in members or (chosen is not None and not apart):
            passed.append(one)
            continue
        if chosen is not None:
            passed.append(chosen)
        chosen = one
        if apart:
            break
    for one in passed:
        heapq.heappush(queue, one)
    return chosen


def missing_parity(
    copies: Copies, key: StateId, placement: Sequence[str], ranks_per_node: int, holding: Mapping[Group, str]
) -> list[Order]:
    """Return the XORs that must be made."""
    orders: list[Order] = []

    def elsewhere(rank: int, part: str) -> bool:
        return len(copies.nodes_with(key, rank, part)) > 1

    for group, holder in holding.items():
        have_common = all(elsewhere(rank, COMMON) for rank in group)
        if have_common and all(elsewhere(rank, OWN) for rank in group):
            continue
        part = OWN if have_common else ALL
        own_nodes = {placement[rank // ranks_per_node] for rank in group}
        made = any(
            copy.group == group and copy.part in (ALL, part) and copy.node not in own_nodes
            for copy in copies.of(key, group[0])
        )
        if not made:
            members = copies.members(key, group, part, holder)
            orders.append((holder, _replicate(key, group[0], part, group=group, members=members)))
    return orders


def _replicate(key: StateId, rank: int, part: str, **more: Any) -> msg.Replicate:
    return msg.Replicate(step=key.step, attempt=key.attempt, rank=rank, part=part, **more)


# ---- a few nodes at a time

SLICE_NODES = 32
# At most a tenth of the time is spent on looking.
REST_SHARE = 9.0


@dataclass
class _Pass:
    """A pass over the missing replicas of the state `key`, some nodes at a time. `place` is the next node's
    group rank. It counts what was ordered. `kept`: who is to hold what, once the first node was handled."""

    key: StateId
    kept: Protection | None = None
    place: int = 0
    ordered: int = 0


class Replicas:
    """Decides about replicas. Times are Unix times in seconds."""

    def __init__(self, state: RunState, copies: Copies, commit: Commit) -> None:
        self._state, self._copies, self._commit = state, copies, commit
        self._holders = copies.holders
        self._domains: dict[str, str] = {}
        self._reach = Reachability()
        self._ordered: dict[str, set[tuple[StateId, str, int, tuple[int, ...]]]] = {}  # by holder
        # By holder: what is older it gives up, as it was told, and a report of that is older than the order.
        self._given_up: dict[str, StateId] = {}
        self._pass: _Pass | None = None
        self._safe: StateId | None = None
        self._bare = False  # no node had memory for some of its replicas
        self._told_safe: StateId | None = None
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
        self._forget(node)

    def tell_safe(self, node: str) -> list[Effect]:
        """Tell a node that is here again which state is safe, as it may have missed that. Otherwise it would
        keep older images and have no room for newer ones."""
        return [] if self._safe is None else self.give_up_older(self._safe, [node])

    def lost(self, node: str) -> None:
        self._forget(node)

    def _forget(self, node: str) -> None:
        """What this node was told, and failures with it, no longer count, nor do those of XORs: one of their
        members may have been here."""
        self._ordered.pop(node, None)
        self._given_up.pop(node, None)
        self._reach.forget(node)
        self._reach.forget(XOR)

    def gives_up(self, copy: Copy) -> bool:
        """Whether the copy's holder gives it up as soon as it hears what it was told, and says no more."""
        given_up = self._given_up.get(copy.node)
        return copy.tier == cp.PEER and given_up is not None and cp.age(copy.key) < cp.age(given_up)

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
        key = StateId(message.step, message.attempt)
        self._ordered.get(node, set()).discard((key, message.part, message.rank, message.group))
        self._retry_at = now + RETRY_S
        pair = self._pair(node, message.rank, message.group)
        news = self._reach.failed(pair, now)
        if pair in self._reach.given_up(now):
            self._dirty = True  # others may hold it
        return news

    def _pair(self, node: str, rank: int, group: tuple[int, ...]) -> tuple[str, str]:
        return node, XOR if group else self._state.node_of(rank)

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

    def look(self, key: StateId, now: float) -> None:
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

    def _forget_orders_before(self, key: StateId) -> None:
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

    def _missing(self, under_way: _Pass, kept: Protection) -> list[Order]:
        placement, count = self._state.placement, self._state.ranks_per_node
        places = range(under_way.place, min(under_way.place + SLICE_NODES, len(placement)))
        under_way.place = places.stop
        found = missing_replicas(self._copies, under_way.key, placement, count, kept.whole, places)
        if under_way.place >= len(placement):
            found += missing_parity(self._copies, under_way.key, placement, count, kept.parity)
        return found

    def _give_pass_up(self, now: float) -> None:
        """Start again from the first node after a pause, because the state has changed meanwhile."""
        if self._pass is not None:
            self._dirty, self._rest_until = True, now + REST_SHARE * self._took_s
            self._pass = None

    def kept(self, now: float) -> Protection:
        """Return which nodes are to hold whose replicas."""
        state, settings = self._state, self._state.settings
        return keeping(
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
        """Send an order once, to a node that is here, and not before somebody has what it is to copy: its
        failure would count against the node."""
        if holder not in self._holders or not all(one.sources for one in order.members or (order,)):
            return []
        key = StateId(order.step, order.attempt)
        ordered = self._ordered.setdefault(holder, set())
        name = key, order.part, order.rank, order.group
        if name in ordered:
            return []
        ordered.add(name)
        if cp.age(key) < cp.age(self._given_up.get(holder, key)):
            del self._given_up[holder]
        room = self._make_room(key, holder, order.group) if order.group else []
        return [*room, Send(holder, order)]

    def _make_room(self, key: StateId, holder: str, group: tuple[int, ...]) -> list[Effect]:
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
        return [Send(holder, msg.Forget(step=key.step, attempt=key.attempt, ranks=ranks))] if ranks else []

    # ---- what may go

    def _settle(self, key: StateId, now: float, *, safe: bool) -> list[Effect]:
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

    def give_up_older(self, key: StateId, nodes: Collection[str]) -> list[Effect]:
        committed = msg.Committed(step=key.step, attempt=key.attempt)
        older = [one for one in self._copies.newest_first() if cp.age(one) < cp.age(key)]
        for one in older:
            self._ask_again(one)
            for node in [""] if len(nodes) == len(self._holders) else nodes:  # "": all
                self._copies.drop_where(one, node=node, tiers=(cp.MEMORY, cp.PEER))
        self._given_up.update(dict.fromkeys(nodes, key))
        return [Send(node, committed) for node in nodes]

    def _ask_again(self, key: StateId) -> None:
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
