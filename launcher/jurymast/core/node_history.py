"""What earlier runs say about each node: incidents, strikes, exclusions with their expiry, a lemon score.

A node that failed a run is kept out of the next ones for a while, and for good after `STRIKES_MAX` such
failures within `WINDOW_S`. Lemons are nodes that fail again and again without anybody finding out why; the
signals are those of Meta's "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024)
as far as journals and Slurm have them (no tickets). Times are seconds since the epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DAY_S = 86_400.0
WINDOW_S = 28 * DAY_S
STRIKES_MAX = 3
# More nodes than this that leave one run within the burst are a switch's or a room's fault, not theirs.
BURST_S = 180.0
BURST_NODES = 2


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A node left a run at `at`. `failed`: it was lost or found bad; else it was only suspected. `by_hand`:
    somebody asked for it."""

    node: str
    at: float
    cause: str
    evidence: str
    failed: bool = True
    by_hand: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """`nodes` were in one allocation of a run from `start` to `end`."""

    start: float
    end: float
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run's journal in brief. `failures`: when its infrastructure failed (the incidents charged to it).
    `jobs` are its Slurm jobs, `xids`: (when, node, code). `excluded`: nodes that this run did not want back,
    by hand or by itself."""

    run: str
    active: int
    spans: tuple[Span, ...] = ()
    failures: tuple[float, ...] = ()
    departures: tuple[Departure, ...] = ()
    xids: tuple[tuple[float, str, str], ...] = ()
    excluded: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    ended: bool = False

    @property
    def until(self) -> float:
        """The newest time that the run's journal knows of; 0.0 for a run that never started."""
        return max((span.end for span in self.spans), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PastRun:
        """Raises KeyError, TypeError or ValueError for anything else than `to_json` wrote."""
        return cls(
            run=values["run"],
            active=values["active"],
            spans=tuple(Span(**{**span, "nodes": tuple(span["nodes"])}) for span in values["spans"]),
            failures=tuple(values["failures"]),
            departures=tuple(Departure(**departure) for departure in values["departures"]),
            xids=tuple((at, node, code) for at, node, code in values["xids"]),
            excluded=tuple(values["excluded"]),
            jobs=tuple(values["jobs"]),
            ended=values["ended"],
        )


@dataclass(frozen=True)
class Signal:
    """One of the lemon score's signals: it counts when `value` has reached `limit`."""

    name: str
    value: float
    limit: float
    evidence: str

    @property
    def shows(self) -> bool:
        return self.value >= self.limit


@dataclass
class NodeRecord:
    """One node over all runs. `excluded_until` is None when nothing keeps it out, or when nothing but a word
    of somebody's ends that (`for_good`)."""

    name: str
    runs: int = 0
    node_days: float = 0.0
    departures: list[Departure] = field(default_factory=list)
    strikes: int = 0  # within the window that ends now
    signals: list[Signal] = field(default_factory=list)
    excluded_until: float | None = None
    for_good: bool = False
    why: str = ""

    @property
    def lemon_score(self) -> int:
        """How many signals show, 0 to 6."""
        return sum(signal.shows for signal in self.signals)

    @property
    def excluded(self) -> bool:
        return self.for_good or self.excluded_until is not None


@dataclass
class _Counts:
    """Of one node, within the window."""

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
    """The record of every node that was in one of `runs`.

    `exclusion_s`: how long a strike keeps a node out. `out_s`: for how long Slurm has had a node out of
    service. `forgiven`: what happened to a node before that time no longer keeps it out.
    """
    records: dict[str, NodeRecord] = {}
    counts: dict[str, _Counts] = {}
    strikes: dict[str, list[Departure]] = {}
    for run in runs:
        recent = run.until > now - WINDOW_S
        for span in run.spans:
            for node in span.nodes:
                record = records.setdefault(node, NodeRecord(node))
                record.node_days += max(0.0, span.end - span.start) / DAY_S
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
        record.signals = _signals(counts.get(name, _Counts()), (out_s or {}).get(name, 0.0))
        _exclude(record, strikes.get(name, []), now, exclusion_s, (forgiven or {}).get(name, 0.0))
    return records


def judged(departures: Sequence[Departure]) -> list[tuple[Departure, bool, bool]]:
    """(departure, whether it is a strike against the node, whether the node left alone) for one run."""
    result = []
    failed = [d for d in departures if d.failed and not d.by_hand]
    for departure in departures:
        beside = {d.node for d in failed if abs(d.at - departure.at) <= BURST_S} | {departure.node}
        struck = departure.failed and not departure.by_hand and len(beside) <= BURST_NODES
        result.append((departure, struck, len(beside) == 1))
    return result


def _exclude(
    record: NodeRecord, strikes: list[Departure], now: float, exclusion_s: float, forgiven: float
) -> None:
    """Set what the node's strikes come to."""
    strikes.sort(key=lambda departure: departure.at)
    record.strikes = sum(strike.at > now - WINDOW_S for strike in strikes)
    counted = [strike for strike in strikes if strike.at > forgiven]
    if not counted:
        return
    newest = counted[-1]
    # Any window, not only the one that ends now: a node that is kept out cannot earn its way back.
    windows = zip(counted, counted[STRIKES_MAX - 1 :], strict=False)
    record.for_good = any(last.at - first.at <= WINDOW_S for first, last in windows)
    if record.for_good:
        record.why = f"{len(counted)} strikes, the newest: {newest.cause} ({newest.evidence})"
    elif newest.at + exclusion_s > now:
        record.excluded_until = newest.at + exclusion_s
        record.why = f"{newest.cause} ({newest.evidence})"


def _signals(counts: _Counts, out_s: float) -> list[Signal]:
    """Limits are ours: twice is a pattern, and out for a day is more than a reboot."""
    failed = counts.alone + counts.together
    codes = ", ".join(f"{code} x {times}" for code, times in sorted(counts.xids.items()))
    rate = len(counts.failed_runs) / counts.runs if counts.runs and failed > 1 else 0.0
    return [
        Signal("exclusions", counts.excluding_runs, 2, f"excluded by {counts.excluding_runs} runs"),
        Signal("xids", counts.xids.total() if counts.xids else 0, 2, codes or "no Xid"),
        Signal("hours_out", out_s / 3600.0, 24, f"out of service for {out_s / 3600.0:.0f} h"),
        Signal("failures_with_others", counts.together, 2, f"left together with others {counts.together} x"),
        Signal("failures_alone", counts.alone, 2, f"left alone {counts.alone} x"),
        Signal("failure_rate", rate, 0.3, f"failed {len(counts.failed_runs)} of {counts.runs} runs"),
    ]  # fmt: skip
