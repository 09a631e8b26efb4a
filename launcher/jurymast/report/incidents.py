"""Incidents in what is told of a run: as JSON, and as a table with the reason and the decision of each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jurymast.core.state.incident import Incident, meaning
from jurymast.report.sentences import decision
from jurymast.report.text import Block, Line, Table, amounts, iso, plain_seconds, step_told

PARTS = ("detect", "diagnose", "decide", "replace", "launch", "restore", "rework")
# What a plus sign behind a time means, where a table has one.
MORE = "+: or more, as it is not known which steps were done again"


def at_least(time: str, incident: Mapping[str, Any]) -> str:
    """The time that an incident, or its rework, took, if that is known; else the least."""
    return time if incident["rework_known"] else f"{time}+"


def lost_step(incident: Mapping[str, Any]) -> str:
    """The newest step at an incident's fault, as `ps` shows steps."""
    return f"{'' if incident['numbered'] else '?+'}{incident['step_lost_from']}"


def incident_json(incident: Incident) -> dict[str, Any]:
    """The incident's JSON, with times as ISO 8601."""
    values = incident.to_json()
    values["at"], values["recovered_at"] = iso(values["at"]), iso(values["recovered_at"])
    values["meaning"] = meaning(incident.cause) or None
    return values


def incident_blocks(incidents: list[dict[str, Any]]) -> list[Block]:
    if not incidents:
        return [Line("no incidents")]
    rows = []
    for i in incidents:
        times = [*(i["seconds"][part] for part in PARTS), sum(i["seconds"].values())]
        *parts, rework, total = map(plain_seconds, times)
        parts += [at_least(rework, i), at_least(total, i)]
        named = (i[name] or "-" for name in ("cause", "node", "action"))
        rows.append([str(i["id"]), clock(i["at"]), *named, *parts])
    headers = ("#", "AT", "CAUSE", "NODE", "ACTION", *(part.upper() for part in PARTS), "TOTAL")
    blocks: list[Block] = [Table(headers, rows, right=frozenset({0, *range(5, 13)}), wrap=False)]
    blocks += [] if all(i["rework_known"] for i in incidents) else [Line(MORE)]
    traces: dict[str, int] = {}
    for i in incidents:
        steps = step_told(i["step_lost_from"], i["attempt"], known=i["numbered"])
        if i["step_restored"] is not None:
            steps += f", restored {i['step_restored']}{': ' * bool(i['tiers'])}{amounts(i['tiers'])}"
        blocks.append(Line(f"  #{i['id']} {i['evidence']} ({steps})"))
        if i["action"]:
            blocks.append(Line(f"     {decision(i)}"))
        blocks += [Line(f"       {line}") for line in trace_of(i, traces).rstrip().splitlines()]
    return blocks


def trace_of(incident: Mapping[str, Any], told: dict[str, int]) -> str:
    """The incident's traceback; one that was `told` before is only named."""
    trace = incident["traceback"] or ""
    first = told.setdefault(trace.rstrip(), incident["id"])
    return f"the traceback of #{first}" if trace and first != incident["id"] else trace


def clock(at: str | None) -> str:
    return datetime.fromisoformat(at).strftime("%m-%d %H:%M:%S") if at else "-"
