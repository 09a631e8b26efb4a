"""The forecast as a page: the figures, goodput over the cadence, and the gain of spares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jurymast.core.planning.forecast import Forecast, goodput_at
from jurymast.report.pages import render
from jurymast.report.pages.charts import AxisTick, Plot, PlotArea, Shape
from jurymast.report.pages.report import Card
from jurymast.report.plan import WAYS, facts, gains
from jurymast.report.text import count, minutes, percent

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
