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
from jurymast.report.pages.charts import Bar, Slice, kind, slices, timeline
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


def page(report: Mapping[str, Any], account: Account, state: RunState) -> str:
    """Render the whole page; `report` is `report_view` at the same moment as `account` and `state`."""
    return render("report.html.j2", report, report_page(report, account, state))


def report_page(report: Mapping[str, Any], account: Account, state: RunState) -> dict[str, Any]:
    """What the page shows beside the report's own values. `failure` is the incident with which the run ended;
    `sums` has the incidents' seconds by part."""
    incidents = [_incident(each) for each in report["incidents"]]
    found = slices(report["categories"], report["total_node_seconds"])
    return {
        "title": f"{report['run']}: {report['state']}",
        "tone": TONES.get(report["state"], "calm"),
        "reach": reach(report, "%Y-%m-%d %H:%M:%S %z"),
        "extent": _extent(report),
        "summary": _summary(report, found),
        "failure": incidents[-1] if report["state"] == "failed" and incidents else None,
        "cards": [*ratio_cards(report["ratios"], report["definitions"]), _incident_card(incidents)],
        "slices": found,
        "timeline": timeline(account, state.incidents),
        "parts": {part: kind(PART_CATEGORIES[part]) for part in PARTS},
        "incidents": incidents,
        "sums": [sum(each["seconds"][part] for each in incidents) for part in PARTS],
        "tiers": {name: {**tier, "at": _clock(tier["at"])} for name, tier in tiers_json(state).items()},
        "cadence": cadence_text(report),
        "mtbf": mtbf_text(report),
        "provenance": {
            name: " ".join(map(str, value)) or None if isinstance(value, list) else value
            for name, value in report["provenance"].items()
        },
    }


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


def ratio_cards(ratios: Mapping[str, float | None], meanings: Mapping[str, str]) -> list[Card]:
    return [
        Card(RATIO_NAMES.get(name, name), percent(ratio), meanings[name]) for name, ratio in ratios.items()
    ]


def _incident_card(incidents: Sequence[Mapping[str, Any]]) -> Card:
    if not incidents:
        return Card("Incidents", "none", "no failures, and no restart was requested")
    worst = max(incidents, key=lambda each: each["total"])
    told = f"cost {duration(sum(each['total'] for each in incidents))} of training"
    if len(incidents) > 1:
        told += f"; the longest, {worst['cause']} (#{worst['id']}), {duration(worst['total'])}"
    return Card("Incidents", str(len(incidents)), told)


def _incident(incident: Mapping[str, Any]) -> dict[str, Any]:
    """The incident's values with those that only the page shows. `bars` are its parts in a bar of length 1;
    `steps`: from which step the run went back to which."""
    known = CAUSES.get(incident["cause"])
    total, x, bars = sum(incident["seconds"].values()), 0.0, []
    for part in PARTS:
        if (value := incident["seconds"][part]) > 0:
            bars.append(Bar(kind(PART_CATEGORIES[part]), x, value / total, f"{part} {duration(value)}"))
            x += value / total
    back, steps = incident["step_restored"], str(incident["step_lost_from"])
    return {
        **incident,
        "at": _clock(incident["at"]),
        "cause": incident["cause"] or "being diagnosed",
        "meaning": known.meaning[:1].upper() + known.meaning[1:] if known else "",
        "todo": known.todo if known else "",
        "total": total,
        "bars": bars,
        "steps": steps if back is None else f"{steps} → {back}",
    }


def _clock(at: str | None) -> str:
    return datetime.fromisoformat(at).strftime("%m-%d %H:%M:%S") if at else "-"
