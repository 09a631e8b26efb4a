"""Simulated runs as one self-contained page: goodput over seeds and over time, losses, incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jurymast.core.goodput.accounting import RATIOS, ordered
from jurymast.core.run.incident import Incident
from jurymast.report.gantt import colour
from jurymast.report.html import ALLOWED, RATIO_NAMES, STYLE, embedded, text
from jurymast.report.report_text import MEANINGS
from jurymast.report.words import count, duration, node_time, percent
from jurymast.sim.durations import START
from jurymast.sim.results import GOODPUT, quantile
from jurymast.sim.simulation import Outcome

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 240, 70, 14, 34
RIGHT = WIDTH - 30
DAY_S = 86_400.0
LANE_PX, DOT_PX = 30, 26
# Marks drawn of one run's incidents, and those told in full.
MARKS_MAX, TOLD_MAX = 3000, 20
PRODUCTIVE = "step"
EXTRA_STYLE = """
svg.chart{width:100%;min-width:600px;display:block}svg.chart .grid{stroke:var(--line)}
svg.chart .end{text-anchor:end}svg.chart .middle{text-anchor:middle}
svg.chart .seed{fill:none;stroke:#868e96;stroke-width:1;opacity:.6}
svg.chart .mean{fill:none;stroke:#2e9f5b;stroke-width:2}
"""


def page(found: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The whole page; `found` is what `simulate --json` prints, `outcomes` have a history."""
    runs = f"{count(found['seeds'], 'run')} of {count(found['nodes'], 'node')}"
    body = [
        f"<h1>{text(runs)} for {found['days']:g} days, simulated</h1>",
        f"<p>{found['rate']:.3g} failures per 1,000 node-days, {text(found['faults'])}; "
        f"{count(found['spares'], 'spare')}; cadence {text(found['cadence'])}</p>",
        _cards(found),
        '<h2>Goodput of each run</h2><div class="wide">', _spread(outcomes), "</div>",
        '<h2>Goodput over time</h2><div class="wide">', _over_time(found, outcomes), "</div>",
        '<p class="dim">Grey: each run; green: their mean.</p>',
        '<h2>What the rest of the time went into</h2><div class="wide">', _losses(found, outcomes), "</div>",
        "<h2>Where the node-time went</h2>", _categories(found),
        "<h2>Incidents of the first run</h2>", _incidents(outcomes[0], found["days"]),
        "<h2>Assumed</h2>", *(f"<p>{text(line)}</p>" for line in found["assumed"]),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
        f"<title>jurymast simulate: {text(runs)}</title><style>{STYLE}{EXTRA_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="simulation">{embedded(found)}</script>\n</body></html>\n'
    )


def _cards(found: Mapping[str, Any]) -> str:
    mean = found["mtbf_hours"]
    cards = [
        (RATIO_NAMES.get(name, name), percent(value["mean"]), RATIOS[name])
        for name, value in found["ratios"].items()
    ]
    every = "none" if mean is None else f"one in {duration(3600.0 * mean)}"
    cards.append(("Incidents a run", f"{found['incidents']:.0f}", every))
    drawn = "".join(
        f'<div class="card">{text(name)}<b>{text(value)}</b><span class="dim">{text(what)}</span></div>'
        for name, value, what in cards
    )
    return f'<div class="cards">{drawn}</div>'


def _scale(least: float, most: float) -> tuple[float, float]:
    """A little more than these, within 0..1."""
    room = max(0.1 * (most - least), 0.0005)
    return max(0.0, least - room), min(1.0, most + room)


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(label)}">'
    return head + "".join(parts) + "</svg>"


def _spread(outcomes: Sequence[Outcome]) -> str:
    """A dot for each run, a bar from the 5th to the 95th percentile, a line at the mean."""
    values = [outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes]
    low, high = _scale(min(values), max(values))
    middle, height = DOT_PX, 2 * DOT_PX + 22

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    p5, p95, mean = quantile(values, 0.05), quantile(values, 0.95), sum(values) / len(values)
    parts = [
        f'<rect x="{x(p5)}" y="{middle - 9}" width="{max(1.0, x(p95) - x(p5)):.1f}" height="18" '
        'fill="#2e9f5b" opacity=".25"><title>5 % to 95 %</title></rect>',
        f'<line class="mean" x1="{x(mean)}" x2="{x(mean)}" y1="{middle - 14}" y2="{middle + 14}"/>',
    ]
    for seed, value in enumerate(values):
        parts.append(
            f'<circle cx="{x(value)}" cy="{middle}" r="4" fill="#2e9f5b"><title>seed {seed}: '
            f"{100 * value:.3f} %</title></circle>"
        )
    for value in (low, (low + high) / 2.0, high):
        parts.append(f'<text class="middle" x="{x(value)}" y="{height - 8}">{100 * value:.2f} %</text>')
    return _svg(height, "goodput of each run", parts)


def _days_axis(days: float) -> list[str]:
    """Labels below the time axis."""
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100) if days / s <= 12), 200) if days > 2 else days / 4
    parts = []
    for i in range(int(days / step + 1e-9) + 1):
        x = round(LEFT + (RIGHT - LEFT) * i * step / days, 1)
        parts.append(f'<text class="middle" x="{x}" y="{HEIGHT - 12}">day {i * step:g}</text>')
    return parts


def _grid(low: float, high: float) -> list[str]:
    """Five lines with their shares."""
    parts = []
    for i in range(5):
        value = low + (high - low) * i / 4.0
        y = _y(value, low, high)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 3}">{100 * value:.3g} %</text>')
    return parts


def _y(value: float, low: float, high: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)


