"""The results of `jurymast simulate`, of one run or several, as text and as a page: goodput over seeds and
over time, losses, incidents, and the assumptions behind them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jurymast.core.goodput import MEANINGS, RATIOS, ordered
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import UPDATE_SHARE
from jurymast.core.run.sparing import IN_PROCESS
from jurymast.core.state.images import LIVE
from jurymast.core.state.incident import Incident
from jurymast.report.goodput import Card, ratio_cards
from jurymast.report.pages import (
    DAY_S,
    AxisTick,
    Bar,
    Plot,
    PlotArea,
    Shape,
    day_ticks,
    kind,
    render,
    share_ticks,
    slices,
)
from jurymast.report.plan import restart_lines
from jurymast.report.text import Block, Line, Table, count, duration, node_time, percent, size
from jurymast.sim.checkpoints import START, Durations, Measured
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation

GOODPUT = "runtime_goodput"
Draw = Callable[[random.Random], list[TraceFault]]


def simulate(
    setup: Setup,
    draw: Draw,
    cadence: Cadence,
    seeds: int,
    told: Callable[[float], object] = lambda share: None,
) -> list[SimOutcome]:
    """Run the seeds 0 .. `seeds` - 1. Equal calls give equal results. `told` is called with the share done,
    0..1."""
    outcomes = []
    for seed in range(seeds):

        def tell(t: float, seed: int = seed) -> None:
            told((seed + t / setup.seconds) / seeds)

        outcomes.append(Simulation(setup, draw(random.Random(seed)), cadence, tell, seed).run())
        told((seed + 1) / seeds)
    return outcomes


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between the two nearest values."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": sum(values) / len(values), "p5": quantile(values, 0.05), "p95": quantile(values, 0.95),
    }  # fmt: skip


def _cost(incidents: Sequence[Incident]) -> dict[str, float]:
    """Return the number of incidents of a cause, and the median seconds from the failure until training is
    back where it was."""
    times = [sum(incident.seconds().values()) for incident in incidents]
    return {"incidents": len(incidents), "seconds": quantile(times, 0.5)}


def summary(outcomes: Sequence[SimOutcome]) -> dict[str, Any]:
    """Summarize the runs by means. `categories` and `total_node_seconds` are those of a mean run; `by_cause`
    counts the incidents of all runs."""
    runs = len(outcomes)
    totals: Counter[str] = Counter()
    restores: Counter[str] = Counter()
    causes: dict[str, list[Incident]] = {}
    for outcome in outcomes:
        totals.update(outcome.categories)
        restores.update(outcome.restores)
        for incident in outcome.incidents:
            causes.setdefault(incident.cause or "open", []).append(incident)
    incidents = sum(len(outcome.incidents) for outcome in outcomes)
    actions = Counter(i.action or "open" for outcome in outcomes for i in outcome.incidents)
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    ends = Counter(outcome.reason for outcome in outcomes if outcome.state == "failed")
    return {
        "goodput": spread([outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes]),
        "ratios": {
            name: spread([outcome.ratios[name] or 0.0 for outcome in outcomes]) for name in outcomes[0].ratios
        },
        "mtbf_hours": wall_s / incidents / 3600.0 if incidents else None,
        "categories": {name: totals[name] / runs / 1e6 for name in ordered(list(totals))},
        "total_node_seconds": sum(outcome.total_us for outcome in outcomes) / runs / 1e6,
        "incidents": incidents / runs,
        "actions": {name: number / runs for name, number in sorted(actions.items())},
        "requeues": sum(outcome.requeues for outcome in outcomes) / runs,
        "saves": sum(outcome.saves for outcome in outcomes) / runs,
        "restores": {name: number / runs for name, number in sorted(restores.items())},
        "by_cause": {name: _cost(found) for name, found in sorted(causes.items())},
        "gave_up": dict(ends),
        "seeds": runs,
    }


def recovery_view(
    outcomes: Sequence[SimOutcome], restarts: Sequence[SimOutcome] | None = None
) -> dict[str, Any]:
    """How ranks recovered; beside it, if that is in process, the same failures with `restarts`."""
    if restarts is None:
        return {"recovery": "restart", "kept": 0.0, "goodput_by_restart": None}
    incidents = sum(len(outcome.incidents) for outcome in outcomes)
    kept = sum(outcome.restores.get(LIVE, 0) for outcome in outcomes)
    by_restart = spread([outcome.ratios[GOODPUT] or 0.0 for outcome in restarts])
    return {
        "recovery": IN_PROCESS, "kept": kept / incidents if incidents else 0.0,
        "goodput_by_restart": by_restart,
    }  # fmt: skip


def recovery_text(found: Mapping[str, Any]) -> str:
    """What recovery in process changes; "" if ranks restart."""
    before = found["goodput_by_restart"]
    if before is None:
        return ""
    return (
        f"in process: after {percent(found['kept'])} of the incidents no step was lost; runtime goodput "
        f"{percent(found['goodput']['mean'])}, and {percent(before['mean'])} if all ranks restart"
    )


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
    if text := recovery_text(found):
        blocks.append(Line(text))
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
    if said["in_process"]:
        lines.append(
            "every part of the model is on two nodes; each failure ends a rank, whose start the others wait "
            f"for; steps are lost if that is in its update, {100 * UPDATE_SHARE:g} % of a step, or if "
            "several nodes are lost at once"
        )
    if said["rate"] is None and said["trace"] is None:
        lines.append(f"{setup['rate']:.3g} failures per 1,000 node-days, not measured here (--rate)")
    if not said["hang_rate"]:
        lines.append("nothing hangs (--hang-rate)")
    if not said["script_rate"]:
        lines.append("the script never fails (--script-rate)")
    return lines


FRAME = PlotArea()
SPREAD = PlotArea(height=76, left=40, right=40, bottom=26)
LANE_PX, MARK_PX = 32, 3
# Number of incidents of one run that are shown in full.
TOLD_MAX = 20
PRODUCTIVE = "step"
# The looks of marks, by decision; the last one is for several at the same place.
MARKS = {"restart": "restart", IN_PROCESS: "restart", "swap": "swap"}
ENDED = "ended"


def page(found: Mapping[str, Any], outcomes: Sequence[SimOutcome]) -> str:
    """Render the whole page; `found` is what `simulate --json` prints, `outcomes` have a history."""
    runs = f"{count(found['seeds'], 'run')} of {count(found['nodes'], 'node')}"
    goodput = found["goodput"]
    first = outcomes[0]
    return render(
        "simulation.html.j2",
        found,
        {
            "title": f"simulation of {runs}",
            "heading": f"{runs} for {found['days']:g} days, simulated",
            "about": f"{found['rate']:.3g} failures per 1,000 node-days, {found['faults']}; "
            f"{count(found['spares'], 'spare')}; cadence {found['cadence']}",
            "summary": f"Runtime goodput {percent(goodput['mean'])} (90 % of the runs between "
            f"{percent(goodput['p5'])} and {percent(goodput['p95'])}). {_lost(found)}",
            "cards": _cards(found),
            "recovery": recovery_text(found),
            "spread": _spread(outcomes),
            "over_time": _over_time(found, outcomes),
            "losses": _losses(found, outcomes),
            "slices": slices(found["categories"], found["total_node_seconds"]),
            "lanes": _lanes(first, found["days"]),
            "costliest": [
                {"at": f"day {_day(i):.2f}", "seconds": _cost_s(i), "incident": i}
                for i in sorted(first.incidents, key=_cost_s, reverse=True)[:TOLD_MAX]
            ],
        },
    )


def _lost(found: Mapping[str, Any]) -> str:
    gave_up = sum(found["gave_up"].values())
    ends = f" {count(gave_up, 'run')} of {found['seeds']} gave up." if gave_up else ""
    if not found["incidents"]:
        return f"Nothing failed.{ends}"
    return f"{found['incidents']:.0f} incidents and {found['requeues']:.1f} requeues a run.{ends}"


def _cards(found: Mapping[str, Any]) -> list[Card]:
    mean = found["mtbf_hours"]
    every = "no failure" if mean is None else f"one in {duration(3600.0 * mean)}"
    means = {name: value["mean"] for name, value in found["ratios"].items()}
    return [*ratio_cards(means, RATIOS), Card("Incidents a run", f"{found['incidents']:.0f}", every)]


def _scale(least: float, most: float) -> tuple[float, float]:
    """A range a little larger than this one, within 0..1."""
    room = max(0.1 * (most - least), 0.0005)
    return max(0.0, least - room), min(1.0, most + room)


def _spread(outcomes: Sequence[SimOutcome]) -> dict[str, Any]:
    """A dot for each run, a bar from the 5th to the 95th percentile, and a line at the mean."""
    values = [outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes]
    low, high = _scale(min(values), max(values))

    def x(value: float) -> float:
        return SPREAD.x((value - low) / (high - low))

    p5, p95 = x(quantile(values, 0.05)), x(quantile(values, 0.95))
    return {
        "frame": SPREAD,
        "box": Bar("box", p5, max(1.0, round(p95 - p5, 1)), "5 % to 95 % of the runs"),
        "mean": x(sum(values) / len(values)),
        "dots": [(x(value), f"seed {seed}: {100 * value:.3f} %") for seed, value in enumerate(values)],
        "ticks": [AxisTick(x(value), f"{100 * value:.2f} %") for value in (low, (low + high) / 2.0, high)],
    }


def _over_time(found: Mapping[str, Any], outcomes: Sequence[SimOutcome]) -> Plot:
    curves = [[_share(part, PRODUCTIVE) for part in outcome.history] for outcome in outcomes]
    mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
    low, high = _scale(min(map(min, curves)), max(map(max, curves)))

    def line(kind: str, curve: Sequence[float], tip: str) -> Shape:
        shares = (((i + 0.5) / len(curve), (v - low) / (high - low)) for i, v in enumerate(curve))
        return Shape(kind, FRAME.points(shares), tip)

    lines = [line("edge", curve, f"seed {seed}") for seed, curve in enumerate(curves)]
    return Plot(
        "goodput over time", FRAME, day_ticks(FRAME, found["days"]), share_ticks(FRAME, low, high),
        lines=(*lines, line("main", mean, "mean of all runs")),
    )  # fmt: skip


def _share(part: Mapping[str, int], category: str) -> float:
    total = sum(part.values())
    return part.get(category, 0) / total if total else 0.0


def _losses(found: Mapping[str, Any], outcomes: Sequence[SimOutcome]) -> Plot:
    """All categories except the productive one, stacked, as shares of all runs' time."""
    sums = [sum((Counter(part) for part in parts), Counter[str]())
            for parts in zip(*(outcome.history for outcome in outcomes), strict=True)]  # fmt: skip
    names = ordered([name for name in {name for part in sums for name in part} if name != PRODUCTIVE])
    top = max((1.0 - _share(part, PRODUCTIVE) for part in sums if part), default=0.0) or 0.001
    areas = []
    base = [0.0] * len(sums)
    for name in names:
        above = [low + _share(part, name) for low, part in zip(base, sums, strict=True)]
        outline = [*enumerate(above), *reversed(list(enumerate(base)))]
        shares = (((i + 0.5) / len(sums), value / top) for i, value in outline)
        areas.append(Shape(kind(name), FRAME.points(shares), name.replace("_", " ")))
        base = above
    return Plot(
        "lost time by category", FRAME, day_ticks(FRAME, found["days"]), share_ticks(FRAME, 0.0, top),
        areas=tuple(areas),
    )  # fmt: skip


