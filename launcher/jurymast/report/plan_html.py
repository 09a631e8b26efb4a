"""The forecast as one self-contained page: the figures, goodput over the cadence, and what spares buy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jurymast.core.planning.forecast import Forecast, goodput_at
from jurymast.report.html import ALLOWED, STYLE, embedded, text
from jurymast.report.plan_text import WAYS, facts, gains, minutes, percent_fine
from jurymast.report.words import count, duration, percent

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 300, 60, 14, 44
POINTS = 120
# The curve reaches this far either way of the cadence that was chosen.
REACH = 30.0
ROUND_S = (
    0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000, 86_400, 259_200, 864_000,
)  # fmt: skip
EXTRA_STYLE = """
svg.curve{width:100%;min-width:600px;display:block}svg.curve .line{fill:none;stroke-width:2}
svg.curve .grid{stroke:var(--line)}svg.curve .chosen{stroke:#e8590c;stroke-dasharray:4 3}
svg.curve .end{text-anchor:end}svg.curve .middle{text-anchor:middle}
"""


def page(plan: Mapping[str, Any], found: Forecast) -> str:
    """The whole page; `plan` is `plan_view(found)`."""
    title = f"jurymast plan: {count(plan['nodes'], 'node')}"
    body = [
        f"<h1>A run on {count(plan['nodes'], 'node')}, {count(plan['gpus'], 'GPU')}</h1>",
        _rate_line(plan["rate"]),
        _cards(plan),
        "<h2>The figures</h2>",
        _table(("", ""), [(text(name), text(value)) for name, value in facts(plan)]),
        '<h2>Goodput over the time between saves</h2><div class="wide">', _curve(found), "</div>",
        f'<p class="dim">{text(plan["way"])}: {text(WAYS[plan["way"]])}. Green: the rate expected; grey: the '
        "rates between which the true one lies with 90 %; dashed: the cadence planned.</p>",
        "<h2>Ways to save</h2>", _ways(plan["ways"]),
        "<h2>Spares</h2>", _spares(plan),
        "<h2>What would change it</h2>", *(f"<p>{text(line)}</p>" for line in gains(plan)),
        "<h2>Assumed</h2>", *(f"<p>{text(line)}</p>" for line in plan["assumed"]),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
        f"<title>{text(title)}</title><style>{STYLE}{EXTRA_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="plan">{embedded(plan)}</script>\n</body></html>\n'
    )


def _rate_line(rate: Mapping[str, Any]) -> str:
    return (
        f"<p>{rate['per_1000_node_days']:.3g} failures per 1,000 node-days "
        f'<span class="dim">(90 %: {rate["low"]:.3g} to {rate["high"]:.3g}; '
        f"{text(rate['evidence'])})</span></p>"
    )


def _cards(plan: Mapping[str, Any]) -> str:
    cards = [
        ("goodput", percent(plan["goodput"]), plan["definitions"]["goodput"]),
        ("ETTR", percent(plan["ettr"]), plan["definitions"]["ettr"]),
        ("a failure every", minutes(plan["mttf_minutes"]), "mean time between failures of the run"),
        ("a save every", minutes(plan["cadence_minutes"]), f"{plan['checkpoints_per_day']:.0f} a day"),
        ("spares", str(plan["spares"]), "nodes kept warm beside the active ones"),
    ]
    drawn = "".join(
        f'<div class="card">{text(name)}<b>{text(value)}</b><span class="dim">{text(what)}</span></div>'
        for name, value, what in cards
    )
    return f'<div class="cards">{drawn}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{each}</th>" for each in heads) if any(heads) else ""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _ways(ways: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            text(each["way"]), minutes(each["cadence_minutes"]), minutes(each["durable_cadence_minutes"]),
            duration(each["stall_seconds"]), percent(each["goodput"]), text(WAYS[each["way"]]),
        )
        for each in ways
    ]  # fmt: skip
    return _table(("way", "every", "to shared storage every", "stall", "goodput", ""), rows)


def _spares(plan: Mapping[str, Any]) -> str:
    """A row for each number of spares, with a bar for what remains of the allocation."""
    values = [each["allocation_goodput"] for each in plan["spare_choices"]]
    least, most = min(values), max(values)
    rows = []
    for each in plan["spare_choices"]:
        # The bars start a little below the least, or nobody would see them differ.
        part = (each["allocation_goodput"] - least) / (most - least) if most > least else 1.0
        colour = "#2e9f5b" if each["spares"] == plan["spares"] else "#7fb2e5"
        bar = (
            '<svg width="220" height="12" aria-hidden="true">'
            f'<rect width="{20 + 200 * part:.1f}" height="12" fill="{colour}"/></svg>'
        )
        name = f"<b>{each['spares']}</b>" if each["spares"] == plan["spares"] else str(each["spares"])
        rows.append(
            (name, percent_fine(each["waiting"]), percent_fine(each["ettr"]),
             percent_fine(each["allocation_goodput"]), bar)
        )  # fmt: skip
    return _table(("spares", "a node missing", "ETTR", "allocation goodput", ""), rows)


def _curve(found: Forecast) -> str:
    """Goodput over the interval, logarithmic, at the expected rate and at both ends of its interval."""
    question, chosen_s = found.question, found.way.interval_s
    low, high = question.rate.interval()
    first, last = math.log(chosen_s / REACH), math.log(chosen_s * REACH)
    times_s = [math.exp(first + (last - first) * i / (POINTS - 1)) for i in range(POINTS)]
    curves = {
        rate: [goodput_at(question, at_s, rate) for at_s in times_s]
        for rate in (low, high, question.rate.rate)
    }
    floor = max(0.0, math.floor(10.0 * min(min(values) for values in curves.values())) / 10.0)

    def x(at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 10) * (math.log(at_s) - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - value) / (1.0 - floor), 1)

    parts = [f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="goodput by cadence">']
    for tenth in range(round(10 * floor), 11):
        at = y(tenth / 10)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{at + 3}">{10 * tenth} %</text>')
    for at_s in ROUND_S:
        if times_s[0] <= at_s <= times_s[-1]:
            parts.append(
                f'<text class="middle" x="{x(at_s)}" y="{HEIGHT - BOTTOM + 16}">{minutes(at_s / 60.0)}</text>'
            )
    parts.append(f'<text class="middle" x="{WIDTH / 2}" y="{HEIGHT - 8}">time between saves</text>')
    for rate, values in curves.items():
        colour = "#2e9f5b" if rate == question.rate.rate else "#868e96"
        path = " ".join(f"{x(t)},{y(v)}" for t, v in zip(times_s, values, strict=True))
        tip = f"{rate:.3g} failures per 1,000 node-days"
        parts.append(
            f'<polyline class="line" stroke="{colour}" points="{path}"><title>{tip}</title></polyline>'
        )
    at = x(chosen_s)
    parts.append(f'<line class="chosen" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "".join(parts)
