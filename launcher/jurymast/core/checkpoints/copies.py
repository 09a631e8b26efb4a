"""Who holds which part of which rank's state, and what follows: commit, replicas, the restore plan.

An image is one rank's bytes of a state, that is, of one step of one attempt. A state is committed when agents
hold every rank's image, hashed; it is restorable while every part of every rank's image has a copy somewhere.
The common part, which is the same on data-parallel ranks, may come from any rank whose common part has the
same hash.

A failed copy is tried again after a while. Several failures in a row mean that the two of a pair (a node and
a tier, or two nodes) cannot reach each other, for whatever reason: then a third node takes over. After a
while the pair is tried again, each time after twice as long.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter

from msgspec import structs

from jurymast.core.state.images import (
    ALL,
    COMMON,
    LOCAL,
    MEMORY,
    OBJECT,
    OWN,
    PEER,
    SHARED,
    Copy,
    Place,
    Source,
    StateId,
    age,
)
from jurymast.core.state.messages import Room
from jurymast.core.state.signatures import ErrorSignature, error_signature

# Bytes per second and node, until a restore has been measured.
RATES = {MEMORY: 8e9, PEER: 1.2e9, LOCAL: 1.0e9, SHARED: 0.5e9, OBJECT: 0.2e9}
# How many nodes' replicas one spare takes before partners among the active ones are used.
NODES_PER_SPARE = 4
# At most this many of the ranks that have a common part are named to a node that needs it: otherwise each of
# 100,000 ranks would be told of all others.
COMMON_SOURCES = 4


@dataclass
class Holder:
    """How other agents reach this one's data. `incarnation` is new with every agent process. `full`: it
    refused memory for a replica. `slotless`: it was told that ranks save no more."""

    address: str
    port: int
    incarnation: str
    full: bool = False
    slotless: bool = False


@dataclass(frozen=True)
class RestorePlan:
    """What the ranks of an attempt restore. `tier` is memory (images held by agents, in any tier), shared, or
    "" for a fresh start; `tiers` are the bytes that come from each; `world`: how many ranks saved the images,
    if it were others than now restore them."""

    step: int
    attempt: int
    tier: str
    reason: str
    expected_s: float = 0.0
    tiers: Mapping[str, int] = field(default_factory=dict)
    world: int = 0


class _Alike:
    """Copies of one common part, which many ranks may share."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}  # how many of the copies each has
        self._ranks: dict[int, dict[Place, Copy]] = {}
        self._order: list[int] = []
        self._sorted = True

    def add(self, copy: Copy, place: Place) -> None:
        copies = self._ranks.get(copy.rank)
        if copies is None:
            copies = self._ranks[copy.rank] = {}
            self._sorted = False
        if place not in copies:
            self.nodes[copy.node] = self.nodes.get(copy.node, 0) + 1
        copies[place] = copy

    def remove(self, copy: Copy, place: Place) -> None:
        copies = self._ranks.get(copy.rank, {})
        if copies.pop(place, None) is None:
            return
        self.nodes[copy.node] -= 1
        if not self.nodes[copy.node]:
            del self.nodes[copy.node]
        if not copies:
            del self._ranks[copy.rank]
            self._sorted = False

    def near(self, rank: int, most: int) -> list[Copy]:
        """Copies that other ranks have, starting with the next rank, so that not all nodes ask the same
        one."""
        if not self._sorted:
            self._order, self._sorted = sorted(self._ranks), True
        first = bisect.bisect_right(self._order, rank)
        chosen: list[Copy] = []
        for number in range(len(self._order)):
            other = self._order[(first + number) % len(self._order)]
            if other == rank or len(chosen) >= most:
                break
            chosen += self._ranks[other].values()
        return chosen[:most]


