"""Has other nodes hold what the loss of a node would destroy, and lets older states go once that is done.

Each image gets a replica on another node. Where no node has the memory for it, only storage keeps the image.

Going through the copies of a hundred thousand ranks takes a while, so it is done a few nodes at a time. In
between, the caller handles messages and measures the time this takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.commit import Commit
from jurymast.core.checkpoints.copies import NODES_PER_SPARE, RETRY_S, Copies, Pair, Reachability
from jurymast.core.run.recording import copied
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Send
from jurymast.core.state.images import ALL, COMMON, OWN, Copy, StateId
from jurymast.core.state.run import Phase, Role, RunState

# ---- who holds what

Order = tuple[str, msg.Replicate]  # the node that gets it


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
    unable: Collection[str] = (),
) -> list[Order]:
    """Return what must be copied so that every part of the ranks of these `places` (group ranks; None: all)
    is on one more node for each holder.

    A common part that as many other nodes have, as data-parallel ranks do, needs no replica. A node that has
    lost its own image (it was damaged, say) gets it back, unless it is one of the `unable`.
    """
    orders: list[Order] = []
    for index in places if places is not None else range(len(placement)):
        node, wanted = placement[index], holding.get(placement[index], ())
        back = (node,) if wanted and node not in unable else ()
        for rank in range(index * ranks_per_node, (index + 1) * ranks_per_node):
            have_common, have_own = copies.nodes_with(key, rank, COMMON), copies.nodes_with(key, rank, OWN)
            part = OWN if len(have_common) > len(wanted) else ALL
            for holder in (*wanted, *back):
                lacks_common = part == ALL and holder not in have_common
                if lacks_common or not (holder in have_own or len(have_own) > len(wanted)):
                    sources = copies.sources(key, rank, holder, part)
                    order = msg.Replicate(
                        step=key.step, attempt=key.attempt, rank=rank, part=part, sources=sources
                    )
                    orders.append((holder, order))
    return orders


def missing_images(copies: Copies, key: StateId, placement: Sequence[str]) -> list[Order]:
    """Return what must be copied so that every node has the images of all ranks, of which there were another
    number."""
    orders: list[Order] = []
    for node in placement:
        for rank, part in copies.lacking(key, node):
            # The common part of another rank does as well.
            sources = copies.sources(key, rank, node, OWN if part == OWN else ALL)
            order = msg.Replicate(step=key.step, attempt=key.attempt, rank=rank, part=part, sources=sources)
            orders.append((node, order))
    return orders


# ---- a few nodes at a time

SLICE_NODES = 32
# At most a tenth of the time is spent on looking.
REST_SHARE = 9.0


@dataclass
class _Pass:
    """A pass over the missing replicas of the state `key`, some nodes at a time. `place` is the next node's
    group rank. It counts what was ordered. `holders`, `unable`: see `missing_replicas`."""

    key: StateId
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unable: Collection[str] = ()
    place: int = 0
    ordered: int = 0


class Replicas:
    """Decides about replicas. Times are Unix times in seconds."""

    def __init__(self, state: RunState, copies: Copies, commit: Commit) -> None:
        self._state, self._copies, self._commit = state, copies, commit
        self._holders = copies.holders
        self._domains: dict[str, str] = {}
        self._reach = Reachability()
        self._ordered: dict[str, set[tuple[StateId, str, int]]] = {}  # by holder
        # By holder: what is older it gives up, as it was told, and a report of that is older than the order.
        self._given_up: dict[str, StateId] = {}
        self._pass: _Pass | None = None
        # What is being copied, and since when. Other waits do not count for how long that takes: until ranks
        # run again, say, or until what has failed is tried again.
        self._copying: tuple[StateId, float] | None = None
        self._safe: StateId | None = None
        self._bare = False  # no node had memory for some of its replicas
        self._settled: StateId | None = None  # nothing can be done for it any more
        self._told_safe: StateId | None = None
        self._dirty = False
        self._retry_at = math.inf
        self._took_s = 0.0  # the pass that is under way, or was the last
        self._rest_until = 0.0

    # ---- what is heard

    def on_agent_joined(self, node: str, domain: str) -> None:
        if domain:
            self._domains[node] = domain
        self._dirty = True
        if self._bare:  # it may have the memory that nobody had
            self._settled = None
        self._forget(node)

    def tell_safe(self, node: str) -> list[Effect]:
        """Tell a node that is here again which state is safe, as it may have missed that. Otherwise it would
        keep older images and have no room for newer ones."""
        return [] if self._safe is None else self.give_up_older(self._safe, [node])

    def on_node_lost(self, node: str) -> None:
        self._forget(node)

    def _forget(self, node: str) -> None:
        """What this node was told, and failures with it, no longer count."""
        self._ordered.pop(node, None)
        self._given_up.pop(node, None)
        self._reach.forget(node)

    def gives_up(self, copy: Copy) -> bool:
        """Whether the copy's holder gives it up as soon as it hears what it was told, and says no more."""
        given_up = self._given_up.get(copy.node)
        return copy.tier == im.PEER and given_up is not None and im.age(copy.key) < im.age(given_up)

    def on_copy_held(self, copy: Copy) -> None:
        self._dirty = True
        if copy.tier == im.PEER:
            self._reach.worked(self._pair(copy.node, copy.rank))

    def on_memory_refused(self, node: str) -> None:
        """The node has no memory for more replicas."""
        self._holders[node].full = True
        self._dirty, self._copying = True, None

    def on_replicate_failed(self, node: str, message: msg.Unreplicated, now: float) -> bool:
        """An order could not be carried out. Returns True if that is news. It is tried again, or by other
        nodes."""
        key = StateId(message.step, message.attempt)
        self._ordered.get(node, set()).discard((key, message.part, message.rank))
        self._retry_at, self._copying = now + RETRY_S, None
        pair = self._pair(node, message.rank)
        news = self._reach.failed(pair, now)
        if pair in self._reach.given_up(now):
            self._dirty = True  # others may hold it
        return news

    def _pair(self, node: str, rank: int) -> cp.Pair:
        return node, self._state.node_of(rank)

    def order_anew(self, now: float) -> None:
        """Start again, because copies are lost: what was ordered, or looked at, no longer counts."""
        self._ordered.clear()
        self._dirty, self._safe, self._settled, self._copying = True, None, None, None
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
        if key != self._settled:
            self._forget_orders_before(key)
            self._pass, self._took_s = _Pass(key), 0.0

    def _forget_orders_before(self, key: StateId) -> None:
        for node, names in list(self._ordered.items()):
            self._ordered[node] = {name for name in names if im.age(name[0]) >= im.age(key)}

    def slice(self, now: float) -> list[Effect]:
        """Order what some nodes lack. Once nothing is missing anywhere, older images may go."""
        under_way = self._pass
        if under_way is None:
            return []
        if self._state.phase is not Phase.RUNNING:
            self._give_pass_up(now)
            return []
        if not under_way.place:
            under_way.holders, under_way.unable = self.holders(now), self._unable(now)
        orders = self._missing(under_way)
        under_way.ordered += len(orders)
        effects = [effect for holder, order in orders for effect in self.order(holder, order)]
        if effects and (self._copying is None or self._copying[0] != under_way.key):
            self._copying = under_way.key, now
        if under_way.place >= len(self._state.placement):
            self._pass = None
            self._rest_until = now + REST_SHARE * self._took_s
            if not under_way.ordered and self._is_all_there(under_way.key):
                effects += self._settle(under_way.key, now, safe=not self._lacks_memory(under_way.holders))
        return effects

    def took(self, seconds: float, now: float) -> None:
        """The last slice took the caller this long. A tenth of the time may be used for it."""
        self._took_s += seconds
        if self._pass is None:
            self._rest_until = now + REST_SHARE * self._took_s

    def _lacks_memory(self, wanted: Mapping[str, tuple[str, ...]]) -> bool:
        return self._state.settings.replicas > 0 and not all(wanted.values())

    def _missing(self, under_way: _Pass) -> list[Order]:
        placement, count = self._state.placement, self._state.ranks_per_node
        if self._resharded(under_way.key):
            under_way.place = len(placement)
            able = [node for node in placement if node not in self._full()]
            return missing_images(self._copies, under_way.key, able)
        places = range(under_way.place, min(under_way.place + SLICE_NODES, len(placement)))
        under_way.place = places.stop
        return missing_replicas(
            self._copies, under_way.key, placement, count, under_way.holders, places, under_way.unable
        )

    def _resharded(self, key: StateId) -> bool:
        """Whether the ranks that run have restored what another number of ranks saved."""
        ranks = len(self._state.placement) * self._state.ranks_per_node
        return self._copies.world(key) not in (0, ranks)

    def _is_all_there(self, key: StateId) -> bool:
        """Whether the state is whole where it counts: each image at its rank, or at all ranks of another
        number."""
        return self._commit.whole() or (self._resharded(key) and self._copies.restorable(key))

    def _give_pass_up(self, now: float) -> None:
        """Start again from the first node after a pause, because the state has changed meanwhile."""
        if self._pass is not None:
            self._dirty, self._rest_until = True, now + REST_SHARE * self._took_s
            self._pass = None

    def holders(self, now: float) -> dict[str, tuple[str, ...]]:
        """Return, for each active node, the nodes that are to hold its replicas: none if no node has memory
        for them."""
        return holders(
            self._state.placement, self._spares(), self._domains, self._state.settings.replicas, self._full(),
            self._reach.given_up(now),
        )  # fmt: skip

    def _full(self) -> list[str]:
        return [name for name, node in self._holders.items() if node.full]

    def _unable(self, now: float) -> set[str]:
        """Nodes that cannot get their own images back."""
        return {*self._full()} | {holder for holder, node in self._reach.given_up(now) if holder == node}

    def _spares(self) -> list[str]:
        if not self._state.settings.prefer_spares:
            return []
        spares = [node.name for node in self._state.nodes.values() if node.role is Role.SPARE]
        return [name for name in spares if name in self._holders]

    # ---- orders

    def order(self, holder: str, order: msg.Replicate) -> list[Effect]:
        """Send an order once, to a node that is here, and not before somebody has what it is to copy: its
        failure would count against the node."""
        if holder not in self._holders or not order.sources:
            return []
        key = StateId(order.step, order.attempt)
        ordered = self._ordered.setdefault(holder, set())
        name = key, order.part, order.rank
        if name in ordered:
            return []
        ordered.add(name)
        if im.age(key) < im.age(self._given_up.get(holder, key)):
            del self._given_up[holder]
        return [Send(holder, order)]

    # ---- what may go

    def _settle(self, key: StateId, now: float, *, safe: bool) -> list[Effect]:
        """Finish: every part is on as many nodes as wanted, or (not `safe`) as have memory for it. Agents may
        now give up older images."""
        self._safe, self._settled, self._bare = key, key, not safe
        effects: list[Effect] = []
        replicated = safe and self._state.settings.replicas and len(self._holders) > 1
        if replicated and key != self._told_safe:
            self._told_safe = key
            size_bytes, (of, since) = self._copies.replica_bytes(key), self._copying or (None, now)
            took_s = now - since if of == key else 0.0
            effects.append(copied(im.PEER, key, now, size_bytes=size_bytes, seconds=took_s))
        effects += self.give_up_older(key, self._holders)
        self._ordered.clear()
        return effects

    def give_up_older(self, key: StateId, nodes: Collection[str]) -> list[Effect]:
        committed = msg.Committed(step=key.step, attempt=key.attempt)
        older = [one for one in self._copies.newest_first() if im.age(one) < im.age(key)]
        self._ask_again(older, nodes)
        for one in older:
            for node in [""] if len(nodes) == len(self._holders) else nodes:  # "": all
                self._copies.drop_where(one, node=node, tiers=(im.MEMORY, im.PEER))
        self._given_up.update(dict.fromkeys(nodes, key))
        return [Send(node, committed) for node in nodes]

    def _ask_again(self, given_up: Collection[StateId], nodes: Iterable[str]) -> None:
        """Ask full nodes again that give up replicas: one of a newer state has room where that was."""
        full = {name for name in nodes if self._holders[name].full}
        held = self._copies.every() if full else ()
        for name in full & {copy.node for copy in held if copy.tier == im.PEER and copy.key in given_up}:
            self._holders[name].full = False
            self._settled, self._dirty = None, True

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert self._ordered.keys() <= self._holders.keys(), "replicas are ordered of nodes that are not here"
        if self._pass is not None:
            assert self._pass.key == self._commit.key, "replicas are looked for of what is not committed"
