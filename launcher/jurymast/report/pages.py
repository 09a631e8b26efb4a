"""Pages for a browser: how they are rendered, and the geometry of their charts, which templates turn into
inline SVG. Each page is one file that loads nothing, can be read without scripts, and prints.

A template lays out the JSON object from which a page is made, and what the page's module computes from it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jurymast.core.goodput import CATEGORIES, MEANINGS, Account, Interval
from jurymast.core.state.incident import Incident
from jurymast.report import text
from jurymast.report.marks import Places, has_row, marks
from jurymast.report.text import clean, duration

if TYPE_CHECKING:
    from jinja2 import Environment

GROUPS = {category.name: category.group for category in CATEGORIES}
LOST = [name for name, group in GROUPS.items() if group == "incident"]
OTHER = "other"
DAY_S = 86_400.0

# The timeline of nodes, in pixels.
ROWS_MAX = 64
FOLDED_ABOVE = 8
RECTANGLES_MAX = 2000
# What page.js can draw. In longer runs neighbours are drawn as one.
EXACT_MAX = 15_000
LABEL_PX, CHART_PX, ROW_PX, TOP_PX, FLAG_PX = 150, 1000, 16, 42, 17


def kind(category: str) -> str:
    """The class for a category's colour; categories of other versions share one colour."""
    return f"c-{category if category in GROUPS else OTHER}"


