"""A run's forecast, as one JSON object, as text and as a page: the figures, what would change them, the
assumptions, goodput over the cadence, and the gain of spares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jurymast.core.judges.forecast import (
    COPY_BYTES_PER_S,
    RATE_FACTOR,
    REPLICATE_BYTES_PER_S,
    UPDATE_SHARE,
    Forecast,
    Needed,
    Way,
    durable_per_day,
    goodput_at,
)
from jurymast.core.state.failure_rate import DAY_S, LEVEL
from jurymast.report.goodput import Card
from jurymast.report.pages import AxisTick, Plot, PlotArea, Shape, render
from jurymast.report.text import Block, Line, Table, count, duration, minutes, percent, percent_fine, size
from jurymast.sim.checkpoints import NODE_BYTES, TRAINING_START_S, Durations, Measured

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
        "ways": [
            _way_json(each, free.goodput)
            for each, free in zip(found.ways, found.unlimited, strict=True)
        ],
        "max_loss_minutes": question.max_loss_s / 60.0,
        "recovery": "in process" if question.in_process else "restart",
        "recoveries": [asdict(each) for each in found.recoveries],
        "spare_choices": [asdict(each) for each in found.more_spares],
        "gain": {"storage_twice_as_fast": found.faster_storage, "one_more_spare": _one_more(found)},
        "sensitivity": {"rate_factor": RATE_FACTOR, "goodput_lost": found.sensitivity},
        "needed_for_target": (
            [_needed_json(each) for each in found.needed] if checkpoint_bytes is not None else []
        ),
        "assumed": _assumed(found, restart),
    }  # fmt: skip


def _way_json(way: Way, unlimited: float) -> dict[str, Any]:
    """`unlimited`: its goodput without `max_loss`."""
    return {
        "way": way.name, "cadence_minutes": way.interval_s / 60.0,
        "durable_cadence_minutes": way.durable_interval_s / 60.0, "stall_seconds": way.stall_s,
        "write_seconds": way.write_s, "goodput": way.goodput, "goodput_without_max_loss": unlimited,
        "most_lost_minutes": None if way.loss_s is None else way.loss_s / 60.0,
        "most_lost_of_durable_minutes": None if way.durable_loss_s is None else way.durable_loss_s / 60.0,
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
    said.append(
        "in process: the group is of gloo, and every part of the model is on two nodes (not FSDP2 alone);"
    )
    said.append(
        "  steps are lost if no spare is there, if both copies go, or if a rank dies in its update, "
        f"{100 * UPDATE_SHARE:g} % of a step"
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


# A loss of goodput that two digits behind the point show.
LEAST_COST = 0.00005
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
        *_recoveries(plan),
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
    found += [("lost", lost)] if (lost := _lost(plan)) else []
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


def _lost(plan: Mapping[str, Any]) -> str:
    """The most training that a failure costs, by the copies that survive it; "" if it is not known."""
    way = plan["ways"][0]
    most, durable = way["most_lost_minutes"], way["most_lost_of_durable_minutes"]
    if most is None:
        return ""
    text, limit = (
        f"at most {minutes(most)} of training by a failure",
        f"max_loss ({minutes(plan['max_loss_minutes'])})",
    )
    within = most <= plan["max_loss_minutes"] * (1.0 + 1e-9)
    if way["way"] == "memory":
        worst = "more" if durable is None else minutes(durable)
        text += f", {worst} by one that destroys both copies in memory"
        if within and (durable is None or durable > plan["max_loss_minutes"]):
            text += f"; {limit} holds while one copy survives"
    return text if within else f"{text}; more than {limit}"


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
    notes = [Line(text)] if (text := _limited(plan)) else []
    return [Table(headers, rows, right=frozenset({1, 2, 3, 4})), *notes, Line("")]


# What recovers from a failure, and what that spares.
RECOVERIES = {
    "restart": "all ranks start anew, from the last save",
    "in process": "by Checkpointer.run on gloo, not NCCL yet: only new ranks start",
}


def _recoveries(plan: Mapping[str, Any]) -> list[Block]:
    rows = [
        [
            f"{each['name']}{' <' if each['name'] == plan['recovery'] else ''}", percent(each["kept"]),
            *(percent(each[ratio]) for ratio in ("goodput", "ettr", "allocation_goodput")),
            RECOVERIES[each["name"]],
        ]
        for each in plan["recoveries"]
    ]  # fmt: skip
    headers = ("RECOVERY", "NO STEP LOST", "GOODPUT", "ETTR", "ALLOCATION", "")
    return [Table(headers, rows, right=frozenset({1, 2, 3, 4})), Line("")]


def _limited(plan: Mapping[str, Any]) -> str:
    """What the limit of all intervals costs; "" if it costs nothing."""
    costs = {each["way"]: each["goodput"] - each["goodput_without_max_loss"] for each in plan["ways"]}
    told = [f"{name} {points(cost)}" for name, cost in costs.items() if cost <= -LEAST_COST]
    limit = minutes(plan["max_loss_minutes"])
    return (
        f"max_loss limits each of these intervals to {limit} of training: {', '.join(told)}" if told else ""
    )


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


FRAME = PlotArea(height=300, bottom=50)
POINTS = 120
# The curve goes from the chosen cadence divided by this to the chosen cadence times this.
REACH = 30.0
ROUND_S = (
    0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000, 86_400, 259_200, 864_000,
)  # fmt: skip


def page(plan: Mapping[str, Any], found: Forecast) -> str:
    """Render the whole page; `plan` is `plan_view(found)`."""
    nodes = count(plan["nodes"], "node")
    return render(
        "plan.html.j2",
        plan,
        {
            "title": f"plan for {nodes}",
            "heading": f"A run on {nodes}, {count(plan['gpus'], 'GPU')}",
            "cards": _cards(plan),
            "facts": facts(plan),
            "curve": _curve(found),
            "meanings": WAYS,
            "recoveries": RECOVERIES,
            "bars": _bars(plan),
            "gains": gains(plan),
        },
    )


def _cards(plan: Mapping[str, Any]) -> list[Card]:
    return [
        Card("Goodput", percent(plan["goodput"]), plan["definitions"]["goodput"]),
        Card("ETTR", percent(plan["ettr"]), plan["definitions"]["ettr"]),
        Card("A failure every", minutes(plan["mttf_minutes"]), "mean time between failures of the run"),
        Card("A save every", minutes(plan["cadence_minutes"]), f"{plan['checkpoints_per_day']:.0f} a day"),
        Card("Spares", str(plan["spares"]), "nodes kept warm beside the active ones"),
    ]


def _bars(plan: Mapping[str, Any]) -> dict[int, float]:
    """The length of a bar, 0..1, for each number of spares. It compares the allocation goodput, from a little
    above 0 for the least to 1 for the most: otherwise no difference could be seen."""
    values = {each["spares"]: each["allocation_goodput"] for each in plan["spare_choices"]}
    least, most = min(values.values()), max(values.values())
    return {
        spares: 0.1 + 0.9 * ((value - least) / (most - least) if most > least else 1.0)
        for spares, value in values.items()
    }


def _curve(found: Forecast) -> Plot:
    """Goodput over the interval on a logarithmic axis, at the expected rate and at both ends of its
    interval."""
    question, chosen_s = found.question, found.way.interval_s
    low, high = question.rate.interval()
    first, last = math.log(chosen_s / REACH), math.log(chosen_s * REACH)
    times_s = [math.exp(first + (last - first) * i / (POINTS - 1)) for i in range(POINTS)]
    goodput = {
        rate: [goodput_at(question, at_s, rate) for at_s in times_s]
        for rate in (low, high, question.rate.rate)
    }
    floor = max(0.0, math.floor(10.0 * min(min(values) for values in goodput.values())) / 10.0)

    def x(at_s: float) -> float:
        return (math.log(at_s) - first) / (last - first)

    def shares(rate: float) -> list[tuple[float, float]]:
        return [(x(t), (v - floor) / (1.0 - floor)) for t, v in zip(times_s, goodput[rate], strict=True)]

    def line(kind: str, rate: float) -> Shape:
        return Shape(kind, FRAME.points(shares(rate)), f"{rate:.3g} failures per 1,000 node-days")

    between = FRAME.points([*shares(low), *reversed(shares(high))])
    return Plot(
        label="goodput over the time between saves",
        frame=FRAME,
        x_ticks=tuple(
            AxisTick(FRAME.x(x(at_s)), minutes(at_s / 60.0))
            for at_s in ROUND_S
            if times_s[0] <= at_s <= times_s[-1]
        ),
        y_ticks=tuple(
            AxisTick(FRAME.y((tenth / 10 - floor) / (1.0 - floor)), f"{10 * tenth} %")
            for tenth in range(round(10 * floor), 11)
        ),
        areas=(Shape("band", between, f"{low:.3g} to {high:.3g} failures per 1,000 node-days"),),
        lines=(line("edge", low), line("edge", high), line("main", question.rate.rate)),
        x_title="time between saves",
        chosen=AxisTick(FRAME.x(x(chosen_s)), f"planned: {minutes(chosen_s / 60.0)}"),
    )
