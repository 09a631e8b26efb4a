"""The curves of a report's page, over the run: which share of the time counted, how long steps took, the
throughput, and how long training stood still for saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from jurymast.core.goodput import Account, Interval, cut_out
from jurymast.report.pages import AxisTick, Plot, PlotArea, Shape, share_ticks, ticks
from jurymast.report.text import amount, duration, percent

FRAME = PlotArea(height=180)
PARTS = 120
# What is told of fewer times, or a run of less time, has no curve.
POINTS_LEAST, LEAST_S = 3, 10.0


def curves(account: Account) -> list[Plot]:
    """Those of which the run shows enough."""
    booked = sorted([*account.waits, *account.timeline], key=lambda one: one.start)
    if not booked or booked[-1].end - booked[0].start < LEAST_S * 1e6:
        return []
    found = [_goodput(account, booked)]
    start, end = booked[0].start, booked[-1].end
    found += [_over_time(one, start, end) for one in _series(account) if len(one.points) >= POINTS_LEAST]
    return found


@dataclass(frozen=True)
class _Series:
    """Values over time: (Unix time, attempt, value); with what tells them, and their unit."""

    label: str
    points: list[tuple[float, int, float]]
    told: Callable[[float], str]
    unit: str


def _series(account: Account) -> Iterator[_Series]:
    paces = account.paces
    steps = [(one.t, one.attempt, one.step_s) for one in paces]
    yield _Series("time of a step", steps, duration, "a step")
    samples = [(one.t, one.attempt, one.samples_s) for one in paces if one.samples_s]
    yield _Series("samples a second", samples, amount, "samples/s")
    tokens = [(one.t, one.attempt, one.tokens_s) for one in paces if one.tokens_s]
    yield _Series("tokens a second", tokens, amount, "tokens/s")
    stalls = [(one.t, one.attempt, one.stall_s) for one in account.saved if one.stall_s]
    yield _Series("time that training stood still for a save", stalls, duration, "a save")


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


def _over_time(series: _Series, start: int, end: int) -> Plot:
    """A line for each attempt."""
    top = 1.1 * max(value for *_, value in series.points)
    lines = []
    for attempt, group in groupby(series.points, key=lambda point: point[1]):
        found = [(t, value) for t, _, value in group]
        shares = (((1e6 * t - start) / (end - start), value / top) for t, value in found)
        points = FRAME.points((min(1.0, max(0.0, x)), y) for x, y in shares)
        low, high = (series.told(bound(value for _, value in found)) for bound in (min, max))
        lines.append(Shape("main", points, f"attempt {attempt}: {low} to {high} {series.unit}"))
    label, y_ticks = series.label, _round_ticks(top, series.told)
    return Plot(label, FRAME, _times(start, end), y_ticks, lines=tuple(lines))


def _round_ticks(top: float, told: Callable[[float], str]) -> tuple[AxisTick, ...]:
    """Round values from 0 to `top`, six at most."""
    each = next(
        n * 10.0**digits for digits in range(-9, 18) for n in (1, 2, 5) if top / (n * 10.0**digits) <= 5
    )
    return tuple(AxisTick(FRAME.y(i * each / top), told(i * each)) for i in range(int(top / each) + 1))