class _Set:
    """The copies of one state. `held`: for each rank's image, by place; `whole`: ranks whose whole image is
    in their own node's memory, needed at every report of an agent; `at`: the ranks of which a node has, or
    had, copies, because thousands of nodes come and go at once; `alike`: copies of common parts, by their
    hash."""

    def __init__(self) -> None:
        self.held: defaultdict[int, dict[Place, Copy]] = defaultdict(dict)
        self.whole: set[int] = set()
        self.at: defaultdict[str, set[int]] = defaultdict(set)
        self.alike: defaultdict[str, _Alike] = defaultdict(_Alike)

    def hold(self, copy: Copy) -> None:
        rank, place = copy.rank, copy.place
        held = self.held[rank]
        if place in held:
            self.remove(rank, [place])
        held[place] = copy
        self.at[copy.node].add(rank)
        if copy.common_id and copy.has(COMMON):
            self.alike[copy.common_id].add(copy, place)
        if _whole(copy):
            self.whole.add(rank)

    def remove(self, rank: int, places: Iterable[Place]) -> None:
        held = self.held.get(rank, {})
        for place in places:
            copy = held.pop(place, None)
            if copy is not None and (alike := self.alike.get(copy.common_id)) is not None:
                alike.remove(copy, place)
        if rank in self.whole and not any(_whole(copy) for copy in held.values()):
            self.whole.discard(rank)

    def drop_where(self, node: str, tiers: Collection[str]) -> None:
        if not node and all(place[1] in tiers for held in self.held.values() for place in held):
            self.held.clear()
            return
        for rank in self.at.get(node, ()) if node else self.held:
            places = [
                place
                for place in self.held.get(rank, ())
                if (not node or place[0] == node) and (not tiers or place[1] in tiers)
            ]
            self.remove(rank, places)


_NONE = _Set()


