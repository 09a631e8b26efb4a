"""The node x time chart of the HTML report, as inline SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from jurymast.core.goodput.accounting import Account, Interval
from jurymast.core.run.incident import Incident
from jurymast.report.words import duration

COLOURS = {
    "step": "#2e9f5b", "queue_wait": "#b9bec6", "launch": "#7fb2e5", "restore": "#3d7fc4",
    "warm_up": "#a8d5ba", "checkpoint_stall": "#8e6fc1", "detection": "#e8590c", "hang": "#c92a2a",
    "diagnosis": "#f08c00", "decision": "#fab005", "replacement": "#e64980", "relaunch": "#4dabf7",
    "rework": "#f4a261", "requeue_wait": "#868e96", "spare_idle": "#dfe6ee", "failed_node": "#343a40",
    "shutdown": "#ced4da", "unknown": "#d0bfff",
}  # fmt: skip
OTHER_COLOUR = "#ff8787"

ROWS_MAX = 64
RECTANGLES_MAX = 4000
LABEL_PX, CHART_PX, ROW_PX, TOP_PX = 150, 1000, 16, 22


@dataclass(frozen=True)
class Row:
    """`label` names the node, or how many do the same."""

    label: str
    intervals: tuple[Interval, ...]


def colour(category: str) -> str:
    return COLOURS.get(category, OTHER_COLOUR)


def rows_of(account: Account, most: int = ROWS_MAX) -> tuple[list[Row], int]:
    """The rows to draw, and how many nodes have none. With more than `most` nodes, those that did exactly
    the same share a row, and the rows with the most changes are kept."""
    nodes = list(account.stays)
    groups: dict[object, list[str]] = {}
    for name in nodes:
        same = tuple((s.start, s.end, s.what) for s in account.stays[name]) if len(nodes) > most else name
        groups.setdefault(same, []).append(name)
    kept = list(groups.values())
    if len(kept) > most:
        kept.sort(key=lambda names: -len(account.stays[names[0]]))
        kept = sorted(kept[:most], key=lambda names: nodes.index(names[0]))
    rows = [Row("queue", account.waits)] if account.waits else []
    rows += [Row(_label(names), tuple(account.intervals(names[0]))) for names in kept]
    return rows, len(nodes) - sum(len(names) for names in kept)


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} x like {names[0]}"


def coarse(intervals: Iterable[Interval], start: int, end: int, columns: int) -> list[Interval]:
    """At most one interval a column: what took most of it. Gaps stay gaps."""
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
    """Each row's rectangles: exact while they are few, else by columns."""
    exact = [list(row.intervals) for row in rows]
    columns = CHART_PX
    while sum(map(len, exact)) > RECTANGLES_MAX and columns >= 8:
        exact = [coarse(row.intervals, start, end, columns) for row in rows]
        columns //= 2
    return exact


def chart(account: Account, incidents: Sequence[Incident]) -> str:
    """The SVG; an empty text when nothing is booked yet."""
    booked = [*account.waits, *account.timeline]
    if not booked or account.end <= booked[0].start:
        return ""
    rows, left_out = rows_of(account)
    start, end = min(i.start for i in booked), account.end
    height = TOP_PX + ROW_PX * len(rows) + 8

    def place(t: int) -> float:
        return round(LABEL_PX + CHART_PX * (min(max(t, start), end) - start) / (end - start), 2)

    parts = [
        f'<svg viewBox="0 0 {LABEL_PX + CHART_PX + 40} {height}" role="img" aria-label="nodes over time" '
        'preserveAspectRatio="xMinYMin" class="gantt">'
    ]
    for t, text in ticks(start, end):
        x = place(t)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP_PX - 5}" y2="{height - 6}" class="tick"/>')
        parts.append(f'<text x="{x + 3}" y="{TOP_PX - 9}" class="time">{text}</text>')
    for number, (row, intervals) in enumerate(zip(rows, _drawn(rows, start, end), strict=True)):
        y = TOP_PX + ROW_PX * number
        label = row.label if len(row.label) <= 22 else row.label[:21] + "…"
        parts.append(
            f'<text x="{LABEL_PX - 6}" y="{y + 11}" class="node">{escape(label)}'
            f"<title>{escape(row.label)}</title></text>"
        )
        parts += [_rectangle(i, place(i.start), place(i.end), y) for i in intervals if i.us > 0]
    for incident in incidents:
        x = place(round(incident.fault_at * 1e6))
        parts.append(
            f'<a href="#incident-{incident.id}"><line x1="{x}" x2="{x}" y1="{TOP_PX - 3}" y2="{height - 6}" '
            f'class="fault"/><text x="{x + 2}" y="{height - 1}" class="mark">{incident.id}</text></a>'
        )
    note = f"<p>{left_out} more nodes are not drawn.</p>" if left_out else ""
    return "".join(parts) + "</svg>" + note


def _rectangle(interval: Interval, left: float, right: float, y: int) -> str:
    width = max(0.3, round(right - left, 2))
    tip = f"{interval.category}, {duration(interval.us / 1e6)}"
    return (
        f'<rect x="{left}" y="{y}" width="{width}" height="{ROW_PX - 2}" '
        f'fill="{colour(interval.category)}"><title>{escape(tip)}</title></rect>'
    )


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
