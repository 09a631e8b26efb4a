"""The goodput report as one self-contained page: no request leaves it, every text in it is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from jurymast.core.goodput.accounting import CATEGORIES, Account
from jurymast.core.run.state import RunState
from jurymast.report.gantt import chart, colour
from jurymast.report.layout import clean
from jurymast.report.report import share
from jurymast.report.report_text import MEANINGS, PARTS, cadence_line, mtbf_line, provenance_line, reach
from jurymast.report.words import amounts, duration, node_time, percent

GROUPS = {category.name: category.group for category in CATEGORIES}
RATIO_NAMES = {
    "ettr": "ETTR", "runtime_goodput": "Runtime goodput", "allocation_goodput": "Allocation goodput",
}  # fmt: skip
# Nothing is loaded and no script runs, whatever a run's texts contain.
ALLOWED = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#777}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.3rem 0}
.dim{color:var(--dim)}.cards{display:flex;flex-wrap:wrap;gap:1rem;margin:1.2rem 0}
.card{border:1px solid var(--line);border-radius:8px;padding:.7rem 1rem;flex:1 1 16rem}
.card b{font-size:1.9rem;display:block}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.wide{overflow-x:auto}svg.gantt{width:100%;min-width:700px;display:block}
svg text{font:10px system-ui,sans-serif;fill:currentColor}svg .node{text-anchor:end}
svg .time{fill:var(--dim)}svg .tick{stroke:var(--line)}svg .fault{stroke:#e03131;stroke-dasharray:3 2}
svg .mark{fill:#e03131;font-weight:bold}svg a:focus .fault{stroke-width:3}
pre{overflow-x:auto;background:#8881;padding:.6rem;margin:.3rem 0;white-space:pre-wrap}
tr:target{background:#fab00533}
@media print{body{margin:0;max-width:none;font-size:11px}.card,tr,svg{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}details>*{display:block}}
"""


def text(value: object) -> str:
    """Any text of the run, safe inside HTML and its attributes."""
    return escape(clean(str(value)), quote=True)


def page(report: Mapping[str, Any], account: Account, state: RunState) -> str:
    """The whole page."""
    title = f"jurymast report: {report['run']}"
    gantt = chart(account, state.incidents)
    body = [
        f"<h1>{text(report['run'])}</h1>",
        f'<p>{text(report["state"])}{": " + text(report["end_reason"]) if report["end_reason"] else ""} '
        f'<span class="dim">({text(reach(report, "%Y-%m-%d %H:%M:%S %z"))})</span></p>',
        *(f"<p><b>{text(warning)}</b></p>" for warning in report["warnings"]),
        _cards(report),
        f'<h2>Nodes over time</h2><div class="wide">{gantt}</div>' if gantt else "",
        "<h2>Where the time went</h2>", _categories(report),
        "<h2>Incidents</h2>", _incidents(report["incidents"]),
        "<h2>Failures and checkpoints</h2>",
        *(f"<p>{text(line)}</p>" for line in (mtbf_line(report), cadence_line(report))),
        "<h2>Provenance</h2>", _provenance(report),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{ALLOWED}">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="report">{embedded(report)}</script>\n</body></html>\n'
    )


def embedded(report: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(report).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _cards(report: Mapping[str, Any]) -> str:
    cards = [
        f'<div class="card">{text(RATIO_NAMES.get(name, name))}<b>{percent(value)}</b>'
        f'<span class="dim">{text(report["definitions"][name])}</span></div>'
        for name, value in report["ratios"].items()
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _categories(report: Mapping[str, Any]) -> str:
    rows = []
    most = max((share(report, name) for name in report["categories"]), default=1.0) or 1.0
    for name, seconds in report["categories"].items():
        part = share(report, name)
        bar = (
            f'<svg width="260" height="12" role="img" aria-label="{percent(part)}">'
            f'<rect width="{max(1.0, 260 * part / most):.1f}" height="12" fill="{colour(name)}"/></svg>'
        )
        rows.append(
            f'<tr><td><span class="swatch" style="background:{colour(name)}"></span>{text(name)}</td>'
            f'<td class="n">{node_time(seconds)}</td><td class="n">{percent(part)}</td><td>{bar}</td>'
            f'<td class="dim">{text(GROUPS.get(name, "other"))}</td>'
            f'<td class="dim">{text(MEANINGS.get(name, ""))}</td></tr>'
        )
    total = f'<tr><td>total</td><td class="n">{node_time(report["total_node_seconds"])}</td></tr>'
    head = (
        '<tr><th>category</th><th class="n">node-time</th><th class="n">share</th><th></th>'
        "<th>group</th><th>meaning</th></tr>"
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}{total}</tbody></table>"


def _incidents(incidents: Sequence[Mapping[str, Any]]) -> str:
    if not incidents:
        return "<p>none</p>"
    heads = "".join(f'<th class="n">{part}</th>' for part in (*PARTS, "sum"))
    head = f"<tr><th>#</th><th>at</th><th>cause</th><th>node</th><th>action</th>{heads}<th>steps</th></tr>"
    return (
        f'<div class="wide"><table><thead>{head}</thead><tbody>'
        + "".join(_incident(incident) for incident in incidents)
        + '</tbody></table></div><p class="dim">times in seconds</p>'
    )


def _incident(incident: Mapping[str, Any]) -> str:
    at = datetime.fromisoformat(incident["at"]).strftime("%m-%d %H:%M:%S")
    seconds = [incident["seconds"][part] for part in PARTS]
    numbers = "".join(f'<td class="n">{value:.2f}</td>' for value in (*seconds, sum(seconds)))
    restored = "" if incident["step_restored"] is None else f" → {incident['step_restored']}"
    told = f"<p>{text(incident['evidence'])}</p>"
    if incident["action"]:
        told += f'<p class="dim">{text(incident["action"])}: {text(incident["reason"])}</p>'
    if incident["tiers"]:
        told += f'<p class="dim">restored {text(amounts(incident["tiers"]))}</p>'
    if incident["traceback"]:
        told += f"<details><summary>traceback</summary><pre>{text(incident['traceback'])}</pre></details>"
    return (
        f'<tr id="incident-{incident["id"]}"><td>{incident["id"]}</td><td>{at}</td>'
        f"<td>{text(incident['cause'])}</td><td>{text(incident['node'] or '-')}</td>"
        f"<td>{text(incident['action'] or '-')}</td>{numbers}"
        f"<td>{incident['step_lost_from']}{restored}</td></tr>"
        f'<tr><td></td><td colspan="{6 + len(PARTS)}">{told}</td></tr>'
    )


def _provenance(report: Mapping[str, Any]) -> str:
    found = report["provenance"]
    rows = "".join(
        f"<tr><td>{text(name)}</td><td>{text(_shown(value))}</td></tr>" for name, value in found.items()
    )
    spent = duration(report["wall_seconds"])
    return (
        f'<table><tbody>{rows}</tbody></table><p class="dim">{text(provenance_line(report))}; '
        f"{text(spent)} since the job could have started</p>"
    )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