class Copies:
    """What the agents report to hold; `holders` are the nodes that are here. It is not in the journal: agents
    report it again to every new supervisor."""

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self._sets: defaultdict[StateId, _Set] = defaultdict(_Set)

    def hold(self, copy: Copy) -> None:
        self._sets[copy.key].hold(copy)

    def drop(self, copy: Copy) -> None:
        known = self._sets.get(copy.key)
        if known is None:
            return
        known.remove(copy.rank, [copy.place])
        if not known.held.get(copy.rank):
            known.held.pop(copy.rank, None)
        if not known.held:
            del self._sets[copy.key]

    def drop_where(self, key: StateId | None = None, node: str = "", tiers: Iterable[str] = ()) -> None:
        """Forget the copies that match everything that is given."""
        wanted = frozenset(tiers)
        for one in [key] if key is not None else list(self._sets):
            known = self._sets.get(one)
            if known is None:
                continue
            if node or wanted:
                known.drop_where(node, wanted)
            if not (node or wanted) or not any(known.held.values()):
                del self._sets[one]

    def _of(self, key: StateId) -> _Set:
        return self._sets.get(key, _NONE)

    def newest_first(self) -> list[StateId]:
        """Return the states, latest first: what a later attempt saved is newer, whatever its step."""
        return sorted(self._sets, key=age, reverse=True)

    def of(self, key: StateId, rank: int) -> list[Copy]:
        return list(self._of(key).held.get(rank, {}).values())

    def on(self, node: str) -> Iterator[Copy]:
        """Return what this node holds."""
        for key, known in self._sets.items():
            for rank in known.at.get(node, ()):
                yield from (copy for copy in self.of(key, rank) if copy.node == node)

    def every(self) -> Iterator[Copy]:
        for known in self._sets.values():
            for held in known.held.values():
                yield from held.values()

    def world(self, key: StateId) -> int:
        return next((copy.world for held in self._of(key).held.values() for copy in held.values()), 0)

    def in_memory(self, key: StateId) -> bool:
        """Whether every rank's whole image is held by the agent of its own node."""
        world = self.world(key)
        return world > 0 and len(self._of(key).whole) == world

    def not_in_memory(self, key: StateId) -> list[int]:
        """Return the ranks whose whole image is not held by the agent of their own node."""
        whole = self._of(key).whole
        return [rank for rank in range(self.world(key)) if rank not in whole]

    def size_bytes(self, key: StateId) -> int:
        return sum(next(iter(held.values())).size_bytes for held in self._of(key).held.values() if held)

    def replica_bytes(self, key: StateId) -> int:
        """Return the memory that replicas of this set take on all nodes together."""
        held = (copy for copies in self._of(key).held.values() for copy in copies.values())
        return sum(copy.part_bytes for copy in held if copy.tier == PEER)

    def nodes_with(self, key: StateId, rank: int, part: str) -> Set[str]:
        """Return the nodes that have a copy of this part of the rank's image, in any tier."""
        known = self._of(key)
        copies = known.held.get(rank, {}).values()
        if part == COMMON and copies:
            first = next(iter(copies))
            if not first.common_bytes:
                return {copy.node for copy in copies}
            alike = known.alike.get(first.common_id)
            return frozenset() if alike is None else alike.nodes.keys()
        return {copy.node for copy in copies if copy.has(part)}

    def newest_is_whole(self) -> bool:
        """Whether the newest state that anybody has reported can be restored without nodes that are
        missing."""
        key = next(iter(self.newest_first()), None)
        return key is not None and self.restorable(key)

    def restorable(self, key: StateId) -> bool:
        """Return True while every part of every rank's image has a copy."""
        world, whole = self.world(key), self._of(key).whole
        return world > 0 and all(
            rank in whole or all(self.nodes_with(key, rank, part) for part in (COMMON, OWN))
            for rank in range(world)
        )

    def sources(self, key: StateId, rank: int, node: str, part: str = ALL) -> tuple[Source, ...]:
        """Return where `node` can get the rank's image, or its own `part`, fastest first: its own memory,
        others' memory, disks."""
        known = self._of(key)
        held = known.held.get(rank)
        if not held:
            return ()
        found = [self._ranked(copy, node, copy.part, rank) for copy in held.values()]
        if part == ALL:
            alike = known.alike.get(next(iter(held.values())).common_id)
            if alike is not None:
                here = (node, MEMORY, ALL) in held  # true on all nodes except new ones
                near = alike.near(rank, 1 if here else COMMON_SOURCES)
                found += [self._ranked(copy, node, COMMON, rank) for copy in near]
        # stable: equals stay in order
        return tuple(source for _, source in sorted(found, key=itemgetter(0)))

    def has_whole(self, key: StateId, rank: int, node: str) -> Copy | None:
        """Return the rank's whole image in this node's memory, if it is there."""
        return self._of(key).held.get(rank, {}).get((node, MEMORY, ALL))

    def lacking(self, key: StateId, node: str) -> list[tuple[int, str]]:
        """Return what the node has not in its memory of all ranks' images: ranks, and which part of each. Of
        common parts that are alike it needs one."""
        known = self._of(key)
        here = [
            copy
            for rank in known.at.get(node, ())
            for copy in known.held.get(rank, {}).values()
            if copy.node == node and copy.tier != LOCAL
        ]
        own = {copy.rank for copy in here if copy.has(OWN)}
        common = {"", *(copy.common_id for copy in here if copy.has(COMMON))}
        lacks: list[tuple[int, str]] = []
        for rank in range(self.world(key)):
            known_by = next(iter(known.held.get(rank, {}).values()), None)
            common_id = known_by.common_id if known_by is not None else ""
            if rank not in own:
                lacks.append((rank, OWN if common_id in common else ALL))
            elif common_id not in common:
                lacks.append((rank, COMMON))
            common.add(common_id)
        return lacks

    def nodes_with_both(self, key: StateId, rank: int) -> list[str]:
        """Return the nodes that have both parts of the rank's image, though not in one piece."""
        common = self.nodes_with(key, rank, COMMON)
        return sorted(node for node in self.nodes_with(key, rank, OWN) if node in common)

    def _ranked(self, copy: Copy, node: str, part: str, rank: int) -> tuple[tuple[bool, bool, int], Source]:
        here, disk = copy.node == node, copy.tier == LOCAL
        tier = LOCAL if disk else MEMORY if here and copy.tier == MEMORY and copy.rank == rank else PEER
        spread = (copy.rank - rank) % (copy.world or 1)  # so that not all nodes ask the same one
        return (disk, not here, spread), self._source(tier, copy.node, part, copy.rank)

    def _source(self, tier: str, node: str, part: str, rank: int) -> Source:
        there = self.holders.get(node)
        hosts, port = ((there.address,), there.port) if there is not None else ((), 0)
        return Source(tier=tier, node=node, hosts=hosts, port=port, part=part, rank=rank)


def _whole(copy: Copy) -> bool:
    return copy.tier == MEMORY and copy.part == ALL


# ---- the restore plan


