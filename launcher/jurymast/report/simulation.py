"""The results of `jurymast simulate` as text, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.goodput.accounting import MEANINGS, RATIOS
from jurymast.report.layout import Block, Line, Table
from jurymast.report.plan import restart_lines
from jurymast.report.words import count, duration, node_time, percent, size
from jurymast.sim.durations import Durations, Measured


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


def simulated_lines(
    measured: Measured, durations: Durations, setup: Mapping[str, Any], said: Mapping[str, Any]
) -> list[str]:
    """The assumptions of `simulate`. `setup` has nodes, rate and replicas; `said` has the options, with None
    for those that were not given."""
    lines = ["failures are detected and ranks restarted as fast on all these nodes as on four"]
    if said["restart"] is None:
        lines += restart_lines(measured, durations, setup["nodes"], said["checkpoint_bytes"])
    if said["stall"] is None:
        rate = f"{size(round(measured.copy))}/s"
        lines.append(
            f"training waits {duration(durations.stall_s)} for a save: {rate} a node, measured (--stall)"
        )
    if durations.write_s is not None:
        if said["storage_gb_per_s"] is None:
            written = duration(durations.write_s)
            lines.append(f"storage takes a whole checkpoint in {written} (--storage-gb-per-s)")
        held = f"replicas on {count(setup['replicas'], 'other node')}, a spare or half the run away"
        lines.append(
            f"{held if setup['replicas'] else 'no replicas'}: if all that hold a copy are lost at once, "
            "the run goes back to the newest save in storage"
        )
    for name, text in (
        ("step", f"a step takes {duration(durations.step_s)}"),
        ("repair", f"a lost node is replaced after {duration(durations.repair_s)}"),
        ("requeue", f"a requeue takes {duration(durations.requeue_s)}"),
    ):
        if said[name] is None:
            lines.append(f"{text} (--{name})")
    if said["rate"] is None and said["trace"] is None:
        lines.append(f"{setup['rate']:.3g} failures per 1,000 node-days, not measured here (--rate)")
    if not said["hang_rate"]:
        lines.append("nothing hangs (--hang-rate)")
    if not said["script_rate"]:
        lines.append("the script never fails (--script-rate)")
    return lines
