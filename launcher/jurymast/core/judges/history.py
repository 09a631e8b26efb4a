"""What earlier runs say about each node: incidents, strikes, exclusions with their expiry, a lemon score, and
since when it is back after a failure.

A node that failed a run is excluded from the next ones for a while, and permanently after `STRIKES_MAX` such
failures within `WINDOW_S`. Lemons are nodes that fail again and again without a known cause. The signals are
those of Meta's "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024), as far as
journals and Slurm have them (no tickets). Times are seconds since the epoch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec

from jurymast.core.state.failure_rate import (
    AFTER_REPAIR,
    AFTER_REPAIR_S,
    DAY_S,
    FrailNode,
    Watched,
    node_rate,
)
from jurymast.core.state.settings import Clock, Count

WINDOW_S = 28 * DAY_S
STRIKES_MAX = 3
# More nodes than this that leave one run within the burst are a switch's or a room's fault, not theirs.
BURST_S = 180.0
BURST_NODES = 2


@dataclass(frozen=True, kw_only=True)
class NodeDeparture:
    """A node left a run at `at`. `failed`: it was lost or found bad; otherwise it was only suspected.
    `by_hand`: a user requested it."""

    node: str
    at: Clock
    cause: str
    evidence: str
    failed: bool = True
    by_hand: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """`nodes` were in one allocation of a run from `start` to `end`; the `spares` among them were not in its
    first attempt."""

    start: Clock
    end: Clock
    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A summary of one run's journal. `failures`: when its infrastructure failed (the incidents charged to
    it). `jobs` are its Slurm jobs, `xids`: (when, node, code). `excluded`: nodes that this run did not want
    back, by hand or by itself."""

    run: str
    active: Count
    spans: tuple[Span, ...] = ()
    failures: tuple[Clock, ...] = ()
    departures: tuple[NodeDeparture, ...] = ()
    xids: tuple[tuple[Clock, str, str], ...] = ()
    excluded: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    ended: bool = False

    @property
    def until(self) -> float:
        """The newest time in the run's journal; 0.0 for a run that never started."""
        return max((span.end for span in self.spans), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PastRun:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        made = msgspec.convert(values, cls)
        if values.keys() != vars(made).keys():
            raise ValueError("its fields are others")
        return made


@dataclass(frozen=True)
class Signal:
    """One of the lemon score's signals. It counts if `value` has reached `limit`."""

    name: str
    value: float
    limit: float
    evidence: str

    @property
    def shows(self) -> bool:
        return self.value >= self.limit


@dataclass
class NodeRecord:
    """One node over all runs. `excluded_until` is None if nothing excludes it, or if only a user can end the
    exclusion (`for_good`). `fresh_until` is a day after it returned from a failure; None: it was not seen
    again. Of its `node_days`, `fresh_days` were within such days."""

    name: str
    runs: int = 0
    node_days: float = 0.0
    fresh_days: float = 0.0
    fresh_until: float | None = 0.0
    departures: list[NodeDeparture] = field(default_factory=list)
    strikes: int = 0  # within the window that ends now
    signals: list[Signal] = field(default_factory=list)
    excluded_until: float | None = None
    for_good: bool = False
    why: str = ""

    @property
    def lemon_score(self) -> int:
        """The number of signals that count, 0 to 6."""
        return sum(signal.shows for signal in self.signals)

    @property
    def excluded(self) -> bool:
        return self.for_good or self.excluded_until is not None

    @property
    def failures(self) -> int:
        return sum(departure.failed and not departure.by_hand for departure in self.departures)

    @property
    def exposure_days(self) -> float:
        """Its node-days, weighted as they count towards its failure rate."""
        return self.node_days + (AFTER_REPAIR - 1.0) * self.fresh_days

    def fresh(self, now: float) -> bool:
        """Whether it is in the day after a repair, or will be once it serves again."""
        return self.fresh_until is None or now < self.fresh_until

    def why_frail(self, now: float) -> str:
        """Say why it is expected to fail."""
        times = "once" if self.failures == 1 else f"{self.failures} times"
        told = f"failed {times} in {self.node_days:.3g} node-days"
        if self.fresh_until is None:
            return f"{told}, and has not been used since"
        if self.fresh(now):
            back = datetime.fromtimestamp(self.fresh_until - AFTER_REPAIR_S)
            told += f", used again since {back:%Y-%m-%d %H:%M}"
        return told


@dataclass
class _Counts:
    """The counts of one node within the window."""

    excluding_runs: int = 0
    xids: Counter[str] = field(default_factory=Counter)
    alone: int = 0  # left while no other node of its run did
    together: int = 0
    runs: int = 0
    failed_runs: set[str] = field(default_factory=set)


def history(
    runs: Sequence[PastRun],
    now: float,
    exclusion_s: float,
    *,
    out_s: Mapping[str, float] | None = None,
    forgiven: Mapping[str, float] | None = None,
) -> dict[str, NodeRecord]:
    """Return the record of every node that was in one of `runs`.

    `exclusion_s`: how long a strike excludes a node. `out_s`: for how long Slurm has had a node out of
    service. `forgiven`: what happened to a node before that time no longer excludes it.
    """
    back = comebacks(runs, forgiven or {})
    records: dict[str, NodeRecord] = {}
    counts: dict[str, _Counts] = {}
    strikes: dict[str, list[NodeDeparture]] = {}
    for run in runs:
        recent = run.until > now - WINDOW_S
        for span in run.spans:
            for node in span.nodes:
                record = records.setdefault(node, NodeRecord(node))
                record.node_days += max(0.0, span.end - span.start) / DAY_S
                record.fresh_days += sum(b - a for a, b in first_days(span, back.get(node, ()))) / DAY_S
        for node in {node for span in run.spans for node in span.nodes}:
            records[node].runs += 1
            counts.setdefault(node, _Counts()).runs += recent
        for node in run.excluded if recent else ():
            counts.setdefault(node, _Counts()).excluding_runs += 1
        for at, node, code in run.xids:
            if at > now - WINDOW_S:
                counts.setdefault(node, _Counts()).xids[code] += 1
        for departure, struck, alone in judged(run.departures):
            record = records.setdefault(departure.node, NodeRecord(departure.node))
            record.departures.append(departure)
            if departure.at > now - WINDOW_S and departure.failed and not departure.by_hand:
                count = counts.setdefault(departure.node, _Counts())
                count.alone, count.together = count.alone + alone, count.together + (not alone)
                count.failed_runs.add(run.run)
            if struck:
                strikes.setdefault(departure.node, []).append(departure)
    for name, record in records.items():
        record.departures.sort(key=lambda departure: departure.at)
        if name in back:
            last = back[name][-1]
            record.fresh_until = None if last == math.inf else last + AFTER_REPAIR_S
        record.signals = _signals(counts.get(name, _Counts()), (out_s or {}).get(name, 0.0))
        _exclude(record, strikes.get(name, []), now, exclusion_s, (forgiven or {}).get(name, 0.0))
    return records


def comebacks(runs: Sequence[PastRun], forgiven: Mapping[str, float]) -> dict[str, list[float]]:
    """Return when each node that had failed a run served again, in order: in its next allocation, or when a
    user said that it was repaired (`forgiven`); infinity if it has not been seen since."""
    failed: dict[str, list[float]] = {}
    for run in runs:
        for departure, struck, _ in judged(run.departures):
            if struck:
                failed.setdefault(departure.node, []).append(departure.at)
    served = {node: [forgiven[node]] if node in forgiven else [] for node in failed}
    for run in runs:
        for span in run.spans:
            for node in failed.keys() & set(span.nodes):
                served[node].append(span.start)
    return {
        node: sorted({min((t for t in served[node] if t > at), default=math.inf) for at in times})
        for node, times in failed.items()
    }


def watched_in(run: PastRun) -> list[Watched]:
    """What was watched in each of the run's allocations. Only failures of active nodes count."""
    if not run.spans:
        return []
    spans = [Watched(span.start, span.end, min(run.active, len(span.nodes))) for span in run.spans]
    return [replace(spans[0], failures_s=run.failures), *spans[1:]]


def first_days(span: Span, back: Sequence[float]) -> list[tuple[float, float]]:
    """Return the parts (from, until) of `span` that are within a day after one of the times `back`."""
    found = []
    for at, again in zip(back, (*back[1:], math.inf), strict=False):
        start, end = max(span.start, at), min(span.end, at + AFTER_REPAIR_S, again)
        if end > start:
            found.append((start, end))
    return found


def judged(departures: Sequence[NodeDeparture]) -> list[tuple[NodeDeparture, bool, bool]]:
    """Return (departure, whether it is a strike against the node, whether the node left alone) for one
    run."""
    result = []
    failed = [d for d in departures if d.failed and not d.by_hand]
    for departure in departures:
        beside = {d.node for d in failed if abs(d.at - departure.at) <= BURST_S} | {departure.node}
        struck = departure.failed and not departure.by_hand and len(beside) <= BURST_NODES
        result.append((departure, struck, len(beside) == 1))
    return result


def _exclude(
    record: NodeRecord, strikes: list[NodeDeparture], now: float, exclusion_s: float, forgiven: float
) -> None:
    """Set the exclusion that follows from the node's strikes."""
    strikes.sort(key=lambda departure: departure.at)
    record.strikes = sum(strike.at > now - WINDOW_S for strike in strikes)
    counted = [strike for strike in strikes if strike.at > forgiven]
    if not counted:
        return
    newest = counted[-1]
    # Any window counts, not only the one that ends now, because an excluded node cannot prove itself.
    windows = zip(counted, counted[STRIKES_MAX - 1 :], strict=False)
    record.for_good = any(last.at - first.at <= WINDOW_S for first, last in windows)
    if record.for_good:
        record.why = f"{len(counted)} strikes, the latest: {newest.cause} ({newest.evidence})"
    elif newest.at + exclusion_s > now:
        record.excluded_until = newest.at + exclusion_s
        record.why = f"{newest.cause} ({newest.evidence})"


def _signals(counts: _Counts, out_s: float) -> list[Signal]:
    """Compute the signals. Their limits are jurymast's own: twice is a pattern, and out for a day is more
    than a reboot."""
    failed = counts.alone + counts.together
    codes = ", ".join(f"{code} x {times}" for code, times in sorted(counts.xids.items()))
    rate = len(counts.failed_runs) / counts.runs if counts.runs and failed > 1 else 0.0
    return [
        Signal("exclusions", counts.excluding_runs, 2, f"excluded by {counts.excluding_runs} runs"),
        Signal("xids", counts.xids.total() if counts.xids else 0, 2, codes or "no Xid"),
        Signal("hours_out", out_s / 3600.0, 24, f"out of service for {out_s / 3600.0:.0f} h"),
        Signal("failures_with_others", counts.together, 2, f"lost together with others {counts.together} x"),
        Signal("failures_alone", counts.alone, 2, f"lost alone {counts.alone} x"),
        Signal("failure_rate", rate, 0.3, f"failed {len(counts.failed_runs)} of {counts.runs} runs"),
    ]  # fmt: skip


def worst_first(record: NodeRecord) -> tuple[object, ...]:
    """A key for sorting: the nodes that most speaks against come first."""
    return (
        not record.for_good, not record.excluded, -record.lemon_score, -record.strikes,
        -len(record.departures), record.name,
    )  # fmt: skip


# ---- nodes that are likely to fail


def frail_nodes(records: Iterable[NodeRecord], fleet: float, now: float) -> list[FrailNode]:
    """Return the nodes that, by earlier runs, are expected to fail more often; `fleet`: failures per 1,000
    node-days of all."""
    found = [
        FrailNode(
            node=record.name, fresh_until=record.fresh_until, why=record.why_frail(now),
            factor=round(node_rate(fleet, record.failures, record.exposure_days) / fleet, 3),
        )
        for record in records
    ]  # fmt: skip
    return sorted((frail for frail in found if frail.times(now) > 1.0), key=lambda frail: frail.node)


def more_exposure(runs: Sequence[PastRun], back: Mapping[str, Sequence[float]]) -> list[Watched]:
    """Return the weight of placed nodes' days after repairs beyond that of other days, so that failures on
    them do not raise the rate that is expected of all. `back`: when nodes that had failed served again."""
    return [
        Watched(start, end, AFTER_REPAIR - 1.0)
        for run in runs
        for span in run.spans
        for node in sorted(back.keys() & (set(span.nodes) - set(span.spares)))
        for start, end in first_days(span, back[node])
    ]