def plan_restore(
    copies: Copies,
    shared: Mapping[int, int],
    placement: Sequence[str],
    ranks_per_node: int,
    failed: Collection[StateId] = (),
) -> RestorePlan:
    """Return the newest complete step, from the images that hold it or the shared checkpoint.

    `shared` maps steps that are complete in the shared tier to their size in bytes. An older step is never
    chosen because its restore would be faster: that is an estimate, while the lost steps are certain. Images
    serve another number of ranks only where every node has all of them. States in `failed` could repeatedly
    not be restored (attempt 0: from the shared tier): they are passed over unless there is nothing else.
    """
    world = len(placement) * ranks_per_node
    keys = [
        key
        for key in copies.newest_first()
        if copies.restorable(key) and (copies.world(key) == world or is_collected(copies, key, placement))
    ]
    key = max((key for key in keys if key not in failed), default=None)
    unreadable = {step for step, attempt in failed if not attempt}
    step = max(shared.keys() - unreadable, default=None)
    if key is None and step is None:
        key, step = max(keys, default=None), max(shared, default=None)
    if key is not None and (step is None or key.step >= step):
        if copies.world(key) != world:
            return _from_collected(copies, key)
        return _from_images(copies, key, placement, ranks_per_node)
    if step is None:
        return RestorePlan(0, 0, "", "nothing was saved yet")
    seconds = shared[step] / (RATES[SHARED] * max(1, len(placement)))
    return RestorePlan(step, 0, SHARED, _newest(step, seconds), seconds, {SHARED: shared[step]})


def _newest(step: int, seconds: float) -> str:
    return f"step {step} is the newest complete step, {seconds:.2f} s expected"


def _from_images(copies: Copies, key: StateId, placement: Sequence[str], ranks_per_node: int) -> RestorePlan:
    tiers: dict[str, int] = {}
    slowest_s = 0.0
    for index, node in enumerate(placement):
        node_s = 0.0
        for rank in range(index * ranks_per_node, (index + 1) * ranks_per_node):
            here = copies.has_whole(key, rank, node)
            if here is not None:  # true on all nodes except new ones
                tiers[MEMORY] = tiers.get(MEMORY, 0) + here.size_bytes
                node_s += here.size_bytes / RATES[MEMORY]
                continue
            for source, size in _cheapest(copies, key, rank, node):
                tiers[source.tier] = tiers.get(source.tier, 0) + size
                node_s += size / RATES[source.tier]
        slowest_s = max(slowest_s, node_s)
    return RestorePlan(key.step, key.attempt, MEMORY, _newest(key.step, slowest_s), slowest_s, tiers)


def _from_collected(copies: Copies, key: StateId) -> RestorePlan:
    """Each node has everything, and its ranks take of that what they need."""
    size, world = copies.size_bytes(key), copies.world(key)
    seconds = size / RATES[MEMORY]
    reason = f"{_newest(key.step, seconds)}; {world} ranks saved it, and each node has the images of all"
    return RestorePlan(key.step, key.attempt, MEMORY, reason, seconds, {MEMORY: size}, world)


def _cheapest(copies: Copies, key: StateId, rank: int, node: str) -> Iterator[tuple[Source, int]]:
    """Return where each missing part of an image comes from, and its size in bytes."""
    sources = copies.sources(key, rank, node)
    image = copies.of(key, rank)[0]
    for part, size in ((COMMON, image.common_bytes), (OWN, image.size_bytes - image.common_bytes)):
        if size:
            yield next(source for source in sources if source.has(part)), size


# ---- what another number of ranks saved

# A node's agent tells of every copy, and the supervisor looks at all of them, for each node of a launch.
COLLECTED_MAX = 10_000
# Of what ranks save next, a node takes so many images before it can give up what it has collected.
SAVED_BESIDE = 2


def is_collected(copies: Copies, key: StateId, placement: Sequence[str]) -> bool:
    """Whether every node has all ranks' images in its memory, as it takes for another number of ranks to
    restore them."""
    few = copies.world(key) * len(placement) <= COLLECTED_MAX
    return few and not any(copies.lacking(key, node) for node in placement)


def collectable(
    copies: Copies, key: StateId, placement: Sequence[str], ranks_per_node: int, rooms: Mapping[str, Room]
) -> bool:
    """Whether every node could have all ranks' images in its memory, beside what its ranks will save next. In
    `rooms` is what each node can give, including what it gives already."""
    if copies.world(key) * len(placement) > COLLECTED_MAX or not copies.restorable(key):
        return False
    images = {rank: copies.of(key, rank)[0] for rank in range(copies.world(key))}
    common = max(image.common_bytes for image in images.values())
    own = sum(image.size_bytes - image.common_bytes for image in images.values())
    # Their own part, on this node and on the one that has its replicas.
    next_bytes = SAVED_BESIDE * (ranks_per_node * common + 2 * math.ceil(own / len(placement)))
    for node in placement:
        here = sum(copy.part_bytes for copy in copies.on(node) if copy.tier != LOCAL)
        lacks = (structs.replace(images[rank], part=part) for rank, part in copies.lacking(key, node))
        need = here + sum(image.part_bytes for image in lacks) + next_bytes
        if node not in rooms or need > rooms[node].free:
            return False
    return True