def _lanes(outcome: SimOutcome, days: float) -> dict[str, Any] | None:
    """A lane for each cause, which begins at `y`, and a mark for each incident; marks that would overlap
    share one."""
    if not outcome.incidents:
        return None
    causes = Counter(each.cause for each in outcome.incidents).most_common()
    frame = PlotArea(height=14 + LANE_PX * len(causes) + 34, top=18)
    lanes = []
    for place, (cause, number) in enumerate(causes):
        together: dict[int, list[Incident]] = {}
        for each in outcome.incidents:
            if each.cause == cause:
                x = frame.x(min(1.0, max(0.0, _day(each) / days)))
                together.setdefault(int(x / MARK_PX), []).append(each)
        marks = [_mark(x * MARK_PX, incidents) for x, incidents in sorted(together.items())]
        y = frame.top + LANE_PX * place
        lanes.append({"cause": cause or "open", "number": number, "y": y, "marks": marks})
    return {"frame": frame, "ticks": day_ticks(frame, days), "lanes": lanes}


def _mark(x: float, incidents: Sequence[Incident]) -> Bar:
    worst = max(incidents, key=_cost_s)
    kinds = {MARKS.get(each.action, ENDED) for each in incidents}
    of = next(each for each in (ENDED, "swap", "restart") if each in kinds)
    told = f"day {_day(worst):.2f}: {worst.action or 'open'}, {duration(_cost_s(worst))}"
    return Bar(of, x, MARK_PX - 1.0, told if len(incidents) == 1 else f"{len(incidents)} incidents; {told}")


def _day(incident: Incident) -> float:
    return (incident.fault_at - START) / DAY_S


def _cost_s(incident: Incident) -> float:
    return sum(incident.seconds().values())
