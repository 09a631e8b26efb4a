"""What happened at one moment, as marks on the timeline of nodes: saves and starts in a row of their own,
swaps and findings on the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

from jurymast.core.goodput import PLACED, Account, to_us

# Of what is closer together, one mark is drawn for all.
APART_PX = 2
TIERS_TOLD = 5


@dataclass(frozen=True)
class Mark:
    """`kind` is its class in page.css; `ms` after the timeline's start; `y` the upper edge of its row."""

    kind: str
    ms: int
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Places:
    """Where marks are drawn: `x` of a time in microseconds, and the upper edges of the nodes' rows and of the
    row for what concerns all of them."""

    start: int
    x: Callable[[int], float]
    lanes: Mapping[str, float]
    row: float

    def mark(self, kind: str, at: int, y: float, tip: str) -> Mark:
        return Mark(kind, (at - self.start) // 1000, self.x(at), y, tip)

    def column(self, at: int) -> int:
        return int(self.x(at) // APART_PX)


def has_row(account: Account) -> bool:
    """Whether anything concerns all nodes."""
    return bool(account.saved) or any(interval.attempt > 1 for interval in account.timeline)


def marks(account: Account, places: Places) -> list[Mark]:
    return [*_saves(account, places), *_starts(account, places), *_of_nodes(account, places)]


def _saves(account: Account, places: Places) -> Iterator[Mark]:
    told = sorted(account.saved, key=lambda one: one.t)
    for _, group in groupby(told, key=lambda one: places.column(to_us(one.t))):
        near = list(group)
        first, last = (bound(one.step for one in near) for bound in (min, max))
        tiers = list(dict.fromkeys(one.tier for one in near))[:TIERS_TOLD]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        yield places.mark("save", to_us(near[0].t), places.row, f"{steps} saved: {', '.join(tiers)}")


def _starts(account: Account, places: Places) -> Iterator[Mark]:
    """Attempts after the first; of those that start close together, the newest."""
    began: dict[int, int] = {}
    for interval in account.timeline:
        if interval.attempt > 1:
            began.setdefault(interval.attempt, interval.start)
    newest = {places.column(at): (attempt, at) for attempt, at in began.items()}
    for attempt, at in newest.values():
        yield places.mark("start", at, places.row, f"attempt {attempt} starts")


def _of_nodes(account: Account, places: Places) -> Iterator[Mark]:
    found: dict[tuple[str, str, int], Mark] = {}

    def put(kind: str, node: str, at: int, tip: str) -> None:
        mark = places.mark(kind, at, places.lanes[node], tip)
        found.setdefault((kind, node, places.column(at)), mark)

    for one in account.findings:
        if one.node in places.lanes:
            put("finding", one.node, to_us(one.t), f"{one.node}: {one.code} ({one.verdict})")
    for node in places.lanes.keys() & account.stays.keys():
        for before, after in pairwise(account.stays[node]):
            if (before.what, after.what) == ("spare_idle", PLACED) and before.until == after.start:
                put("swap", node, after.start, f"{node}, a spare until now, takes a place")
    yield from found.values()
