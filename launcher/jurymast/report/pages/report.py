"""The goodput report as a page: the run's state, where its node-time went, and what each incident cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jurymast.core.goodput import Account
from jurymast.core.run.causes import CAUSES
from jurymast.core.run.state import RunState
from jurymast.report.goodput import PARTS, cadence_text, mtbf_text, reach
from jurymast.report.pages import render
from jurymast.report.pages.charts import Bar, Slice, Timeline, kind, slices, timeline
from jurymast.report.status import tiers_json
from jurymast.report.text import count, duration, node_time, percent

RATIO_NAMES = {
    "ettr": "ETTR", "runtime_goodput": "Runtime goodput", "allocation_goodput": "Allocation goodput",
}  # fmt: skip
# The looks of states; all others are calm.
TONES = {
    "succeeded": "good", "failed": "bad", "cancelled": "warn", "recovering": "warn", "requeued": "warn",
}  # fmt: skip
# The category to which a part of an incident is charged.
PART_CATEGORIES = {
    "detect": "detection", "diagnose": "diagnosis", "decide": "decision", "replace": "replacement",
    "launch": "relaunch", "restore": "restore", "rework": "rework",
}  # fmt: skip
LOSSES_TOLD = 3


@dataclass(frozen=True)
class Card:
    name: str
    value: str
    what: str


@dataclass(frozen=True)
class IncidentView:
    """An incident. `seconds` are by part, in the order of PARTS; `bars` shows them in a bar of length 1.
    `steps`: from which step the run went back to which."""

    id: int
    at: str
    cause: str
    meaning: str
    todo: str
    node: str | None
    rank: int | None
    action: str | None
    why: str
    evidence: str
    traceback: str | None
    open: bool
    seconds: tuple[float, ...]
    bars: tuple[Bar, ...]
    steps: str
    tiers: Mapping[str, int]

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class TierRow:
    """A tier. `step` is None if the tier has nothing yet."""

    name: str
    step: int | None
    at: str
    size_bytes: int
    seconds: float
    failures: int
    error: str


@dataclass(frozen=True)
class ReportPage:
    """The page's content. `failure` is the incident with which the run ended; `sums` has the incidents'
    seconds by part."""

    title: str
    run: str
    state: str
    tone: str
    reason: str
    reach: str
    extent: str
    summary: str
    warnings: Sequence[str]
    failure: IncidentView | None
    cards: tuple[Card, ...]
    slices: tuple[Slice, ...]
    total_node_seconds: float
    timeline: Timeline | None
    parts: tuple[tuple[str, str], ...]
    incidents: tuple[IncidentView, ...]
    sums: tuple[float, ...]
    tiers: tuple[TierRow, ...]
    cadence: str
    mtbf: str
    provenance: tuple[tuple[str, str], ...]


def page(report: Mapping[str, Any], account: Account, state: RunState) -> str:
    """Render the whole page; `report` is `report_view` at the same moment as `account` and `state`."""
    return render("report.html.j2", report_page(report, account, state), report)


def report_page(report: Mapping[str, Any], account: Account, state: RunState) -> ReportPage:
    incidents = tuple(_incident(each) for each in report["incidents"])
    found = slices(report["categories"], report["total_node_seconds"])
    return ReportPage(
        title=f"{report['run']}: {report['state']}",
        run=report["run"],
        state=report["state"],
        tone=TONES.get(report["state"], "calm"),
        reason=report["end_reason"],
        reach=reach(report, "%Y-%m-%d %H:%M:%S %z"),
        extent=_extent(report),
        summary=_summary(report, found),
        warnings=report["warnings"],
        failure=incidents[-1] if report["state"] == "failed" and incidents else None,
        cards=(*_ratio_cards(report), _incident_card(incidents)),
        slices=found,
        total_node_seconds=report["total_node_seconds"],
        timeline=timeline(account, state.incidents),
        parts=tuple((part, kind(PART_CATEGORIES[part])) for part in PARTS),
        incidents=incidents,
        sums=tuple(sum(column) for column in zip(*(each.seconds for each in incidents), strict=True)),
        tiers=tuple(
            TierRow(name, tier["step"], _clock(tier["at"]), tier["size_bytes"], tier["seconds"],
                 tier["failures"], tier["error"] or "")
            for name, tier in tiers_json(state).items()
        ),
        cadence=cadence_text(report),
        mtbf=mtbf_text(report),
        provenance=tuple(
            (name.replace("_", " "), _shown(value)) for name, value in report["provenance"].items()
        ),
    )  # fmt: skip


def _extent(report: Mapping[str, Any]) -> str:
    """The run's size and progress."""
    nodes, spares = report["nodes"]["active"], report["nodes"]["spares"]
    size = count(nodes, "active node") + (f" and {count(spares, 'spare')}" if spares else "")
    steps = (
        f"{count(report['steps']['done'], 'step')} done" if report["steps"]["done"] else "no step done yet"
    )
    return f"{size}; {steps}; {duration(report['wall_seconds'])} since the job could have started"


def _summary(report: Mapping[str, Any], found: Sequence[Slice]) -> str:
    """The bar of categories as a sentence."""
    total = report["total_node_seconds"]
    if not total:
        return "No node-time has been spent yet."
    useful = sum(each.share for each in found if each.group == "productive")
    told = f"{percent(useful)} of {node_time(total)} went into steps that counted"
    rest = sorted((each for each in found if each.group != "productive"), key=lambda s: -s.share)
    names = [f"{each.name.replace('_', ' ')} {percent(each.share)}" for each in rest[:LOSSES_TOLD]]
    return f"{told}. Most of the rest: {', '.join(names)}." if names else f"{told}."


def _ratio_cards(report: Mapping[str, Any]) -> list[Card]:
    return [
        Card(RATIO_NAMES.get(name, name), percent(value), report["definitions"][name])
        for name, value in report["ratios"].items()
    ]


def _incident_card(incidents: Sequence[IncidentView]) -> Card:
    if not incidents:
        return Card("Incidents", "none", "no failures, and no restart was requested")
    worst = max(incidents, key=lambda each: each.total)
    told = f"cost {duration(sum(each.total for each in incidents))} of training"
    if len(incidents) > 1:
        told += f"; the longest, {worst.cause or 'being diagnosed'} (#{worst.id}), {duration(worst.total)}"
    return Card("Incidents", str(len(incidents)), told)


def _incident(incident: Mapping[str, Any]) -> IncidentView:
    known = CAUSES.get(incident["cause"])
    seconds = [incident["seconds"][part] for part in PARTS]
    total, x, bars = sum(seconds), 0.0, []
    for part, value in zip(PARTS, seconds, strict=True):
        if value > 0:
            bars.append(Bar(kind(PART_CATEGORIES[part]), x, value / total, f"{part} {duration(value)}"))
            x += value / total
    back = incident["step_restored"]
    steps = str(incident["step_lost_from"])
    return IncidentView(
        id=incident["id"],
        at=_clock(incident["at"]),
        cause=incident["cause"] or "being diagnosed",
        meaning=known.meaning[:1].upper() + known.meaning[1:] if known else "",
        todo=known.todo if known else "",
        node=incident["node"],
        rank=incident["rank"],
        action=incident["action"] or None,
        why=incident["why"],
        evidence=incident["evidence"],
        traceback=incident["traceback"],
        open=incident["open"],
        seconds=tuple(seconds),
        bars=tuple(bars),
        steps=steps if back is None else f"{steps} → {back}",
        tiers=incident["tiers"],
    )


def _clock(at: str | None) -> str:
    return datetime.fromisoformat(at).strftime("%m-%d %H:%M:%S") if at else "-"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
