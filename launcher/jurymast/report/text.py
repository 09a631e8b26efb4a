"""Status, events and the list of runs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jurymast.core.run.causes import CAUSES
from jurymast.report.cadence import cadence_lines
from jurymast.report.layout import STYLES, Block, Line, Table, one_line
from jurymast.report.sentences import own_words, short_reason
from jurymast.report.words import count, duration, percent, some

# With more nodes than this, those that just do their work are counted instead of listed.
NODES_LISTED_MAX = 32
INCIDENTS_LISTED = 10
ALERTS_LISTED = 3
TEXT_CHARACTERS = 200
EVIDENCE_CHARACTERS = 600  # of what is shown once

View = Mapping[str, Any]


def status_blocks(view: View, *, now: float, everything: bool = False) -> list[Block]:
    """What `jurymast status` shows. `now`: seconds since the epoch."""
    word = view["state"]
    blocks: list[Block] = [
        Line(f"run        {view['run']}", "bold"),
        Line(f"state      {word}{_state_detail(view, now)}", STYLES.get(word, "")),
        Line(f"training   {_training(view, now)}"),
    ]
    blocks += [Line(text) for text in cadence_lines(view)]
    jobs = ", ".join(view["slurm_jobs"]) or ("none yet" if view["cluster"] == "slurm" else view["job"]["id"])
    if jobs:
        blocks.append(Line(f"{'job' if len(view['slurm_jobs']) < 2 else 'jobs':<10} {jobs}"))
    blocks.append(Line(f"directory  {view['directory']}"))
    blocks += [Line(f"warning    {text}", "bold yellow") for text in view["warnings"]]
    alerts = view["alerts"] if everything else view["alerts"][-ALERTS_LISTED:]
    blocks += [
        Line(f"alert      {_clock(a['at'])} on {some(a['nodes'])}: {a['message']}", "bold yellow")
        for a in alerts
    ]
    if word == "failed" and view["incidents"]:
        blocks += cause_blocks(view["incidents"][-1])
    blocks += _node_blocks(view, everything)
    blocks += _incident_blocks(view, everything)
    notes = view["notes"] if everything else view["notes"][-3:]
    blocks += [Line("")] if notes else []
    blocks += [Line(f"note {_clock(note['at'])}  {_cut(note['message'])}") for note in notes]
    return blocks


def _state_detail(view: View, now: float) -> str:
    if view["ended_at"] and not view["next"]:
        spent = _seconds(view["ended_at"]) - _seconds(view["submitted_at"])
        code = f"exit code {view['exit_code']}"
        return f", {duration(spent)} after its submission, {code}: {_ended_by(view)}"
    if view["exit_code"] is not None and not view["next"]:
        return f": {_ended_by(view)}"
    text = f", attempt {view['attempt']}" if view["attempt"] else ""
    if view["restarts"]:
        text += f", {count(view['restarts'], 'requeue')}"
    text += f", submitted {duration(max(0.0, now - _seconds(view['submitted_at'])))} ago"
    return f"{text}; {view['next']}" if view["next"] else text


def _ended_by(view: View) -> str:
    """What the block on the cause does not say anyway."""
    last = view["incidents"][-1] if view["state"] == "failed" and view["incidents"] else None
    told = last is not None and last["reason"] == view["end_reason"]
    return _cut(own_words(last) if last is not None and told else view["end_reason"])


def _training(view: View, now: float) -> str:
    text = f"step {view['step']}" if view["step"] else "no step done yet"
    if view["step_seconds"]:
        text += f", {duration(view['step_seconds'])} a step"
    saved = view["saved_step"]
    if saved is None:
        return f"{text}, no checkpoint yet"
    tiers = view["tiers"]
    where = [f"{name} {tier['step']}" for name, tier in tiers.items() if tier["step"] is not None]
    return f"{text}, newest checkpoint step {saved}" + (f" ({', '.join(where)})" if len(tiers) > 1 else "")


def cause_blocks(incident: View) -> list[Block]:
    """Why a run failed: cause, node, rank, evidence and the traceback."""
    where = [f"rank {incident['rank']}"] if incident["rank"] is not None else []
    where += [f"node {incident['node']}"] if incident["node"] else []
    told = CAUSES.get(incident["cause"])
    blocks: list[Block] = [
        Line(""),
        Line(f"cause      {incident['cause']}" + (f" ({', '.join(where)})" if where else ""), "bold red"),
        *([Line(f"meaning    {told.meaning}" + (f"; {told.todo}" if told.todo else ""))] if told else []),
        Line(f"evidence   {one_line(incident['evidence'], EVIDENCE_CHARACTERS)}"),
        Line(f"decision   {incident['action'] or 'none yet'}: {own_words(incident)}"),
    ]
    if incident["traceback"]:
        lines = incident["traceback"].rstrip().splitlines()
        blocks += [Line(one_line(f"  {line}", EVIDENCE_CHARACTERS)) for line in lines]
    return blocks


def _node_blocks(view: View, everything: bool) -> list[Block]:
    nodes = view["nodes"]
    if not nodes:
        return []
    shown = nodes
    if len(nodes) > NODES_LISTED_MAX and not everything:
        shown = [node for node in nodes if node["role"] not in ("active", "spare")]
    blocks: list[Block] = [Line("")]
    if shown:
        rows = [[n["name"], n["role"], _clock(n["since"]), _cut(n["reason"])] for n in shown]
        blocks.append(Table(("NODE", "ROLE", "SINCE", "REASON"), rows))
    if len(shown) < len(nodes):
        roles = [node["role"] for node in nodes]
        told = ", ".join(f"{roles.count(r)} {r}" for r in ("active", "spare") if r in roles)
        blocks.append(Line(f"and {told} (--all lists every node)"))
    return blocks


def _incident_blocks(view: View, everything: bool) -> list[Block]:
    incidents = view["incidents"] if everything else view["incidents"][-INCIDENTS_LISTED:]
    if not incidents:
        return []
    earlier = len(view["incidents"]) - len(incidents)
    rows = [
        [
            str(i["id"]), _clock(i["at"]), _cause(i), i["node"] or "-",
            i["action"] or "-", _steps(i), _took(i),
            short_reason(i["reason"], i["evidence"], TEXT_CHARACTERS),
        ]
        for i in incidents
    ]  # fmt: skip
    headers = ("#", "AT", "CAUSE", "NODE", "ACTION", "STEPS", "TOOK", "WHY")
    blocks: list[Block] = [Line(""), Table(headers, rows, right=frozenset({0}))]
    return [*blocks, Line(f"and {count(earlier, 'earlier incident')} (--all)")] if earlier else blocks


def _cut(text: str) -> str:
    """What somebody else may have written at length; `--json` and the report have all of it."""
    return one_line(text, TEXT_CHARACTERS)


def _cause(incident: View) -> str:
    return incident["cause"] or ("(being found)" if incident["open"] else "-")


def _took(incident: View) -> str:
    return duration(sum(incident["seconds"].values())) + (" so far" if incident["open"] else "")


def _steps(incident: View) -> str:
    """Steps lost: from where, back to where."""
    if incident["step_restored"] is None:
        return str(incident["step_lost_from"])
    return f"{incident['step_lost_from']} -> {incident['step_restored']}"


def ps_blocks(rows: Sequence[View]) -> list[Block]:
    """squeue's columns first, then the run's own."""
    headers = (
        "JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)", "STEP", "RESTARTS",
        "GOODPUT", "STATE", "RUN",
    )  # fmt: skip
    keys = (
        "job", "partition", "name", "user", "st", "time", "nodes", "nodelist", "step", "restarts", "goodput",
        "state", "run",
    )  # fmt: skip
    table = [[_cell(key, row[key]) for key in keys] for row in rows]
    return [Table(headers, table, right=frozenset({0, 5, 6, 8, 9, 10}), wrap=False)]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return percent(value) if key == "goodput" else str(value)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _clock(text: str | None) -> str:
    """HH:MM:SS, with the date when it is not today's."""
    if text is None:
        return "-"
    at = datetime.fromisoformat(text)
    return at.strftime("%H:%M:%S" if at.date() == datetime.now(at.tzinfo).date() else "%m-%d %H:%M:%S")
