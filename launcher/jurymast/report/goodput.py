"""A run's goodput report, as one JSON object, as text and as a page: where its node-time went, and what its
failures cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

import jurymast
from jurymast.core.checkpoints.agreement import CLOSE
from jurymast.core.goodput import MEANINGS, RATIOS, Account, SaveCounts, ordered
from jurymast.core.judges.cadence import young_interval_s
from jurymast.core.state.failure_rate import (
    FEW_FAILURES,
    LEVEL,
    Mtbf,
    Watched,
    between_bursts,
    failure_times,
    mtbf,
    prior,
)
from jurymast.core.state.incident import CAUSES, Incident
from jurymast.core.state.run import RunState, failure_rate
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.report.advice import advice_blocks, advice_view, sentences, trust
from jurymast.report.cost import cost_json, cost_text, energy_json, energy_text, gpu_seconds, kwh_text, money
from jurymast.report.curves import curves
from jurymast.report.in_process import in_process_json, in_process_text
from jurymast.report.incidents import MORE, PARTS, clock, incident_blocks, incident_json, lost_step, trace_of
from jurymast.report.instead import assumed, instead_blocks, instead_sentences
from jurymast.report.liveness import Liveness, look, slurm_jobs
from jurymast.report.pages import Bar, Slice, kind, render, slices, timeline
from jurymast.report.records import Record, records_of
from jurymast.report.status import (
    StatusWatcher,
    data_gaps,
    public_state,
    shown_step,
    tiers_json,
)
from jurymast.report.text import (
    MERGED,
    Block,
    Line,
    Table,
    between,
    count,
    duration,
    iso,
    node_time,
    one_line,
    percent,
    points,
    rates,
    size,
    throughput,
)
from jurymast.rundir import RunDirectory

Report = dict[str, Any]

BAR_COLUMNS = 24
COMMAND_CHARACTERS = 400


@dataclass(frozen=True)
class Reported:
    """A report, and what a page shows besides: by incident what the run directory has of it."""

    report: Report
    account: Account
    state: RunState
    directory: RunDirectory | None = None

    @property
    def records(self) -> dict[int, list[Record]]:
        if self.directory is None:
            return {}
        return records_of(self.directory, self.state.incidents, self.state.ranks_per_node)


def reported(watcher: StatusWatcher) -> Reported:
    """The run's report as of now."""
    life, now = look(watcher.directory, watcher.state), time.time()
    report, account = report_view(watcher, life, now), watcher.account(life, now)
    return Reported(report, account, watcher.state, watcher.directory)


def report_view(watcher: StatusWatcher, life: Liveness | None = None, now: float | None = None) -> Report:
    """The report. Times are in seconds or ISO 8601 with zone, node-time in node-seconds, ratios 0..1. If it
    is not known which steps are rework, the ratios lie between `ratios` and `ratios_at_most`."""
    life = look(watcher.directory, watcher.state) if life is None else life
    now = time.time() if now is None else now
    state, plan = watcher.state, watcher.plan
    account, counts = watcher.account(life, now), watcher.ledger.steps
    by_charge = charges(state.incidents)
    failures = node_failures(account, state.incidents)
    expected_s = _expected_s(state, state.now if state.ended else max(now, state.now))
    word, why = public_state(state, life)
    return {
        "run": state.run or plan.run, "name": state.name or plan.name, "state": word, "end_reason": why,
        "provisional": not account.final and life.kind != "gone",
        "until": iso(account.end / 1e6) if account.end else None, "warnings": data_gaps(watcher),
        **account_json(account),
        "steps": {
            "done": max(state.best_step, shown_step(state)), "seconds": account.placed_us("step") / 1e6,
            "in_all_attempts": counts.done, "again": counts.again,
            "again_at_most": counts.again + counts.maybe_again,
        },
        "cost": cost_json(account, plan.settings.price), "a_second": throughput_json(account),
        "energy": energy_json(state.joules, gpu_seconds(account)),
        "tiers": _tiers_json(state),
        "nodes": {
            "active": state.active, "spares": state.spares, "seen": len(account.stays),
            "fewer": fewer_json(state, now),
        },
        "incidents": incidents_json(account, state.incidents),
        "in_process": in_process_json(account, state.incidents),
        "mtbf": mtbf_json(failures, by_charge, expected_s),
        "cadence": _cadence_json(watcher.ledger.saves, expected_s, state),
        "advice": advice_view(watcher.ledger, account, now),
        "provenance": _provenance(watcher, plan, state),
    }  # fmt: skip


