"""A run's forecast, as one JSON object and as text: the figures, what would change them, and the
assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jurymast.core.planning.failure_rate import DAY_S, LEVEL
from jurymast.core.planning.forecast import (
    COPY_BYTES_PER_S,
    REPLICATE_BYTES_PER_S,
    Forecast,
    Needed,
    Way,
    durable_per_day,
)
from jurymast.core.planning.optimum import RATE_FACTOR
from jurymast.report.text import Block, Line, Table, count, duration, minutes, percent, percent_fine, size
from jurymast.sim.durations import NODE_BYTES, TRAINING_START_S, Durations, Measured

GB = 1e9
DEFINITIONS = {
    "goodput": "share of the time spent on steps that count, while all nodes are present",
    "ettr": "the same, including waits for a node, but not the queue before the start",
    "allocation_goodput": "the same, with the spares' time in the denominator",
}


def plan_view(found: Forecast, restart: Sequence[str] = ()) -> dict[str, Any]:
    """The forecast. Times are in minutes or seconds as named, sizes in bytes, bandwidths in GB (1e9 bytes)
    per second, ratios 0..1. None means that the checkpoint's size or the storage's speed is needed.
    `restart`: how the restart time is made up if no option gave it."""
    question, way = found.question, found.way
    checkpoint_bytes = question.checkpoint_bytes
    bytes_per_day = None if checkpoint_bytes is None else checkpoint_bytes * durable_per_day(way)
    low_rate, high_rate = question.rate.interval()
    return {
        "nodes": question.nodes, "gpus_per_node": question.gpus_per_node,
        "gpus": question.nodes * question.gpus_per_node,
        "rate": {
            "per_1000_node_days": question.rate.rate, "low": low_rate, "high": high_rate, "level": LEVEL,
            "evidence": question.rate.evidence(),
        },
        "mttf_minutes": found.mtbf_s / 60.0,
        "way": way.name,
        "cadence_minutes": way.interval_s / 60.0,
        "checkpoints_per_day": DAY_S / way.interval_s,
        "durable_cadence_minutes": way.durable_interval_s / 60.0,
        "durable_checkpoints_per_day": durable_per_day(way),
        "checkpoint_bytes": checkpoint_bytes,
        "bytes_per_day": bytes_per_day,
        "average_write_gb_per_s": None if bytes_per_day is None else bytes_per_day / DAY_S / GB,
        "burst_write_gb_per_s": (
            None if checkpoint_bytes is None or not way.write_s else checkpoint_bytes / way.write_s / GB
        ),
        "stall_seconds": way.stall_s, "write_seconds": way.write_s, "restart_seconds": question.restart_s,
        "spares": found.spares.spares,
        "spares_by_risk": found.spare_rule,
        "goodput": way.goodput, "goodput_low": found.low, "goodput_high": found.high,
        "ettr": found.spares.ettr, "allocation_goodput": found.spares.allocation_goodput,
        "definitions": DEFINITIONS,
        "ways": [_way_json(each) for each in found.ways],
        "spare_choices": [asdict(each) for each in found.more_spares],
        "gain": {"storage_twice_as_fast": found.faster_storage, "one_more_spare": _one_more(found)},
        "sensitivity": {"rate_factor": RATE_FACTOR, "goodput_lost": found.sensitivity},
        "needed_for_target": (
            [_needed_json(each) for each in found.needed] if checkpoint_bytes is not None else []
        ),
        "assumed": _assumed(found, restart),
    }  # fmt: skip


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "way": way.name, "cadence_minutes": way.interval_s / 60.0,
        "durable_cadence_minutes": way.durable_interval_s / 60.0, "stall_seconds": way.stall_s,
        "write_seconds": way.write_s, "goodput": way.goodput,
    }  # fmt: skip


def _one_more(found: Forecast) -> float:
    """Allocation goodput gained by one more spare; negative if it costs more than it saves."""
    next_one = next(c for c in found.more_spares if c.spares == found.spares.spares + 1)
    return next_one.allocation_goodput - found.spares.allocation_goodput


def _needed_json(needed: Needed) -> dict[str, Any]:
    return {
        "goodput": needed.goodput, "restart_seconds": needed.restart_s,
        "blocking_gb_per_s": None if needed.blocking is None else needed.blocking / GB,
        "asynchronous_gb_per_s": None if needed.asynchronous is None else needed.asynchronous / GB,
    }  # fmt: skip


def _assumed(found: Forecast, restart: Sequence[str]) -> list[str]:
    """The assumptions that no option replaced, as lines for people."""
    question = found.question
    said = []
    if question.by_target:
        said.append(
            f"the storage is as fast as {100 * question.target:g} % goodput needs (--storage-gb-per-s)"
        )
    elif question.stall_s is None:
        source = "guessed" if question.checkpoint_bytes is None else "from the checkpoint's size"
        said.append(f"training waits {question.stall_used_s:.2g} s for each save, {source} (--stall-s)")
    if question.rate.incidents == 0.0:
        said.append(f"{question.rate.rate:.3g} failures per 1,000 node-days, not measured here (--rate)")
    said.append(f"{question.restart_s:.3g} s from a failure to new steps (--restart-s)")
    said += [f"  {line}" for line in restart]
    said.append("failures are detected and ranks restarted as fast on all these nodes as on four")
    if found.way.name == "memory":
        said.append(
            f"{100 * question.durable_share:g} % of failures destroy both copies in memory; a node "
            f"copies {COPY_BYTES_PER_S / GB:g} GB/s within its memory, "
            f"{REPLICATE_BYTES_PER_S / GB:g} GB/s to another"
        )
    said.append(f"a lost node is replaced in {question.replace_s / 3600.0:g} h (--replace-h)")
    return said


def restart_lines(
    measured: Measured, durations: Durations, nodes: int, checkpoint_bytes: float | None
) -> list[str]:
    """How the restart time is made up if no option gave it, as lines. The option is `--restart`, or
    `--restart-s` for `plan`."""
    own_s = durations.detection_s + durations.stop_s + durations.launch_s
    node_bytes = NODE_BYTES if checkpoint_bytes is None else checkpoint_bytes / nodes
    guess = "; the checkpoint's size is a guess (--checkpoint-bytes)" if checkpoint_bytes is None else ""
    rate = f"{size(round(measured.restore))}/s"
    return [
        f"{duration(own_s)} from a lost node to new ranks: {measured.source} (--durations)",
        f"{duration(durations.restore_s)} to restore {size(round(node_bytes))} on a new node at {rate}, "
        f"measured{guess}",
        f"{TRAINING_START_S:g} s from new ranks to their first step, for communicators, compiled code and "
        "data loaders: not measured",
    ]


WAYS = {
    "blocking": "training waits for each write to shared storage",
    "asynchronous": "training waits for a copy in memory, which is written in the background",
    "memory": "each save is kept in the memory of two nodes; some are also written to shared storage",
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
    """The main figures of a plan, each with its name."""
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
    """What would change the figures, one line each."""
    lines = [f"one more spare: {points(plan['gain']['one_more_spare'])} of allocation goodput"]
    faster = plan["gain"]["storage_twice_as_fast"]
    if faster is not None:
        lines.append(f"storage twice as fast: {points(faster)} of goodput")
    wrong = plan["sensitivity"]
    lines.append(
        f"a cadence chosen for a failure rate {wrong['rate_factor']:g} times off: "
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
        return f"{goal} another way to save; no storage is fast enough"
    if blocking is None:
        return f"{goal} storage of {speed(asynchronous)}, written in the background"
    if asynchronous is None:
        return f"{goal} storage of {speed(blocking)}"
    return f"{goal} storage of {speed(blocking)} if training waits for it, {speed(asynchronous)} if not"


def speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


def points(change: float) -> str:
    """A difference of two ratios, in percentage points."""
    return f"{100.0 * change:+.2f} points"
