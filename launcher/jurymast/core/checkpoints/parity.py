"""On which nodes each image's replica is kept or, where memory is short, the XOR of a group of images.

The XOR of N ranks' parts, on a node that has none of them, takes 1/N of the memory. Like a replica it
survives the loss of any one node, but not the loss of two nodes of one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, COMMON, NODES_PER_SPARE, OWN, Copies, Key
from jurymast.core.checkpoints.retries import Pair

# Nodes in a group when nodes turn out to have no memory for whole replicas.
AUTO_NODES = 4
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
    key: Key,
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
    copies: Copies, key: Key, placement: Sequence[str], ranks_per_node: int, holding: Mapping[Group, str]
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


def _replicate(key: Key, rank: int, part: str, **more: Any) -> msg.Replicate:
    return msg.Replicate(step=key[0], attempt=key[1], rank=rank, part=part, **more)