@dataclass(frozen=True)
class AxisTick:
    at: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A bar. `kind` is its class in page.css, as for all shapes below; `tip` is shown on hovering."""

    kind: str
    x: float
    width: float
    tip: str


# Shares of a whole.


@dataclass(frozen=True)
class Slice:
    """A category's share of all node-time, 0..1. `x` is its place in a bar of length 1, `bar` its length
    relative to the longest."""

    name: str
    kind: str
    group: str
    meaning: str
    node_seconds: float
    share: float
    x: float
    bar: float


def slices(categories: Mapping[str, float], total: float) -> tuple[Slice, ...]:
    """Make slices of `categories`; these and `total` are in node-seconds."""
    longest = max(categories.values(), default=0.0) or 1.0
    found, x = [], 0.0
    for name, seconds in categories.items():
        share = seconds / total if total else 0.0
        found.append(
            Slice(
                name, kind(name), GROUPS.get(name, OTHER), MEANINGS.get(name, ""), seconds, share, x,
                seconds / longest,
            )
        )  # fmt: skip
        x += share
    return tuple(found)


# Nodes over time.


class Row(NamedTuple):
    """A row of the timeline: a label, which names the node or says how many nodes do the same, what they do,
    and their names."""

    label: str
    intervals: Sequence[Interval]
    nodes: Sequence[str] = ()


@dataclass(frozen=True)
class Flag:
    """An incident on the timeline, `ms` after its start. Without `number` if the one before is too close for
    a number."""

    id: int
    ms: int
    x: float
    number: bool
    tip: str


def rows_of(account: Account, most: int = ROWS_MAX) -> tuple[list[Row], int]:
    """The rows to draw, and how many nodes have none. Unless there are few nodes, those with the same
    history share a row; of more than `most` rows, those with the most changes are kept."""
    nodes = list(account.stays)
    groups: dict[object, list[str]] = {}
    for name in nodes:
        same = (
            tuple((s.start, s.end, s.what) for s in account.stays[name])
            if len(nodes) > FOLDED_ABOVE
            else name
        )
        groups.setdefault(same, []).append(name)
    kept = list(groups.values())
    if len(kept) > most:
        kept.sort(key=lambda names: -len(account.stays[names[0]]))
        kept = sorted(kept[:most], key=lambda names: nodes.index(names[0]))
    rows = [Row("queue", account.waits)] if account.waits else []
    rows += [Row(_label(names), list(account.intervals(names[0])), names) for names in kept]
    return rows, len(nodes) - sum(len(names) for names in kept)


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} x like {names[0]}"


def coarse(intervals: Iterable[Interval], start: int, end: int, columns: int) -> list[Interval]:
    """At most one interval per column: the one that fills most of it. Gaps stay gaps."""
    width = max(1, -(-(end - start) // columns))
    shares: dict[int, Counter[str]] = {}
    for interval in intervals:
        for column in range((interval.start - start) // width, (interval.end - start - 1) // width + 1):
            left, right = start + column * width, start + (column + 1) * width
            share = min(interval.end, right) - max(interval.start, left)
            shares.setdefault(column, Counter())[interval.category] += share
    merged: list[Interval] = []
    for column in sorted(shares):
        category = shares[column].most_common(1)[0][0]
        left, right = start + column * width, min(end, start + (column + 1) * width)
        if merged and merged[-1].category == category and merged[-1].end == left:
            merged[-1].end = right
        else:
            merged.append(Interval(left, right, category))
    return merged


def _drawn(rows: Sequence[Row], start: int, end: int) -> list[list[Interval]]:
    """The rectangles of each row: exact if there are few, else by columns."""
    exact = [list(row.intervals) for row in rows]
    columns = CHART_PX
    while sum(map(len, exact)) > RECTANGLES_MAX and columns >= 8:
        exact = [coarse(row.intervals, start, end, columns) for row in rows]
        columns //= 2
    return exact


def timeline(account: Account, incidents: Sequence[Incident]) -> dict[str, Any] | None:
    """Lay out the timeline; None if nothing is in the account yet. `top` is where the first lane begins, a
    lane's `y` its upper edge; `left_out` nodes have no lane."""
    booked = [*account.waits, *account.timeline]
    if not booked or account.end <= booked[0].start:
        return None
    rows, left_out = rows_of(account)
    start, end = min(i.start for i in booked), account.end

    def place(t: int) -> float:
        return round(LABEL_PX + CHART_PX * (min(max(t, start), end) - start) / (end - start), 2)

    lanes = []
    top = TOP_PX + ROW_PX * has_row(account)
    edges = {name: top + ROW_PX * number for number, row in enumerate(rows) for name in row.nodes}
    for number, (row, intervals) in enumerate(zip(rows, _drawn(rows, start, end), strict=True)):
        bars = [
            Bar(kind(i.category), place(i.start), max(0.3, round(place(i.end) - place(i.start), 2)),
                f"{i.category.replace('_', ' ')}, {duration(i.us / 1e6)}")
            for i in intervals if i.us > 0
        ]  # fmt: skip
        short = row.label if len(row.label) <= 22 else row.label[:21] + "…"
        lanes.append({"label": short, "whole_label": row.label, "y": top + ROW_PX * number, "bars": bars})
    flags: list[Flag] = []
    free = 0.0
    for incident in incidents:
        at = round(incident.fault_at * 1e6)
        x = place(at)
        tip = f"incident {incident.id}: {incident.cause or 'being diagnosed'}"
        tip += (f" on {incident.node}" if incident.node else "") + (
            incident.action and f", {incident.action}"
        )
        flags.append(Flag(incident.id, (at - start) // 1000, x, x >= free, tip))
        free = x + FLAG_PX if x >= free else free
    return {
        "width": LABEL_PX + CHART_PX + 70, "height": top + ROW_PX * len(rows) + 4, "top": TOP_PX,
        "row": TOP_PX if top > TOP_PX else None, "marks": marks(account, Places(start, place, edges, TOP_PX)),
        "ticks": [AxisTick(place(t), label) for t, label in ticks(start, end)], "lanes": lanes,
        "flags": flags, "left_out": left_out, "exact": _exact(rows, start, end),
    }  # fmt: skip


def _exact(rows: Sequence[Row], start: int, end: int) -> dict[str, Any]:
    """All intervals of the rows in whole milliseconds, as small as possible. Rows share most of theirs, so
    each different one is there once, as three numbers: how long after the end of the one before it begins,
    its length, and its kind. A row has ranges of these."""
    columns, lanes = EXACT_MAX, [list(row.intervals) for row in rows]
    while len(found := dict.fromkeys(_key(i) for lane in lanes for i in lane)) > EXACT_MAX:
        lanes = [coarse(row.intervals, start, end, columns) for row in rows]
        columns //= 2
    kinds = list(dict.fromkeys(kind(category) for _, _, category in found))
    numbers: list[int] = []
    before = 0
    for from_us, to_us, category in found:
        begin, ended = (from_us - start) // 1000, (to_us - start) // 1000
        numbers += begin - before, ended - begin, kinds.index(kind(category))
        before = ended
    places = {key: n for n, key in enumerate(found)}
    ranges: list[list[list[int]]] = []
    for lane in lanes:
        own: list[list[int]] = []
        for n in (places[_key(interval)] for interval in lane):
            if own and own[-1][1] == n:
                own[-1][1] += 1
            else:
                own.append([n, n + 1])
        ranges.append(own)
    zone_s = datetime.fromtimestamp(start / 1e6).astimezone().utcoffset().total_seconds()  # type: ignore[union-attr]
    return {
        "start": start // 1000, "zone": round(zone_s * 1000), "length": (end - start) // 1000,
        "left": LABEL_PX, "width": CHART_PX, "kinds": kinds, "intervals": numbers, "lanes": ranges,
    }  # fmt: skip


def _key(interval: Interval) -> tuple[int, int, str]:
    return interval.start, interval.end, interval.category


def ticks(start: int, end: int) -> list[tuple[int, str]]:
    """Five to ten round times between two moments (microseconds), with their labels."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400)
    span_s = (end - start) / 1e6
    step_s = next((s for s in steps if span_s / s <= 9), 86_400 * max(1, round(span_s / 86_400 / 7)))
    offset_s = round(datetime.fromtimestamp(start / 1e6).astimezone().utcoffset().total_seconds())  # type: ignore[union-attr]
    first_s = -(-(start // 1_000_000 + offset_s) // step_s) * step_s - offset_s
    form = "%H:%M:%S" if step_s < 60 else "%H:%M" if step_s < 43_200 else "%m-%d %H:%M"
    found = []
    while first_s * 1_000_000 < end:
        if first_s * 1_000_000 >= start:
            found.append((first_s * 1_000_000, datetime.fromtimestamp(first_s).strftime(form)))
        first_s += step_s
    return found


# Curves.


@dataclass(frozen=True)
class PlotArea:
    """A chart's size and margins in pixels; turns shares of its inside (0..1, upwards) into coordinates."""

    height: int = 260
    width: int = 900
    left: int = 64
    right: int = 24
    top: int = 14
    bottom: int = 34

    @property
    def inner_right(self) -> int:
        return self.width - self.right

    @property
    def inner_bottom(self) -> int:
        return self.height - self.bottom

    def x(self, share: float) -> float:
        return round(self.left + (self.inner_right - self.left) * share, 1)

    def y(self, share: float) -> float:
        return round(self.top + (self.inner_bottom - self.top) * (1.0 - share), 1)

    def points(self, shares: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):g},{self.y(y):g}" for x, y in shares)


@dataclass(frozen=True)
class Shape:
    """A line, or the outline of an area."""

    kind: str
    points: str
    tip: str


@dataclass(frozen=True)
class Plot:
    """A chart; `chosen` is a marked place on the x axis."""

    label: str
    frame: PlotArea
    x_ticks: tuple[AxisTick, ...]
    y_ticks: tuple[AxisTick, ...]
    areas: tuple[Shape, ...] = ()
    lines: tuple[Shape, ...] = ()
    x_title: str = ""
    chosen: AxisTick | None = None


def share_ticks(frame: PlotArea, low: float, high: float) -> tuple[AxisTick, ...]:
    """Three to seven round values for a y axis from `low` to `high`, both 0..1."""
    steps = (number / 10**digits for digits in range(6, 0, -1) for number in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(
        AxisTick(frame.y((i * step - low) / (high - low)), f"{round(100 * i * step, 4):g} %")
        for i in range(first, last + 1)
    )


def day_ticks(frame: PlotArea, days: float) -> tuple[AxisTick, ...]:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100) if days / s <= 12), 200) if days > 2 else days / 4
    return tuple(
        AxisTick(frame.x(i * step / days), f"day {i * step:g}") for i in range(int(days / step + 1e-9) + 1)
    )


def render(template: str, data: Mapping[str, Any], computed: Mapping[str, Any]) -> str:
    """Render the page. `data` is the JSON object from which it is made, and is part of the page; `computed`
    are further names of the template."""
    return _environment().get_template(template).render(computed, data=data)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only pages need it
    from markupsafe import Markup

    def shown(value: object) -> object:
        """The value without control characters, whatever a run's texts contain; autoescape follows. None
        means not known."""
        if value is None:
            return "-"
        return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    loader = PackageLoader("jurymast.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {}
    for own in (
        text.amounts, text.count, text.duration, text.minutes, text.node_time, text.percent,
        text.percent_fine, text.plain_seconds, text.size,
    ):  # fmt: skip
        environment.filters[own.__name__] = own
    environment.globals["lost"] = LOST
    for name in ("style", "script"):
        source, _, _ = loader.get_source(environment, f"page.{'css' if name == 'style' else 'js'}")
        # The only style and script that a browser accepts, whatever a run's texts contain.
        environment.globals[name] = Markup(source)
        environment.globals[f"{name}_hash"] = _hash(source)
    return environment


def _hash(source: str) -> str:
    """The hash by which a Content-Security-Policy allows a source."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