def account_json(account: Account) -> Report:
    """What the account alone tells."""
    return {
        "ratios": account.ratios(), "ratios_at_most": account.ratios(at_most=True), "definitions": RATIOS,
        "categories": {name: account.totals[name] / 1e6 for name in ordered(list(account.totals))},
        "total_node_seconds": sum(account.totals.values()) / 1e6,
        "allocated_node_seconds": account.allocated_us / 1e6,
        "queue_node_seconds": account.queue_us / 1e6,
        "wall_seconds": account.wall_us / 1e6,
    }  # fmt: skip


def fewer_json(state: RunState, now: float) -> dict[str, float]:
    """For how many seconds the run went on with fewer nodes than it wants, by their number."""
    spans: dict[str, float] = {}
    end = state.now if state.ended else max(now, state.now)
    for one in state.fewer:
        seconds = (one.until if one.until is not None else end) - one.since
        spans[str(one.nodes)] = round(spans.get(str(one.nodes), 0.0) + seconds, 6)
    return spans


def fewer_text(nodes: Mapping[str, Any]) -> str:
    """Like "ran on 3 of 4 nodes for 12 min"; "" if it never did."""
    told = [f"{number} of {nodes['active']} nodes for {duration(s)}" for number, s in nodes["fewer"].items()]
    return f"ran on {', on '.join(told)}" if told else ""


def throughput_json(account: Account) -> Report:
    """The usual one while steps were done; None for what the script does not say."""
    samples = [one.samples_s for one in account.paces if one.samples_s]
    tokens = [one.tokens_s for one in account.paces if one.tokens_s]
    return throughput(median(samples or [0.0]), median(tokens or [0.0]))


def charges(incidents: Sequence[Incident]) -> dict[str, int]:
    """Incidents by who is charged with them; those that somebody requested are not here."""
    return {who: sum(i.charged == who for i in incidents) for who in ("infrastructure", "application")}


