"""The goodput report as text that is read at 3 a.m.: the ratios first, then where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jurymast.core.goodput.accounting import CATEGORIES
from jurymast.report.layout import Block, Line, Table, one_line
from jurymast.report.report import share
from jurymast.report.sentences import own_words
from jurymast.report.words import amounts, count, duration, node_time, percent, size

BAR_COLUMNS = 24
COMMAND_CHARACTERS = 400
MEANINGS = {category.name: category.meaning for category in CATEGORIES}
PARTS = ("detect", "diagnose", "decide", "replace", "launch", "restore", "rework")


def report_blocks(report: Mapping[str, Any], *, bar: str = "#") -> list[Block]:
    """`bar` is the character that bars are drawn with."""
    blocks: list[Block] = [
        Line(f"run {report['run']}: {report['state']} ({reach(report)})", "bold"),
        *(Line(f"warning    {text}", "bold yellow") for text in report["warnings"]),
        Line(""),
    ]
    for name, value in report["ratios"].items():
        label = {"ettr": "ETTR"}.get(name, name.replace("_", " "))
        blocks.append(Line(f"{label:<19}{percent(value):>8}   {report['definitions'][name]}", "bold"))
    blocks += [Line(""), _category_table(report, bar)]
    blocks += [Line(""), *_incident_blocks(report["incidents"]), Line("")]
    blocks += [Line(text) for text in (mtbf_line(report), cadence_line(report), provenance_line(report))]
    return blocks


def reach(report: Mapping[str, Any], form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Up to when the report goes, and whether that is the end."""
    kind = "provisional" if report["provisional"] else "final"
    if report["until"] is None:
        return f"{kind}, nothing is known of its time"
    until = datetime.fromisoformat(report["until"]).strftime(form)
    return f"{kind}, up to {until}"


def _category_table(report: Mapping[str, Any], bar: str) -> Table:
    rows = []
    for name, seconds in report["categories"].items():
        part = share(report, name)
        drawn = bar * max(1 if seconds else 0, round(BAR_COLUMNS * part))
        rows.append(
            [name, node_time(seconds), percent(part), drawn.ljust(BAR_COLUMNS), MEANINGS.get(name, "")]
        )
    rows.append(["total", node_time(report["total_node_seconds"]), percent(1.0), " " * BAR_COLUMNS, ""])
    return Table(("CATEGORY", "NODE-TIME", "SHARE", "", "MEANING"), rows, right=frozenset({1, 2}))


def _incident_blocks(incidents: list[dict[str, Any]]) -> list[Block]:
    if not incidents:
        return [Line("no incidents")]
    rows = []
    for i in incidents:
        at = datetime.fromisoformat(i["at"]).strftime("%m-%d %H:%M:%S")
        parts = [_short(i["seconds"][part]) for part in PARTS]
        total = _short(sum(i["seconds"].values()))
        rows.append(
            [str(i["id"]), at, i["cause"] or "-", i["node"] or "-", i["action"] or "-", *parts, total]
        )
    headers = ("#", "AT", "CAUSE", "NODE", "ACTION", *(part.upper() for part in PARTS), "TOTAL")
    blocks: list[Block] = [Table(headers, rows, right=frozenset({0, *range(5, 13)}), wrap=False)]
    for i in incidents:
        steps = f"step {i['step_lost_from']}"
        if i["step_restored"] is not None:
            steps += f", restored {i['step_restored']}"
            steps += f": {amounts(i['tiers'])}" if i["tiers"] else ""
        blocks.append(Line(f"  #{i['id']} {i['evidence']} ({steps})"))
        if i["action"]:
            blocks.append(Line(f"     {i['action']}: {own_words(i)}"))
        blocks += [Line(f"       {line}") for line in (i["traceback"] or "").rstrip().splitlines()[-3:]]
    return blocks


def _short(seconds: float) -> str:
    return "-" if seconds == 0 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def mtbf_line(report: Mapping[str, Any]) -> str:
    found = report["mtbf"]
    seen = f"{count(found['failures'], 'failure')} in {duration(found['observed_seconds'])} with nodes"
    predicted = (
        f"usual for {count(report['nodes']['active'], 'node')}: {duration(found['predicted_seconds'])}"
    )
    if found["seconds"] is None:
        low = f", so at least {duration(found['low_seconds'])} (95 %)" if found["low_seconds"] else ""
        return f"MTBF       {seen}{low}; {predicted}"
    interval = f"{duration(found['low_seconds'])} to {duration(found['high_seconds'])}"
    return f"MTBF       {duration(found['seconds'])} (90 %: {interval}), {seen}; {predicted}"


def cadence_line(report: Mapping[str, Any]) -> str:
    found = report["cadence"]
    if not found["saves"]:
        failed = f", {found['failed']} failed" if found["failed"] else ""
        return f"cadence    policy: {found['setting']}; no checkpoint was saved{failed}"
    text = f"cadence    policy: {found['setting']}; {count(found['saves'], 'save')}"
    if found["failed"]:
        text += f" and {found['failed']} failed"
    if found["interval_seconds"] is not None:
        text += f", one every {duration(found['interval_seconds'])}"
    text += f", stall {duration(found['stall_seconds'])}"
    text += f", {size(found['size_bytes'])} each" if found["size_bytes"] else ""
    return f"{text}; at this MTBF best: every {duration(found['optimal_seconds'])}"


def provenance_line(report: Mapping[str, Any]) -> str:
    found = report["provenance"]
    script = one_line(" ".join([found["script"], *found["arguments"]]), COMMAND_CHARACTERS)
    policy = f", policy {found['policy_hash'][:12]}" if found["policy_hash"] else ""
    return f"made from  {found['directory']}: {script}{policy}, jurymast {found['run_version'] or '?'}"


def compare_blocks(both: Mapping[str, Any]) -> list[Block]:
    """Two runs side by side."""
    first, second, difference = both["first"], both["second"], both["difference"]
    ratios = [
        [name, percent(first["ratios"][name]), percent(second["ratios"][name]), points(change)]
        for name, change in difference["ratios"].items()
    ]
    shares = [
        [name, percent(share(first, name)), percent(share(second, name)), points(change)]
        for name, change in difference["shares"].items()
    ]
    facts = [
        ["node-time", node_time(first["total_node_seconds"]), node_time(second["total_node_seconds"]), ""],
        ["incidents", str(len(first["incidents"])), str(len(second["incidents"])), ""],
        ["MTBF", duration(first["mtbf"]["seconds"]), duration(second["mtbf"]["seconds"]), ""],
    ]
    headers = ("", first["run"], second["run"], "CHANGE")
    right = frozenset({1, 2, 3})
    return [Table(headers, [*ratios, *facts, *shares], right=right, wrap=False)]


def points(change: float | None) -> str:
    """A difference of two ratios, in percentage points."""
    return "-" if change is None else f"{100 * change:+.1f}"
