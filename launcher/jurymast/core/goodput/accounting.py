"""Where every node-second of a run went: exclusive intervals that sum exactly to what was paid for.

    sum over categories = allocated node-time + queue time x (active + spare nodes asked for)

Everything is kept in whole microseconds, so the sum holds to the last one. The nodes of a placement do
the same thing at the same time, so there is one timeline for them, and each node only remembers when it
was placed, idle or lost. Waiting in the queue counts for every node asked for: the first time from when
the job could have started, after a requeue from the end of the last allocation (Slurm's own delay is part
of what a requeue costs).

`core.goodput.ledger` books the intervals, event by event.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Category:
    """A category of time. `group` is one of productive, start, running, incident, around."""

    name: str
    group: str
    meaning: str


# In the order of reports. A category that is not here is still counted and shown, after these.
CATEGORIES = (
    Category("step", "productive", "steps done for the first time"),
    Category("queue_wait", "start", "in the queue before the first allocation"),
    Category("launch", "start", "processes, imports and rendezvous of the first attempt"),
    Category("restore", "start", "reading a checkpoint"),
    Category("warm_up", "start", "from the restore to the end of an attempt's first step"),
    Category("checkpoint_stall", "running", "training stood still for a save"),
    Category("detection", "incident", "from a fault to its detection"),
    Category("hang", "incident", "no rank stepped, until that was judged a hang"),
    Category("diagnosis", "incident", "stopping the ranks and gathering evidence"),
    Category("decision", "incident", "choosing what to do"),
    Category("replacement", "incident", "back-off, and waiting for the nodes of the next attempt"),
    Category("relaunch", "incident", "processes, imports and rendezvous of a later attempt"),
    Category("rework", "incident", "steps done again, and the step that a failure cut short"),
    Category("requeue_wait", "around", "between two allocations"),
    Category("spare_idle", "around", "nodes held ready, or not placed for another reason"),
    Category("failed_node", "around", "nodes that were lost or taken out, still allocated"),
    Category("shutdown", "around", "from the last step, or the decision to end, to the end"),
    Category("unknown", "around", "the journal does not tell"),
)
MEANINGS = {category.name: category.meaning for category in CATEGORIES}
RATIOS = {
    "ettr": "time in steps that counted / time since the job could have started (queue included)",
    "runtime_goodput": "time in steps that counted / time since the first launch (requeue waits included)",
    "allocation_goodput": "node-time in steps that counted / node-time allocated (spares included)",
}
# The activity of a node while it has a place; every other activity is a category itself.
PLACED = "placed"


def to_us(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * 1_000_000)


def ordered(names: Sequence[str]) -> list[str]:
    """Return category names in the order of reports; unknown ones come last, by name."""
    known = {category.name: place for place, category in enumerate(CATEGORIES)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


@dataclass
class Interval:
    """[`start`, `end`) in microseconds since the epoch; `incident` 0: none."""

    start: int
    end: int
    category: str
    incident: int = 0
    attempt: int = 0

    @property
    def us(self) -> int:
        return self.end - self.start


@dataclass
class Stay:
    """What one node did from `start` to `end` (None: still): `PLACED`, or the category itself."""

    start: int
    end: int | None
    what: str

    @property
    def until(self) -> int:
        return self.start if self.end is None else self.end


def cut_out(timeline: Sequence[Interval], starts: Sequence[int], start: int, end: int) -> Iterator[Interval]:
    """Return the part of `timeline` within [`start`, `end`); `starts` are the starts of its intervals."""
    for place in range(max(0, bisect_right(starts, start) - 1), len(timeline)):
        interval = timeline[place]
        if interval.start >= end:
            return
        if start <= interval.start and interval.end <= end:
            yield interval
        elif interval.end > start:
            yield replace(interval, start=max(interval.start, start), end=min(interval.end, end))


@dataclass(frozen=True)
class Account:
    """All intervals up to `end` (microseconds); `final` when nothing can be added."""

    timeline: tuple[Interval, ...]
    waits: tuple[Interval, ...]
    asked_nodes: int
    stays: dict[str, tuple[Stay, ...]]
    first_launch: int | None
    end: int
    final: bool
    totals: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "totals", self._totals())

    def _totals(self) -> Counter[str]:
        """Return node-microseconds by category. Nodes placed over the same time are computed once."""
        totals: Counter[str] = Counter()
        placed: Counter[tuple[int, int]] = Counter()
        for stays in self.stays.values():
            for stay in stays:
                if stay.what == PLACED:
                    placed[stay.start, stay.until] += 1
                else:
                    totals[stay.what] += stay.until - stay.start
        starts = [interval.start for interval in self.timeline]
        for (start, end), nodes in placed.items():
            for interval in cut_out(self.timeline, starts, start, end):
                totals[interval.category] += nodes * interval.us
        for wait in self.waits:
            totals[wait.category] += self.asked_nodes * wait.us
        return Counter({name: us for name, us in totals.items() if us})

    @property
    def queue_us(self) -> int:
        """The queue time of all requested nodes."""
        return self.asked_nodes * sum(wait.us for wait in self.waits)

    @property
    def allocated_us(self) -> int:
        """The node-time of all allocations."""
        return sum(stay.until - stay.start for stays in self.stays.values() for stay in stays)

    @property
    def wall_us(self) -> int:
        """The time since the job could have started."""
        return sum(interval.us for interval in (*self.waits, *self.timeline))

    def placed_us(self, category: str) -> int:
        """Return the time (not node-time) that the placed nodes spent in `category`."""
        return sum(interval.us for interval in self.timeline if interval.category == category)

    def incident_us(self, incident: int) -> int:
        """Return the time (not node-time) that `incident` cost the placed nodes, and the run in the queue."""
        return sum(i.us for i in (*self.timeline, *self.waits) if i.incident == incident)

    def ratios(self) -> dict[str, float | None]:
        """Return the three main ratios, 0..1; None while the denominator is 0."""
        productive = self.placed_us("step")
        since_launch = 0 if self.first_launch is None else self.end - self.first_launch
        return {
            "ettr": _ratio(productive, self.wall_us),
            "runtime_goodput": _ratio(productive, since_launch),
            "allocation_goodput": _ratio(self.totals["step"], self.allocated_us),
        }

    def intervals(self, node: str) -> Iterator[Interval]:
        """Return what `node` did, in order; times in which it was not allocated are left out."""
        starts = [interval.start for interval in self.timeline]
        for stay in self.stays[node]:
            if stay.what == PLACED:
                yield from cut_out(self.timeline, starts, stay.start, stay.until)
            elif stay.until > stay.start:
                yield Interval(stay.start, stay.until, stay.what)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
