"""What `jurymast simulate` found, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.goodput.accounting import RATIOS
from jurymast.report.layout import Block, Line, Table
from jurymast.report.report_text import MEANINGS
from jurymast.report.words import count, duration, node_time, percent


def simulate_blocks(found: Mapping[str, Any]) -> list[Block]:
    runs = count(found["seeds"], "run")
    rate = "no failures" if not found["rate"] else f"{found['rate']:.2f} failures per 1,000 node-days"
    blocks: list[Block] = [
        Line(
            f"{count(found['nodes'], 'node')} and {count(found['spares'], 'spare')} for {found['days']:g} "
            f"days, {runs}; {rate}, {found['faults']}",
            "bold",
        ),
        Line(
            f"cadence {found['cadence']}; a failure costs {duration(found['restart_seconds'])} and the steps "
            f"since the last save, a save {duration(found['stall_seconds'])}"
        ),
        Line(""),
    ]
    rows = []
    for name, value in found["ratios"].items():
        spread = [percent(value[key]) for key in ("mean", "p5", "p95")]
        rows.append([name.replace("_", " ").replace("ettr", "ETTR"), *spread, RATIOS[name]])
    blocks += [Table(("RATIO", "MEAN", "5 %", "95 %", "MEANING"), rows, right=frozenset({1, 2, 3})), Line("")]
    total = found["total_node_seconds"]
    shares = [
        [name, node_time(seconds), f"{100 * seconds / total:.2f} %", MEANINGS.get(name, "")]
        for name, seconds in found["categories"].items()
    ]
    shares.append(["total", node_time(total), "100.00 %", ""])
    blocks += [
        Table(("CATEGORY", "NODE-TIME", "SHARE", "MEANING"), shares, right=frozenset({1, 2})),
        Line(""),
    ]
    mean = "none" if found["mtbf_hours"] is None else f"one in {duration(3600 * found['mtbf_hours'])}"
    actions = ", ".join(f"{name} {number:.1f}" for name, number in found["actions"].items())
    blocks.append(
        Line(f"incidents  {found['incidents']:.1f} a run ({mean})" + (f": {actions}" if actions else ""))
    )
    blocks.append(Line(f"saves      {found['saves']:.1f} a run; requeues {found['requeues']:.1f} a run"))
    if found["restores"]:
        restores = ", ".join(f"{name} {number:.1f}" for name, number in found["restores"].items())
        blocks.append(Line(f"restores   from {restores} a run"))
    for cause, cost in found["by_cause"].items():
        blocks.append(
            Line(f"{cause:<17} {cost['incidents']} in all runs, each {duration(cost['seconds'])} (median)")
        )
    for reason, number in found["gave_up"].items():
        blocks.append(Line(f"gave up    {count(number, 'run')} of {found['seeds']}: {reason}", "bold red"))
    blocks += [Line(""), Line("assumed:"), *(Line(f"  {line}") for line in found["assumed"])]
    blocks.append(Line(f"computed in {duration(found['wall_seconds'])}"))
    return blocks
