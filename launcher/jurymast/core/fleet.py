"""The runs of a fleet together: where their node-time went, and how often nodes failed, by groups of runs.

A run's account is cut into days (UTC), so that a month, or the last four weeks, have exactly what was spent
in them. As in `core.goodput` everything is in whole microseconds: the sums over groups are those over runs,
to the last one. What is not known to have counted is kept apart, so that every ratio is a range.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from jurymast.core.goodput import DOUBTFUL, PLACED, Account, Interval
from jurymast.core.judges.history import PastRun, watched_in
from jurymast.core.state.failure_rate import DAY_S, Mtbf, Watched, between_bursts, merged, mtbf
from jurymast.core.state.incident import Incident
from jurymast.core.state.settings import Count, Price

DAY_US = 86_400_000_000
# More days than any run has; a journal that tells of more is damaged, and each day costs memory.
DAYS_MAX = 4000
STEP = "step"
WAITING = frozenset({"queue_wait", "requeue_wait"})  # without nodes
SPARE_IDLE = "spare_idle"
# What somebody asked for: nothing of it was lost. Without a spare that was asked for, idle nodes are.
ASKED_FOR = frozenset({SPARE_IDLE, "checkpoint_stall", "restart_asked", "drain_asked", "rollback_asked"})
UNDIAGNOSED = "undiagnosed"  # the cause of an incident that is open
WEEK_DAYS, MONTH_DAYS = 7, 28

Spent = Counter[str]
# What a stranger's summary may say at most.
Us = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Millijoules = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Days = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class Day:
    """What a run did on one day: `number` days after 1 January 1970. `spent`: node-microseconds by cause (see
    `cause_of`). Of `wall_us` since the job could have started, `step_us` were in steps that counted, and
    `doubtful_us` may have been. `millijoules`: what GPUs used, by counters read that day."""

    number: Days
    spent: dict[str, Us] = field(default_factory=dict)
    wall_us: Us = 0
    step_us: Us = 0
    doubtful_us: Us = 0
    millijoules: Millijoules = 0

    @property
    def month(self) -> str:
        return f"{self._date:%Y-%m}"

    @property
    def month_end(self) -> float:
        """In seconds since the epoch."""
        years, month = divmod(self._date.month, 12)
        return self._date.replace(year=self._date.year + years, month=month + 1, day=1).timestamp()

    @property
    def _date(self) -> datetime:
        return datetime.fromtimestamp(self.number * DAY_S, timezone.utc)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run, as far as its journal tells. `gpus`: of a node, 0 if no node told; `whole`: nothing of its
    journal is missing; `past.ended`: nothing can be added."""

    past: PastRun
    cluster: str
    user: str = ""
    partition: str = ""
    account: str = ""
    gpus: Count = 0
    spares: Count = 0
    spares_used: Count = 0
    whole: bool = True
    days: Annotated[tuple[Day, ...], msgspec.Meta(max_length=DAYS_MAX + 1)] = ()
    price: Price | None = None

    @property
    def metered(self) -> bool:
        """Whether counters of its GPUs' energy were read."""
        return any(day.millijoules for day in self.days)

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSummary:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        made = msgspec.convert(values, cls)
        if values.keys() != vars(made).keys():
            raise ValueError("its fields are others")
        return made