def _x(number: float, parts: int) -> float:
    """Of a part of the time."""
    return round(LEFT + (RIGHT - LEFT) * number / parts, 1)


def _over_time(found: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    curves = [[_share(part, PRODUCTIVE) for part in outcome.history] for outcome in outcomes]
    mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
    low, high = _scale(min(map(min, curves)), max(map(max, curves)))
    parts = _grid(low, high) + _days_axis(found["days"])
    for kind, curve in [*(("seed", curve) for curve in curves), ("mean", mean)]:
        points = " ".join(f"{_x(i + 0.5, len(curve))},{_y(v, low, high)}" for i, v in enumerate(curve))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    return _svg(HEIGHT, "goodput over time", parts)


def _share(part: Mapping[str, int], category: str) -> float:
    total = sum(part.values())
    return part.get(category, 0) / total if total else 0.0


def _losses(found: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """All categories but the productive one, one on top of the other, as shares of all runs' time."""
    sums = [sum((Counter(part) for part in parts), Counter[str]())
            for parts in zip(*(outcome.history for outcome in outcomes), strict=True)]  # fmt: skip
    names = ordered([name for name in {name for part in sums for name in part} if name != PRODUCTIVE])
    top = max((1.0 - _share(part, PRODUCTIVE) for part in sums if part), default=0.0) or 0.001
    parts = _grid(0.0, top) + _days_axis(found["days"])
    base = [0.0] * len(sums)
    for name in names:
        above = [low + _share(part, name) for low, part in zip(base, sums, strict=True)]
        edge = [(i, value) for i, value in enumerate(above)]
        back = [(i, value) for i, value in reversed(list(enumerate(base)))]
        points = " ".join(f"{_x(i + 0.5, len(sums))},{_y(v, 0.0, top)}" for i, v in edge + back)
        parts.append(
            f'<polygon fill="{colour(name)}" points="{points}"><title>{text(name)}</title></polygon>'
        )
        base = above
    keys = " ".join(
        f'<span class="swatch" style="background:{colour(name)}"></span>{text(name)}' for name in names
    )
    return _svg(HEIGHT, "lost time by category", parts) + f'<p class="dim">{keys}</p>'


def _categories(found: Mapping[str, Any]) -> str:
    total = found["total_node_seconds"]
    rows = []
    for name, seconds in found["categories"].items():
        part = seconds / total if total else 0.0
        rows.append(
            f'<tr><td><span class="swatch" style="background:{colour(name)}"></span>{text(name)}</td>'
            f'<td class="n">{node_time(seconds)}</td><td class="n">{100 * part:.2f} %</td>'
            f'<td><svg width="260" height="12" aria-hidden="true"><rect width="{max(1.0, 260 * part):.1f}" '
            f'height="12" fill="{colour(name)}"/></svg></td>'
            f'<td class="dim">{text(MEANINGS.get(name, ""))}</td></tr>'
        )
    head = '<th>category</th><th class="n">node-time</th><th class="n">share</th><th></th><th>meaning</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _incidents(outcome: Outcome, days: float) -> str:
    """A lane for each cause, a mark for each incident; below, the costliest ones."""
    if not outcome.incidents:
        return "<p>none</p>"
    causes = [name for name, _ in Counter(each.cause for each in outcome.incidents).most_common()]
    height = TOP + LANE_PX * len(causes) + BOTTOM
    shift = height - HEIGHT
    parts = [f'<g transform="translate(0,{shift})">', *_days_axis(days), "</g>"]
    for lane, cause in enumerate(causes):
        y = TOP + LANE_PX * lane
        number = sum(each.cause == cause for each in outcome.incidents)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y + 8}" y2="{y + 8}"/>')
        parts.append(
            f'<text x="{LEFT}" y="{y - 2}"><title>{number}</title>{text(cause or "open")}, {number}</text>'
        )
    for each in outcome.incidents[:MARKS_MAX]:
        x = LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, (each.fault_at - START) / (days * DAY_S)))
        y = TOP + LANE_PX * causes.index(each.cause)
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 2}" width="2" height="12" fill="{_mark(each)}">'
            f"<title>{text(_told(each))}</title></rect>"
        )
    left_out = len(outcome.incidents) - MARKS_MAX
    note = f"<p>{left_out} later ones are not drawn.</p>" if left_out > 0 else ""
    worst = sorted(outcome.incidents, key=_cost_s, reverse=True)[:TOLD_MAX]
    rows = "".join(
        f'<tr><td>day {(each.fault_at - START) / DAY_S:.2f}</td><td>{text(each.cause)}</td>'
        f'<td>{text(each.action or "-")}</td><td class="n">{duration(_cost_s(each))}</td>'
        f'<td class="dim">{text(each.evidence)}</td></tr>'
        for each in worst
    )  # fmt: skip
    head = '<th>at</th><th>cause</th><th>action</th><th class="n">took</th><th>evidence</th>'
    return (
        f'<div class="wide">{_svg(height, "incidents over time", parts)}</div>{note}'
        '<p class="dim">Blue: restarted in place; green: a spare swapped in; red: requeued or ended. The '
        f"costliest {len(worst)}:</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _mark(incident: Incident) -> str:
    return {"restart": "#3d7fc4", "swap": "#2e9f5b"}.get(incident.action, "#c92a2a")


def _cost_s(incident: Incident) -> float:
    return sum(incident.seconds().values())


def _told(incident: Incident) -> str:
    took = duration(_cost_s(incident))
    return f"day {(incident.fault_at - START) / DAY_S:.2f}: {incident.cause}, {incident.action}, {took}"
