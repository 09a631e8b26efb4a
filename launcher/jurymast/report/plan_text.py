"""The forecast as text: the figures first, then what would change them, then what they rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.report.layout import Block, Line, Table
from jurymast.report.words import count, duration, percent, size

WAYS = {
    "blocking": "training waits for each write to shared storage",
    "asynchronous": "training waits for a copy in memory, which is written behind its back",
    "memory": "saves stay in the memory of two nodes each; some of them are written",
}


def plan_blocks(plan: Mapping[str, Any]) -> list[Block]:
    rate = plan["rate"]
    head = f"{count(plan['nodes'], 'node')}, {count(plan['gpus'], 'GPU')}, {rate['per_1000_node_days']:.3g}"
    blocks: list[Block] = [
        Line(
            f"{head} failures per 1,000 node-days "
            f"(90 %: {rate['low']:.3g} to {rate['high']:.3g}; {rate['evidence']})",
            "bold",
        ),
        Line(""),
        *(Line(f"{name:<11}{value}") for name, value in facts(plan)),
        Line(""),
        *_ways(plan),
        *_spares(plan),
        *(Line(line) for line in gains(plan)),
        Line(""),
        Line("assumed:"),
        *(Line(f"  {line}") for line in plan["assumed"]),
    ]
    return blocks


def facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures that a plan is asked for, each with its name."""
    found = [("a failure", f"every {minutes(plan['mttf_minutes'])}"), ("a save", _save(plan))]
    if plan["bytes_per_day"] is not None:
        written = f"{size(round(plan['bytes_per_day']))} a day, {speed(plan['average_write_gb_per_s'])}"
        burst = plan["burst_write_gb_per_s"]
        found.append(("written", f"{written} on average" + (f", {speed(burst)} in bursts" if burst else "")))
    choice = next(each for each in plan["spare_choices"] if each["spares"] == plan["spares"])
    found.append(
        ("spares", f"{plan['spares']}; a node is missing {percent_fine(choice['waiting'])} of the time")
    )
    low, high = percent(plan["goodput_low"]), percent(plan["goodput_high"])
    found.append(("goodput", f"{percent(plan['goodput'])} (90 %: {low} to {high}), all nodes there"))
    found.append(("ETTR", f"{percent(plan['ettr'])}, waiting for nodes included"))
    found.append(("allocation", f"{percent(plan['allocation_goodput'])}, spares' time in the denominator"))
    return found


def _save(plan: Mapping[str, Any]) -> str:
    text = f"every {minutes(plan['cadence_minutes'])}, {plan['checkpoints_per_day']:.0f} a day"
    if plan["durable_checkpoints_per_day"] < plan["checkpoints_per_day"]:
        durable = minutes(plan["durable_cadence_minutes"])
        text += f"; to shared storage every {durable}, {plan['durable_checkpoints_per_day']:.0f} a day"
    return f"{text}; stall {duration(plan['stall_seconds'])} each"


def _ways(plan: Mapping[str, Any]) -> list[Block]:
    if len(plan["ways"]) < 2:
        return []
    rows = [
        [
            each["way"], minutes(each["cadence_minutes"]), minutes(each["durable_cadence_minutes"]),
            duration(each["stall_seconds"]), percent(each["goodput"]), WAYS[each["way"]],
        ]
        for each in plan["ways"]
    ]  # fmt: skip
    headers = ("WAY TO SAVE", "EVERY", "TO STORAGE", "STALL", "GOODPUT", "")
    return [Table(headers, rows, right=frozenset({1, 2, 3, 4})), Line("")]


def _spares(plan: Mapping[str, Any]) -> list[Block]:
    rows = [
        [
            f"{each['spares']}{' <' if each['spares'] == plan['spares'] else ''}",
            percent_fine(each["waiting"]), percent_fine(each["ettr"]),
            percent_fine(each["allocation_goodput"]),
        ]
        for each in plan["spare_choices"]
    ]  # fmt: skip
    headers = ("SPARES", "A NODE MISSING", "ETTR", "ALLOCATION GOODPUT")
    return [Table(headers, rows, right=frozenset({1, 2, 3}), wrap=False), Line("")]


def gains(plan: Mapping[str, Any]) -> list[str]:
    """What would change the figures, a line each."""
    lines = [f"one more spare: {points(plan['gain']['one_more_spare'])} of allocation goodput"]
    faster = plan["gain"]["storage_twice_as_fast"]
    if faster is not None:
        lines.append(f"storage twice as fast: {points(faster)} of goodput")
    wrong = plan["sensitivity"]
    lines.append(
        f"a cadence for a failure rate {wrong['rate_factor']:g} times off: "
        f"{points(-wrong['goodput_lost'])} of goodput"
    )
    return lines + [_needed(each) for each in plan["needed_for_target"]]


def _needed(each: Mapping[str, Any]) -> str:
    restart = (
        f"restarts of {duration(each['restart_seconds'])}" if each["restart_seconds"] else "no restart time"
    )
    goal = f"{100 * each['goodput']:g} % with {restart} needs"
    blocking, asynchronous = each["blocking_gb_per_s"], each["asynchronous_gb_per_s"]
    if blocking is None and asynchronous is None:
        return f"{goal} another way to save: no storage is fast enough"
    if blocking is None:
        return f"{goal} storage of {speed(asynchronous)}, written behind training's back"
    if asynchronous is None:
        return f"{goal} storage of {speed(blocking)}"
    return f"{goal} storage of {speed(blocking)} when training waits for it, {speed(asynchronous)} when not"


def minutes(value: float) -> str:
    """Minutes as people read them: 6.2 min below two hours, else hours or days."""
    if value < 1.0:
        return f"{60.0 * value:.3g} s"
    return (
        f"{value:.3g} min" if value < 99.95 else f"{value:.0f} min" if value < 180.0 else duration(60 * value)
    )


def speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


def percent_fine(ratio: float) -> str:
    return f"{100.0 * ratio:.2f} %"


def points(change: float) -> str:
    """A difference of two ratios in percentage points."""
    return f"{100.0 * change:+.2f} points"
