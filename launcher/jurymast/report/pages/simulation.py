"""Simulated runs as a page: goodput over seeds and over time, losses, incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jurymast.core.goodput import RATIOS, ordered
from jurymast.core.run.incident import Incident
from jurymast.report.pages import render
from jurymast.report.pages.charts import (
    DAY_S,
    AxisTick,
    Bar,
    Plot,
    PlotArea,
    Shape,
    day_ticks,
    kind,
    share_ticks,
    slices,
)
from jurymast.report.pages.report import Card, ratio_cards
from jurymast.report.simulation import GOODPUT, quantile
from jurymast.report.text import count, duration, percent
from jurymast.sim.durations import START
from jurymast.sim.simulation import SimOutcome

FRAME = PlotArea()
SPREAD = PlotArea(height=76, left=40, right=40, bottom=26)
LANE_PX, MARK_PX = 32, 3
# Number of incidents of one run that are shown in full.
TOLD_MAX = 20
PRODUCTIVE = "step"
# The looks of marks, by decision; the last one is for several at the same place.
MARKS = {"restart": "restart", "swap": "swap"}
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