def spent_by_day(
    account: Account, incidents: Iterable[Incident], submitted_at: float, joules: Mapping[int, float]
) -> tuple[Day, ...]:
    """Cut an account into days, oldest first; `joules` are cut already. A run of which nothing is booked has
    the day of its submission. Raises ValueError for an account of more than `DAYS_MAX` days."""
    causes = {incident.id: incident.cause or UNDIAGNOSED for incident in incidents}
    spent: defaultdict[int, Spent] = defaultdict(Counter)
    wall: defaultdict[int, Spent] = defaultdict(Counter)
    for nodes, interval in account.intervals_of_all():
        for day, us in _days_of(interval):
            spent[day][cause_of(interval, causes)] += nodes * us
    for interval in (*account.waits, *account.timeline):
        for day, us in _days_of(interval):
            wall[day][interval.category] += us
    numbers = sorted({*spent, *wall, *joules}) or [int(submitted_at // DAY_S)]
    return tuple(
        Day(
            number=day, spent={cause: us for cause, us in spent[day].items() if us},
            wall_us=wall[day].total(), step_us=wall[day][STEP],
            doubtful_us=sum(wall[day][name] for name in DOUBTFUL),
            millijoules=round(1000.0 * joules.get(day, 0.0)),
        )
        for day in numbers
    )  # fmt: skip


def _days_of(interval: Interval) -> list[tuple[int, int]]:
    """(day, microseconds in it) of an interval."""
    first, last = interval.start // DAY_US, max(interval.start, interval.end - 1) // DAY_US
    if first == last:  # nearly all
        return [(first, interval.end - interval.start)]
    if last - first > DAYS_MAX:
        raise ValueError(f"it tells of {last - first} days")
    return [
        (day, min(interval.end, (day + 1) * DAY_US) - max(interval.start, day * DAY_US))
        for day in range(first, last + 1)
    ]


def cause_of(interval: Interval, causes: Mapping[int, str]) -> str:
    """What the time is charged to: the cause of its incident, else its category. What counted or may have,
    and waiting without nodes, is charged to no incident."""
    if interval.category == STEP or interval.category in DOUBTFUL | WAITING:
        return interval.category
    return causes.get(interval.incident, interval.category)


def spares_used(account: Account) -> int:
    """How often a node that stood by took a place."""
    return sum(
        (before.what, after.what) == ("spare_idle", PLACED) and before.until == after.start
        for stays in account.stays.values()
        for before, after in pairwise(stays)
    )


# ---- groups

BY: dict[str, Callable[[RunSummary, Day], str]] = {
    "team": lambda run, day: run.account,
    "partition": lambda run, day: run.partition,
    "user": lambda run, day: run.user,
    "month": lambda run, day: day.month,
}
Key = tuple[str, ...]


@dataclass
class Cost:
    """What the GPU-time of runs with a price cost, in one currency."""

    total: float = 0.0
    counted: float = 0.0
    doubtful: float = 0.0
    gpu_us: int = 0

    def add(self, price: Price, used: Mapping[str, int]) -> None:
        """`used`: GPU-microseconds by cause."""
        gpu_us = sum(used.values())
        self.gpu_us += gpu_us
        self.total += price.of(gpu_us / 1e6)
        self.counted += price.of(used.get(STEP, 0) / 1e6)
        self.doubtful += price.of(sum(used.get(name, 0) for name in DOUBTFUL) / 1e6)


@dataclass
class RunGroup:
    """The sums of some runs' days, none of which is after `until` (seconds since the epoch). `nodes`, and
    `gpus` where their number is known, are microseconds by cause; `asked`, and `asked_gpus`, the part of them
    that somebody asked for; `costs` are by currency. `metered_us`: GPU-time of the runs whose energy is in
    `millijoules`. `wall_us`, `step_us` and `doubtful_us` are weighted with the runs' active nodes."""

    key: Key = ()
    runs: dict[str, RunSummary] = field(default_factory=dict)
    nodes: Spent = field(default_factory=Counter)
    gpus: Spent = field(default_factory=Counter)
    asked: Spent = field(default_factory=Counter)
    asked_gpus: Spent = field(default_factory=Counter)
    costs: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    millijoules: int = 0
    metered_us: int = 0
    wall_us: int = 0
    step_us: int = 0
    doubtful_us: int = 0
    until: float = math.inf

    def add(self, name: str, run: RunSummary, day: Day) -> None:
        self.runs[name] = run
        self.nodes.update(day.spent)
        used = {cause: run.gpus * us for cause, us in day.spent.items() if cause not in WAITING}
        self.gpus.update(used)
        for cause in day.spent.keys() & ASKED_FOR:
            if cause != SPARE_IDLE or run.spares:
                self.asked[cause] += day.spent[cause]
                self.asked_gpus[cause] += used[cause]
        if run.price is not None and run.gpus:
            self.costs[run.price.currency].add(run.price, used)
        if run.metered:
            self.millijoules += day.millijoules
            self.metered_us += sum(used.values())
        self.wall_us += run.past.active * day.wall_us
        self.step_us += run.past.active * day.step_us
        self.doubtful_us += run.past.active * day.doubtful_us

    @property
    def allocated_us(self) -> int:
        return self.nodes.total() - sum(self.nodes[name] for name in WAITING)

    @property
    def doubt_us(self) -> int:
        """Allocated node-time that may have counted."""
        return sum(self.nodes[name] for name in DOUBTFUL)

    def lost(self) -> dict[str, tuple[int, int]]:
        """(node-, GPU-microseconds) lost of what was allocated, by cause, the largest first."""
        causes = self.nodes.keys() - DOUBTFUL - WAITING - {STEP}
        return _by_size(
            {
                cause: (self.nodes[cause] - self.asked[cause], self.gpus[cause] - self.asked_gpus[cause])
                for cause in causes
            }
        )

    def asked_for(self) -> dict[str, tuple[int, int]]:
        """The same of what somebody asked for."""
        return _by_size({cause: (us, self.asked_gpus[cause]) for cause, us in self.asked.items()})

    def ratios(self) -> dict[str, tuple[float, float] | None]:
        """At least and at most; None while nothing was spent. A run counts by its active nodes, and by its
        allocated node-time."""
        return {
            "ettr": _range(self.step_us, self.doubtful_us, self.wall_us),
            "allocation_goodput": _range(self.nodes[STEP], self.doubt_us, self.allocated_us),
        }


def _by_size(spent: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """What is not nothing, the largest first."""
    order = sorted(spent, key=lambda cause: (-spent[cause][0], cause))
    return {cause: spent[cause] for cause in order if spent[cause][0]}


def _range(sure: int, doubtful: int, whole: int) -> tuple[float, float] | None:
    return (sure / whole, (sure + doubtful) / whole) if whole else None


def grouped(runs: Mapping[str, RunSummary], by: Sequence[str], since: float = 0.0) -> list[RunGroup]:
    """Sum up `runs` (by a name that only one has) in groups `by` some keys of `BY`, in order; from the day on
    that `since` is in (seconds since the epoch)."""
    found: dict[Key, RunGroup] = {}
    for name, run in runs.items():
        for day in run.days:
            if day.number >= since // DAY_S:
                key = tuple(BY[each](run, day) for each in by)
                until = day.month_end if "month" in by else math.inf
                found.setdefault(key, RunGroup(key, until=until)).add(name, run, day)
    return [found[key] for key in sorted(found)]


# ---- failures


def failures_within(watched: Sequence[Watched], start: float, end: float) -> Mtbf:
    """The failures of the infrastructure from `start` to `end`, and the node-seconds in which they could have
    happened: the mean is that of one node. Failures of several runs at once are one."""
    bursts = merged(at for each in watched for at in each.failures_s)
    clipped = (
        replace(each, start_s=max(each.start_s, start), end_s=min(each.end_s, end))
        for each in watched
        if each.start_s < end and each.end_s > start
    )
    observed_s = sum(
        each.nodes * (until - since) for each in clipped for since, until in between_bursts(each, bursts)
    )
    return mtbf(sum(start <= at < end for at in bursts), observed_s)


@dataclass(frozen=True)
class NodeFailures:
    """Of the last week, and of the last four. `trend`: whether the week is better or worse than the three
    before it, or unclear if it may be chance: the two intervals overlap; "" if either has nothing to compare.
    """

    week: Mtbf
    month: Mtbf
    trend: str


def failures_of(group: RunGroup, now: float) -> NodeFailures:
    """Up to `now`, or up to the group's end, if that is earlier."""
    end = min(now, group.until)
    watched = [one for run in group.runs.values() for one in watched_in(run.past)]
    week = failures_within(watched, end - WEEK_DAYS * DAY_S, end)
    before = failures_within(watched, end - MONTH_DAYS * DAY_S, end - WEEK_DAYS * DAY_S)
    return NodeFailures(week, failures_within(watched, end - MONTH_DAYS * DAY_S, end), _trend(week, before))


def _trend(week: Mtbf, before: Mtbf) -> str:
    if week.low_s is None or before.low_s is None:
        return ""
    if week.high_s is not None and week.high_s < before.low_s:
        return "worse"
    return "better" if before.high_s is not None and before.high_s < week.low_s else "unclear"