# ---- copies that fail

# A failed copy is tried again after this long, with the newest step by then, and after twice as long each
# further time, because storage may hang for hours.
RETRY_S = 5.0
RETRY_MAX_S = 300.0
# A node that is lost says nothing about the tier. Others may be lost in the same moment.
INTERRUPTED_S = 1.0


@dataclass
class _Failing:
    at: float
    times: int
    why: ErrorSignature


@dataclass
class Retries:
    """Retries by tier. `now` is Unix time in seconds."""

    _failing: dict[str, _Failing] = field(default_factory=dict)
    _interrupted: dict[str, float] = field(default_factory=dict)  # when a lost node last ended a try

    def due(self, tier: str, now: float, *, hurry: bool = False) -> bool:
        """Return True unless it failed a short while ago. In a `hurry` it is tried as often as after one
        failure."""
        return now >= self.due_at(tier, hurry=hurry)

    def due_at(self, tier: str, *, hurry: bool = False) -> float:
        """Return when it is tried again; minus infinity unless the last try failed."""
        last = self._failing.get(tier)
        if last is None:
            return self.calm_at(tier)
        pause_s = RETRY_S if hurry else min(RETRY_MAX_S, RETRY_S * 2.0 ** min(last.times - 1, 10))
        return max(last.at + pause_s, self.calm_at(tier))

    def calm_at(self, tier: str) -> float:
        """Return when the loss of a node no longer makes that of others likely."""
        return self._interrupted.get(tier, -math.inf) + INTERRUPTED_S

    def failed_at(self, tier: str) -> float:
        """Return when the last try failed, if none has succeeded since."""
        last = self._failing.get(tier)
        return last.at if last is not None else -math.inf

    def failed(self, tier: str, why: str, now: float) -> bool:
        """Note a failure; returns True if it is news, because the last try did not fail for the same
        reason."""
        last = self._failing.get(tier)
        reason = error_signature("", why)
        self._failing[tier] = _Failing(now, last.times + 1 if last else 1, reason)
        return last is None or last.why != reason

    def interrupted(self, tier: str, now: float) -> bool:
        """Note that a node was lost which took part; returns True if it is news, as above."""
        is_news = tier not in self._interrupted
        self._interrupted[tier] = now
        return is_news

    def succeeded(self, tier: str) -> None:
        self._failing.pop(tier, None)
        self._interrupted.pop(tier, None)


TRIES = 2
PAUSE_S = 300.0
PAUSE_MAX_S = 14_400.0

Pair = tuple[str, str]  # the node that copies or writes, and the one whose image it is, or the tier


@dataclass
class _Unreachable:
    times: int = 0
    at: float = -math.inf
    until: float = 0.0


@dataclass
class Reachability:
    """`tries` failures in a row mean that a pair cannot reach each other. What fails within `RETRY_S` of the
    last counted failure was under way with it, as the images of all ranks are, and shares its cause: a node
    that stands still for a moment is no reason to do without it for minutes. Times are the caller's clock, in
    seconds."""

    tries: int = TRIES
    _failing: dict[Pair, _Unreachable] = field(default_factory=dict)

    def failed(self, pair: Pair, now: float) -> bool:
        """Note a failure; returns True if it is news: the first one, and when the pair is given up."""
        known = self._failing.setdefault(pair, _Unreachable())
        if now < known.at + RETRY_S:
            return False
        known.at, known.times = now, known.times + 1
        if known.times >= self.tries:
            known.until = now + min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(known.times - self.tries, 10))
        return known.times <= self.tries

    def worked(self, pair: Pair) -> None:
        self._failing.pop(pair, None)

    def forget(self, node: str) -> None:
        """Forget a node that is gone, or whose agent is a new one."""
        for pair in [pair for pair in self._failing if node in pair]:
            del self._failing[pair]

    def given_up(self, now: float) -> frozenset[Pair]:
        """Return the pairs that are not used now."""
        return frozenset(pair for pair, known in self._failing.items() if known.until > now)