def incidents_json(account: Account, incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    return [{**incident_json(i), "lost_seconds": account.incident_us(i.id) / 1e6} for i in incidents]


def node_failures(account: Account, incidents: Sequence[Incident]) -> Mtbf:
    """The nodes' failures, while nodes were allocated: those that `status` counts. The script's say nothing
    of the nodes."""
    failures = failure_times(incidents)
    spans = (Watched(held.start / 1e6, held.end / 1e6, 1.0) for held in account.timeline)
    observed_s = sum(end - start for span in spans for start, end in between_bursts(span, failures))
    return mtbf(len(failures), observed_s)


def mtbf_json(found: Mtbf, by_charge: Mapping[str, int], expected_s: float) -> dict[str, Any]:
    return {
        "seconds": found.mean_s, "low_seconds": found.low_s, "high_seconds": found.high_s, "level": LEVEL,
        "failures": found.failures, "observed_seconds": found.observed_s,
        "by_charge": by_charge,
        "predicted_seconds": expected_s,
    }  # fmt: skip


def _expected_s(state: RunState, now: float) -> float:
    """The MTBF of the run's nodes in seconds, at the failure rate that `status` shows."""
    rate = failure_rate(state, now) or prior(state.settings.rate)
    return rate.mtbf_s(max(1, state.active))


def _cadence_json(saves: SaveCounts, expected_s: float, state: RunState) -> dict[str, Any]:
    stall_s = saves.stall_s / saves.done if saves.done else None
    return {
        "setting": cadence_words(state.settings), "saves": saves.done, "failed": saves.failed,
        "interval_seconds": saves.interval_s / saves.intervals if saves.intervals else None,
        "stall_seconds": stall_s, "stall_max_seconds": saves.stall_max_s if saves.done else None,
        "stall_total_seconds": saves.stall_s,
        "size_bytes": saves.size_bytes or None, "mtbf_used_seconds": expected_s,
        "optimal_seconds": young_interval_s(stall_s, expected_s) if stall_s is not None else None,
        "reason": state.cadence.reason if state.cadence else None,
    }  # fmt: skip


def _tiers_json(state: RunState) -> dict[str, Any]:
    """As in the status; with the bytes that restores read from each tier."""
    read = Counter[str]()
    for incident in state.incidents:
        read.update(incident.tiers)
    tiers = tiers_json(state, nodes_gone=state.ended)
    return {name: {**tier, "read_bytes": read[name]} for name, tier in tiers.items()}


def cadence_words(settings: Settings) -> str:
    """The cadence as a policy spells it. A cadence that the script sets itself is not known here."""
    if settings.cadence_steps is not None:
        return f"{settings.cadence_steps} steps"
    return "auto" if settings.cadence_s is None else f"{settings.cadence_s:g} s"


def _provenance(watcher: StatusWatcher, plan: RunPlan, state: RunState) -> dict[str, Any]:
    started = watcher.started or {}
    return {
        "script": plan.script, "arguments": list(plan.arguments), "python": plan.python,
        "policy_hash": plan.policy_hash, "cluster": plan.cluster, "directory": str(watcher.directory.root),
        "slurm_jobs": [job for job, _ in slurm_jobs(watcher.directory, state)],
        "submitted_at": iso(plan.submitted_at), "ended_at": iso(state.ended_at),
        "run_version": started.get("version") or None, "report_version": jurymast.__version__,
        "generated_at": iso(time.time()),
    }  # fmt: skip


def compare(first: Report, second: Report) -> dict[str, Any]:
    """Compare two reports: differences are second - first; categories are shares of the node-time."""
    ratios: Mapping[str, Any] = first["ratios"]
    names = ordered(list({*first["categories"], *second["categories"]}))
    return {
        "first": first, "second": second,
        "difference": {
            "ratios": {name: _difference(_exact(first, name), _exact(second, name)) for name in ratios},
            "shares": {name: share(second, name) - share(first, name) for name in names},
        },
    }  # fmt: skip


def share(report: Mapping[str, Any], category: str) -> float:
    """The category's share of all node-time, 0..1."""
    total = report["total_node_seconds"]
    return report["categories"].get(category, 0.0) / total if total else 0.0


def _exact(report: Mapping[str, Any], name: str) -> float | None:
    """The ratio; None if only bounds are known."""
    found: float | None = report["ratios"][name]
    return found if found == report["ratios_at_most"][name] else None


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else second - first


def report_blocks(report: Mapping[str, Any], *, bar: str = "#") -> list[Block]:
    """Lay out the report as text. Bars are drawn with the character `bar`."""
    blocks: list[Block] = [
        Line(f"{subject(report)}: {report['state']} ({reach(report)})", "bold"),
        *(Line(f"warning    {text}", "bold yellow") for text in report["warnings"]),
        Line(""),
    ]
    for name, value in report["ratios"].items():
        label = {"ettr": "ETTR"}.get(name, name.replace("_", " "))
        told = between(value, report["ratios_at_most"][name])
        blocks.append(Line(f"{label:<19}{told:>8}   {report['definitions'][name]}", "bold"))
    blocks += [Line(""), _category_table(report, bar)]
    blocks += [Line(""), *incident_blocks(report["incidents"]), Line("")]
    about = (
        *([("cost", cost_text(report["cost"]))] if report["cost"] else []),
        *([("energy", energy_text(report["energy"]))] if report["energy"] else []),
        *([("in process", in_process_text(found))] if (found := report["in_process"]) else []),
        *([("nodes", told)] if (told := fewer_text(report["nodes"])) else []),
        *(("throughput", told) for told in throughput_texts(report)),
        ("MTBF", mtbf_text(report)),
        ("cadence", cadence_text(report)),
        ("made from", source_text(report)),
    )
    blocks += [Line(f"{name:<11}{text}") for name, text in about]
    last = instead_blocks(report) if "instead" in report else advice_blocks(report["advice"])
    return [*blocks, Line(""), *last]


def subject(report: Mapping[str, Any]) -> str:
    """What the report is of. Reports of jobs that jurymast did not launch have an `estimate`."""
    return f"ESTIMATE of Slurm job {report['run']}" if report.get("estimate") else f"run {report['run']}"


def reach(report: Mapping[str, Any], form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """The time at which the report ends, and whether the run had ended by then."""
    kind = "provisional" if report["provisional"] else "final"
    if report["until"] is None:
        return f"{kind}, its times are not known"
    until = datetime.fromisoformat(report["until"]).strftime(form)
    return f"{kind}, up to {until}"


def _category_table(report: Mapping[str, Any], bar: str) -> Table:
    rows = []
    for name, seconds in report["categories"].items():
        part = share(report, name)
        drawn = bar * max(1 if seconds else 0, round(BAR_COLUMNS * part))
        rows.append(
            [name, node_time(seconds), percent(part), drawn.ljust(BAR_COLUMNS), MEANINGS.get(name, "")]
        )
    rows.append(["total", node_time(report["total_node_seconds"]), percent(1.0), " " * BAR_COLUMNS, ""])
    return Table(("CATEGORY", "NODE-TIME", "SHARE", "", "MEANING"), rows, right=frozenset({1, 2}))


def _mtbf_span(found: Mapping[str, Any]) -> str:
    """The MTBF; after few failures the interval in which it lies."""
    if found["failures"] and found["failures"] < FEW_FAILURES:
        return f"{duration(found['low_seconds'])} to {duration(found['high_seconds'])}"
    return duration(found["seconds"])


def mtbf_text(report: Mapping[str, Any]) -> str:
    found = report["mtbf"]
    seen = (
        f"{count(found['failures'], 'failure')} of the infrastructure in "
        f"{duration(found['observed_seconds'])} with nodes"
        f"{f' ({MERGED})' if found['failures'] else ''}"
    )
    predicted = (
        f"expected of {count(report['nodes']['active'], 'node')}: {duration(found['predicted_seconds'])}"
    )
    if found["seconds"] is None:
        low = f", so at least {duration(found['low_seconds'])} (95 %)" if found["low_seconds"] else ""
        return f"{seen}{low}; {predicted}"
    if found["failures"] < FEW_FAILURES:
        return f"{_mtbf_span(found)} (90 %), {seen}; {predicted}"
    interval = f"{duration(found['low_seconds'])} to {duration(found['high_seconds'])}"
    return f"{_mtbf_span(found)} (90 %: {interval}), {seen}; {predicted}"


def throughput_texts(report: Mapping[str, Any]) -> list[str]:
    """At most one."""
    told = rates(report["a_second"])
    return [f"{' and '.join(told)} while steps were done"] if told else []


def cadence_text(report: Mapping[str, Any]) -> str:
    found = report["cadence"]
    if found is None:
        return "not known of a job that jurymast did not launch"
    if not found["saves"]:
        failed = f", {found['failed']} failed" if found["failed"] else ""
        return f"policy: {found['setting']}; no checkpoint was saved{failed}"
    text = f"policy: {found['setting']}; {count(found['saves'], 'save')}"
    if found["failed"]:
        text += f" and {found['failed']} failed"
    if found["interval_seconds"] is not None:
        text += f", one every {duration(found['interval_seconds'])}"
    text += f", stall {duration(found['stall_seconds'])}"
    text += f", {size(found['size_bytes'])} each" if found["size_bytes"] else ""
    text += f"; best at the expected MTBF: every {duration(found['optimal_seconds'])}"
    return text + (f"; at last more often, {CLOSE}" if found["reason"] == CLOSE else "")


def stalls_text(report: Mapping[str, Any]) -> str:
    """How long training stood still for saves; "" if it did not save."""
    found = report["cadence"]
    if found is None or not found["saves"]:
        return ""
    all_s, each_s, most_s = (found[f"stall{name}_seconds"] for name in ("_total", "", "_max"))
    return (
        f"Training stood still for {duration(all_s)} in all for {count(found['saves'], 'save')}: "
        f"{duration(each_s)} each, {duration(most_s)} at most."
    )


def source_text(report: Mapping[str, Any]) -> str:
    found = report["provenance"]
    script = one_line(" ".join([found["script"], *found["arguments"]]), COMMAND_CHARACTERS)
    if report.get("estimate"):
        return f"{report['estimate']['basis']}: {script}"
    policy = f", policy {found['policy_hash'][:12]}" if found["policy_hash"] else ""
    return f"{found['directory']}: {script}{policy}, jurymast {found['run_version'] or '?'}"


def compare_table(both: Mapping[str, Any]) -> Table:
    """Lay out the comparison of two runs."""
    first, second, difference = both["first"], both["second"], both["difference"]
    ratios = [
        [
            name,
            *(between(each["ratios"][name], each["ratios_at_most"][name]) for each in (first, second)),
            points(change),
        ]
        for name, change in difference["ratios"].items()
    ]
    shares = [
        [name, percent(share(first, name)), percent(share(second, name)), points(change)]
        for name, change in difference["shares"].items()
    ]
    facts = [
        ["node-time", node_time(first["total_node_seconds"]), node_time(second["total_node_seconds"]), ""],
        ["incidents", str(len(first["incidents"])), str(len(second["incidents"])), ""],
        ["MTBF", *(_mtbf_span(each["mtbf"]) for each in (first, second)), ""],
        *_costs(first, second),
        *_throughputs(first, second),
        *_foretold(first, second),
    ]
    headers = ("", *(_heading(each) for each in (first, second)), "CHANGE")
    right = frozenset({1, 2, 3})
    return Table(headers, [*ratios, *facts, *shares], right=right, wrap=False)


def _costs(*reports: Mapping[str, Any]) -> list[list[str]]:
    told = [each["cost"] for each in reports]
    cells = [money(cost["total"], cost["currency"]) if cost else "-" for cost in told]
    return [["cost", *cells, ""]] if any(told) else []


def _throughputs(*reports: Mapping[str, Any]) -> list[list[str]]:
    told = [rates(each["a_second"]) for each in reports]
    return [["throughput", *(", ".join(found) or "-" for found in told), ""]] if any(told) else []


def _foretold(*reports: Mapping[str, Any]) -> list[list[str]]:
    """What jurymast would have made of those that it only observed."""
    ratios = [(each.get("instead", {}).get("ratios"), each) for each in reports]
    return [
        [
            f"{name} with jurymast",
            *(
                between(told[name], of["instead"]["ratios_at_most"][name]) if told else ""
                for told, of in ratios
            ),
            "",
        ]
        for name in ("runtime_goodput", "allocation_goodput")
        if any(told for told, _ in ratios)
    ]


def compare_page(both: Mapping[str, Any]) -> str:
    """Render the comparison as a page."""
    runs = both["first"], both["second"]
    names = [_heading(each) for each in runs]
    bars = [slices(each["categories"], each["total_node_seconds"]) for each in runs]
    told = [name for each in bars for one in each if (name := one.name) in MEANINGS]
    words = {**both["first"]["definitions"], **{name: MEANINGS[name] for name in ordered(list({*told}))}}
    return render(
        "compare.html.j2", both,
        {
            "title": " and ".join(names), "bars": list(zip(names, bars, strict=True)),
            "table": compare_table(both), "words": list(words.items()),
        },
    )  # fmt: skip


def _heading(report: Mapping[str, Any]) -> str:
    return f"{report['run']} (estimate)" if report.get("estimate") else str(report["run"])


# ---- the page

RATIO_NAMES = {
    "ettr": "ETTR", "runtime_goodput": "Runtime goodput", "allocation_goodput": "Allocation goodput",
}  # fmt: skip
# The looks of states; all others are calm.
TONES = {
    "succeeded": "good", "failed": "bad", "cancelled": "warn", "recovering": "warn", "requeued": "warn",
}  # fmt: skip
# The category to which a part of an incident is charged.
PART_CATEGORIES = {
    "detect": "detection", "diagnose": "diagnosis", "decide": "decision", "replace": "replacement",
    "launch": "relaunch", "restore": "restore", "rework": "rework",
}  # fmt: skip
LOSSES_TOLD = 3
# What the marks on the timeline mean.
MARKS = {
    "save": "In the row above the nodes a line marks saves", "start": "▲ the start of another attempt",
    "swap": "◆ on a node: a spare that takes a place", "finding": "▼ on a node: a finding of a probe",
}  # fmt: skip
# What a page has room for: incidents, and characters of their tracebacks.
INCIDENTS_SHOWN = 150
TRACES_SHOWN = 100_000
LEFT_OUT = "left out here: `jurymast report` has it"
OF_THE_JOURNAL = "All figures are computed from the run's journal."


@dataclass(frozen=True)
class Card:
    name: str
    value: str
    what: str


Records = Mapping[int, Sequence[Record]]


def page(report: Report, account: Account, state: RunState, records: Records | None = None) -> str:
    """Render the whole page; `report` is `report_view` at the same moment as `account` and `state`."""
    return render("report.html.j2", _with_room(report), report_page(report, account, state, records or {}))


def _with_room(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with the incidents for which a page of less than a megabyte has room: the costliest, with
    each traceback once, and as much of them as fits."""
    newest = max((one["id"] for one in report["incidents"]), default=0)
    cost = sorted(report["incidents"], key=lambda one: (one["id"] != newest, -sum(one["seconds"].values())))[
        :INCIDENTS_SHOWN
    ]
    told: dict[str, int] = {}
    shown, room = [], TRACES_SHOWN
    for each in sorted(cost, key=lambda one: int(one["id"])):
        trace = trace_of(each, told)
        whole = len(trace) <= (TRACES_SHOWN if each["id"] == newest else room)
        room -= len(trace) if whole else 0
        shown.append({**each, "traceback": (trace if whole else LEFT_OUT) or None})
    return {**report, "incidents": shown}


def report_page(
    report: Mapping[str, Any], account: Account, state: RunState, records: Records | None = None
) -> dict[str, Any]:
    """What the page shows beside the report's own values. `failure` is the incident with which the run ended;
    `sums` has the seconds of all incidents by part, also of those that have no place on the page."""
    told = records or {}
    incidents = [_incident(each, told) for each in _with_room(report)["incidents"]]
    numbers, seconds = {each["id"] for each in incidents}, [one["seconds"] for one in report["incidents"]]
    found = slices(report["categories"], report["total_node_seconds"])
    return {
        "title": f"{subject(report)}: {report['state']}",
        "heading": subject(report) if report.get("estimate") else report["run"],
        "asked": f"--slurm {report['run']}" if report.get("estimate") else report["run"],
        "basis": report["estimate"]["sentence"] if report.get("estimate") else OF_THE_JOURNAL,
        "tone": TONES.get(report["state"], "calm"),
        "reach": reach(report, "%Y-%m-%d %H:%M:%S %z"),
        "extent": _extent(report),
        "summary": _summary(report, found, account.doubtful),
        "failure": (
            _incident(report["incidents"][-1], told) if report["state"] == "failed" and incidents else None
        ),
        "cards": [
            *ratio_cards(report["ratios"], report["definitions"], report["ratios_at_most"]),
            _incident_card(report["incidents"]),
            *_cost_cards(report["cost"], report["energy"]),
        ],
        "slices": found,
        "timeline": timeline(account, [one for one in state.incidents if one.id in numbers]),
        "curves": curves(account),
        "parts": {part: kind(PART_CATEGORIES[part]) for part in PARTS},
        "incidents": incidents,
        "sums": [sum(each[part] for each in seconds) for part in PARTS],
        "more": "" if all(one["rework_known"] for one in report["incidents"]) else MORE,
        "of_incidents": len(report["incidents"]),
        "spared": in_process_text(report["in_process"]) if report["in_process"] else "",
        "tiers": {name: {**tier, "at": clock(tier["at"])} for name, tier in report["tiers"].items()},
        "stalls": stalls_text(report),
        "marks": MARKS,
        "cadence": cadence_text(report),
        "mtbf": mtbf_text(report),
        **_last_part(report),
        "provenance": {
            name: " ".join(map(str, value)) or None if isinstance(value, list) else value
            for name, value in report["provenance"].items()
        },
    }


def _last_part(report: Mapping[str, Any]) -> dict[str, Any]:
    """What jurymast would have done, in a job that it observed; in a run what to change."""
    if (view := report.get("instead")) is not None:
        told, why = instead_sentences(report), assumed(view)
        return {"advised": "What jurymast would have done", "advice": told, "trust": why}
    advice = report["advice"]
    return {"advised": "What to change", "advice": sentences(advice), "trust": trust(advice)}


def _extent(report: Mapping[str, Any]) -> str:
    """The run's size and progress."""
    nodes, spares = report["nodes"]["active"], report["nodes"]["spares"]
    size = count(nodes, "active node") + (f" and {count(spares, 'spare')}" if spares else "")
    size += f" ({fewer})" if (fewer := fewer_text(report["nodes"])) else ""
    steps = (
        f"{count(report['steps']['done'], 'step')} done" if report["steps"]["done"] else "no step done yet"
    )
    return f"{size}; {steps}; {duration(report['wall_seconds'])} since the job could have started"


def _summary(report: Mapping[str, Any], found: Sequence[Slice], doubtful: frozenset[str]) -> str:
    """The bar of categories as a sentence."""
    total = report["total_node_seconds"]
    if not total:
        return "No node-time has been spent yet."
    useful = sum(each.share for each in found if each.group == "productive")
    most = useful + sum(each.share for each in found if each.name in doubtful)
    told = f"{between(useful, most)} of {node_time(total)} went into steps that counted"
    rest = sorted((each for each in found if each.group != "productive"), key=lambda s: -s.share)
    names = [f"{each.name.replace('_', ' ')} {percent(each.share)}" for each in rest[:LOSSES_TOLD]]
    return f"{told}. Most of the rest: {', '.join(names)}." if names else f"{told}."


def ratio_cards(
    ratios: Mapping[str, float | None],
    meanings: Mapping[str, str],
    at_most: Mapping[str, float | None] | None = None,
) -> list[Card]:
    return [
        Card(RATIO_NAMES.get(name, name), between(ratio, (at_most or ratios)[name]), meanings[name])
        for name, ratio in ratios.items()
    ]


def _cost_cards(cost: Mapping[str, Any] | None, energy: Mapping[str, Any] | None) -> list[Card]:
    cards = [Card("Cost", money(cost["total"], cost["currency"]), cost_text(cost))] if cost else []
    return cards + ([Card("Energy", kwh_text(energy), energy_text(energy))] if energy else [])


def _incident_card(incidents: Sequence[Mapping[str, Any]]) -> Card:
    if not incidents:
        return Card("Incidents", "none", "no failures, and no restart was requested")
    costs = {each["id"]: sum(each["seconds"].values()) for each in incidents}
    top = max(incidents, key=lambda each: costs[each["id"]])
    least = "" if all(each["rework_known"] for each in incidents) else "at least "
    told = f"cost {least}{duration(sum(costs.values()))} of training"
    if len(incidents) > 1:
        cause = top["cause"] or "being diagnosed"
        told += f"; the longest, {cause} (#{top['id']}), {duration(costs[top['id']])}"
    return Card("Incidents", str(len(incidents)), told)


def _incident(incident: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """Its values, and the page's: `bars`, its parts in a bar of length 1; `steps`, from which to which."""
    known = CAUSES.get(incident["cause"])
    total, x, bars = sum(incident["seconds"].values()), 0.0, []
    for part in PARTS:
        if (value := incident["seconds"][part]) > 0:
            bars.append(Bar(kind(PART_CATEGORIES[part]), x, value / total, f"{part} {duration(value)}"))
            x += value / total
    back, steps = incident["step_restored"], lost_step(incident)
    return {
        **incident,
        "at": clock(incident["at"]),
        "records": records.get(incident["id"], ()),
        "cause": incident["cause"] or "being diagnosed",
        "meaning": known.meaning[:1].upper() + known.meaning[1:] if known else "",
        "todo": known.todo if known else "",
        "total": total,
        "bars": bars,
        "steps": steps if back is None else f"{steps} → {back}",
    }
