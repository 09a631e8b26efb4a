"""The curves of a report's page: over the run: which share of the time counted, how long steps took, and the
throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from jurymast.core.goodput import Account, Interval, Pace, cut_out
from jurymast.report.pages import AxisTick, Plot, PlotArea, Shape, share_ticks, ticks
from jurymast.report.text import amount, duration, percent

FRAME = PlotArea(height=180)
PARTS = 120
Value, Told = Callable[[Pace], float], Callable[[float], str]
# By what a curve is called: how its points are found and told, and their unit.
PACES: dict[str, tuple[Value, Told, str]] = {
    "time of a step": (lambda pace: pace.step_s, duration, "a step"),
    "samples a second": (lambda pace: pace.samples_s, amount, "samples/s"),
    "tokens a second": (lambda pace: pace.tokens_s, amount, "tokens/s"),
}
# A run of fewer steps, or of less time, has no curve.
PACES_LEAST, LEAST_S = 3, 10.0


def curves(account: Account) -> list[Plot]:
    """Those of which the run shows enough."""
    booked = sorted([*account.waits, *account.timeline], key=lambda one: one.start)
    if not booked or booked[-1].end - booked[0].start < LEAST_S * 1e6:
        return []
    found = [_goodput(account, booked)]
    for label, (value, _, _) in PACES.items():
        paces = [pace for pace in account.paces if value(pace)]
        if len(paces) >= PACES_LEAST:
            found.append(_over_time(label, paces, booked[0].start, booked[-1].end))
    return found


def _times(start: int, end: int) -> tuple[AxisTick, ...]:
    return tuple(AxisTick(FRAME.x((t - start) / (end - start)), label) for t, label in ticks(start, end))


def _goodput(account: Account, booked: Sequence[Interval]) -> Plot:
    """Of each of `PARTS` parts of the time, the share in steps that counted; and at most counted."""
    start, end = booked[0].start, booked[-1].end
    edges = [start + (end - start) * part // PARTS for part in range(PARTS + 1)]
    parts = [list(cut_out(booked, a, b)) for a, b in pairwise(edges)]
    doubt = any(account.placed_us(name) for name in account.doubtful)
    kinds = [("edge", ("step", *account.doubtful), "at most ")] if doubt else []
    lines = []
    for kind, counted, bound in (*kinds, ("main", ("step",), "at least " if doubt else "")):
        shares = [_share(part, counted) for part in parts]
        points = FRAME.points(((part + 0.5) / PARTS, share) for part, share in enumerate(shares))
        each = f"each point: {duration((end - start) / PARTS / 1e6)}"
        lines.append(Shape(kind, points, f"{bound}{percent(min(shares))} to {percent(max(shares))}; {each}"))
    label = "share of the time in steps that counted"
    return Plot(label, FRAME, _times(start, end), share_ticks(FRAME, 0.0, 1.0), lines=tuple(lines))


def _share(intervals: Sequence[Interval], counted: Sequence[str]) -> float:
    whole = sum(one.us for one in intervals)
    return sum(one.us for one in intervals if one.category in counted) / whole if whole else 0.0


def _over_time(label: str, paces: Sequence[Pace], start: int, end: int) -> Plot:
    """A line for each attempt."""
    value, told, unit = PACES[label]
    top = 1.1 * max(value(pace) for pace in paces)
    lines = []
    for attempt, group in groupby(paces, key=lambda pace: pace.attempt):
        found = [(one.t, value(one)) for one in group]
        points = FRAME.points(((1e6 * t - start) / (end - start), each / top) for t, each in found)
        low, high = (told(bound(each for _, each in found)) for bound in (min, max))
        lines.append(Shape("main", points, f"attempt {attempt}: {low} to {high} {unit}"))
    return Plot(label, FRAME, _times(start, end), _round_ticks(top, told), lines=tuple(lines))


def _round_ticks(top: float, told: Told) -> tuple[AxisTick, ...]:
    """Round values from 0 to `top`, six at most."""
    each = next(
        n * 10.0**digits for digits in range(-9, 18) for n in (1, 2, 5) if top / (n * 10.0**digits) <= 5
    )
    return tuple(AxisTick(FRAME.y(i * each / top), told(i * each)) for i in range(int(top / each) + 1))
