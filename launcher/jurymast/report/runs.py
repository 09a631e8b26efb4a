"""All runs of a runs directory, and the nodes that they used, as rows and as tables; runs with squeue's
columns if Slurm knows them."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.earlier import forgiven_nodes, past_runs, until_text
from jurymast.cluster.exclusion import out_of_service
from jurymast.core.judges.history import (
    NodeRecord,
    PastRun,
    comebacks,
    history,
    more_exposure,
    watched_in,
    worst_first,
)
from jurymast.core.state.failure_rate import AFTER_REPAIR, learned_before, node_rate, prior
from jurymast.errors import ClusterUnavailableError, RunDirectoryError
from jurymast.jobs import run_command
from jurymast.report.liveness import ANSWER_LIMIT_S, Liveness, judge, look, slurm_jobs
from jurymast.report.observed import ENDED, observed_state
from jurymast.report.status import (
    StatusWatcher,
    doubts,
    public_state,
    read_status,
    restarts,
    shown_step,
    step_known,
)
from jurymast.report.text import (
    Block,
    Line,
    Table,
    clock,
    count,
    duration,
    iso,
    one_line,
    percent,
    plain_table,
    rates,
    squeue_time,
    throughput,
)
from jurymast.rundir import RunDirectory

# squeue's codes for our states.
CODES = {
    "queued": "PD", "requeued": "PD", "starting": "R", "running": "R", "recovering": "R", "succeeded": "CD",
    "failed": "F", "cancelled": "CA", ENDED: "?",
}  # fmt: skip
ENDED_SHOWN_S = 86_400.0
# The name last: it may contain what stands between the columns.
_FORMAT = "%i|%P|%u|%t|%M|%D|%T|%r|%R|%j"
# The columns: squeue's first, then the run's own.
COLUMNS = {
    "job": "JOBID", "partition": "PARTITION", "name": "NAME", "user": "USER", "st": "ST", "time": "TIME",
    "nodes": "NODES", "nodelist": "NODELIST(REASON)", "step": "STEP", "a_second": "THROUGHPUT",
    "restarts": "RESTARTS", "goodput": "GOODPUT", "state": "STATE", "run": "RUN",
}  # fmt: skip
_RIGHT = frozenset({"job", "time", "nodes", "step", "a_second", "restarts", "goodput"})
# What a narrow terminal lacks, first to last; the node list is only cut.
_LEAST = ("partition", "user", "a_second", "st", "nodelist", "name")
NODELIST_CHARACTERS = 18

Row = dict[str, Any]


def list_runs(runs: Path, names: Iterable[str], *, everything: bool) -> list[Row]:
    """One row per run, in the order of `names`. Without `everything`, runs that ended over a day ago are left
    out.

    A run directory that cannot be read has the state `unreadable`.
    """
    known = squeue_rows()
    rows = []
    for name in names:
        directory = RunDirectory(runs / name)
        if not everything and _ended_long_ago(directory):
            continue
        try:
            rows.append(run_row(read_status(directory), known))
        except RunDirectoryError as error:
            rows.append({**_empty(name), "state": "unreadable", "nodelist": str(error)})
    return rows


def _ended_long_ago(directory: RunDirectory) -> bool:
    """Reads the supervisor's outcome, not the journal."""
    path = directory.root / "outcome.json"
    try:
        ended = foreign.load(path, foreign.PLAN_BYTES_MAX)["state"] in ("succeeded", "failed", "cancelled")
        return ended and time.time() - foreign.status(path).st_mtime > ENDED_SHOWN_S
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_row(watcher: StatusWatcher, known: Mapping[str, list[str]]) -> Row:
    """The row of one run; `known` has squeue's columns by job id."""
    state, plan = watcher.state, watcher.plan
    jobs = slurm_jobs(watcher.directory, state)
    squeue = known.get(jobs[-1][0]) if jobs else None
    if state.ended:
        life = Liveness("ended")
    elif squeue is not None:
        life = judge(squeue[0], squeue[6], squeue[7])
    else:
        life = look(watcher.directory, state)
    word = observed_state(watcher.directory, life) if plan.observed else public_state(state, life)[0]
    account = watcher.account(life, time.time())
    goodput, at_most = (account.ratios(at_most=most)["runtime_goodput"] for most in (False, True))
    row = _empty(state.run or plan.run)
    ended_at = state.ended_at or (None if life.kind != "gone" else state.now or plan.submitted_at)
    row.update(
        job=jobs[-1][0] if jobs else str(life.pid or "") or None, name=state.name or plan.name,
        user=_owner(watcher.directory), st=CODES[word], state=word, step=shown_step(state),
        step_known=step_known(state),
        a_second=throughput(state.samples_s, state.tokens_s),
        nodes=len(state.nodes) or plan.nodes, nodelist=_nodelist(state.placement or tuple(state.nodes)),
        time=squeue_time((ended_at or time.time()) - (state.submitted_at or plan.submitted_at)),
        goodput=goodput, goodput_at_most=at_most, restarts=restarts(state), warnings=doubts(state),
        submitted_at=iso(state.submitted_at or plan.submitted_at), directory=str(watcher.directory.root),
    )  # fmt: skip
    if squeue is not None and not state.ended:
        row.update(
            zip(("job", "partition", "user", "st", "time"), squeue[:5], strict=True),
            nodelist=squeue[8],
            name=squeue[9],
        )
        row["nodes"] = int(squeue[5]) if squeue[5].isdigit() else row["nodes"]
    return row


def _empty(run: str) -> Row:
    return {**dict.fromkeys(COLUMNS), "name": run, "run": run, "step_known": True, "warnings": []}


def _owner(directory: RunDirectory) -> str:
    uid = foreign.status(directory.plan_file).st_uid
    return getpass.getuser() if uid == os.getuid() else foreign.user_name(uid)


def _nodelist(names: tuple[str, ...]) -> str:
    return ",".join(names[:4]) + (f",+{len(names) - 4}" if len(names) > 4 else "")


def squeue_rows() -> dict[str, list[str]]:
    """{job id: squeue's columns} of the user's jobs; empty if there is no Slurm or it does not answer."""
    try:
        told = run_command(["squeue", "--noheader", "--me", f"--format={_FORMAT}"], ANSWER_LIMIT_S)
    except ClusterUnavailableError:
        return {}
    rows = [line.strip().split("|", 9) for line in told.splitlines()]
    return {row[0]: row for row in rows if len(row) == 10}


def ps_blocks(rows: Sequence[Row], width: int | None = None) -> list[Block]:
    """The table, and the warnings of each run. Where it would be wider than `width`, it lacks the columns
    that say least."""
    keys, most = list(COLUMNS), 1000
    if not any(rates(row["a_second"] or {}) for row in rows):
        keys.remove("a_second")
    for less in ("", *_LEAST):
        if less == "nodelist":
            most = NODELIST_CHARACTERS
        elif less in keys:
            keys.remove(less)
        cells = [
            [one_line(_cell(key, row), most if key == "nodelist" else None) for key in keys] for row in rows
        ]
        right = frozenset(place for place, key in enumerate(keys) if key in _RIGHT)
        table = Table([COLUMNS[key] for key in keys], cells, right=right, wrap=False)
        if width is None or max(map(len, plain_table(table))) <= width:
            break
    told = [Line(f"{row['run']}: {text}", "bold yellow") for row in rows for text in row["warnings"]]
    return [table, *told]


def _cell(key: str, row: Row) -> str:
    value = row[key]
    if value is None:
        return "-"
    if key == "a_second":
        return (rates(value) or ["-"])[-1]
    if key == "goodput":
        most = row["goodput_at_most"]
        return percent(value) if percent(value) == percent(most) else f"{100 * value:.0f}-{100 * most:.0f} %"
    return str(value) if key != "step" or row["step_known"] else f"?+{value}"


def node_rows(
    runs: Path, exclusion_s: float, other: Callable[[int], object] = lambda version: None
) -> list[Row]:
    """One row per node that served a run below `runs`. The nodes that are most suspect come first. `other`:
    see `past_runs`."""
    now = time.time()
    return rows_of_nodes(past_runs(runs, other), now, exclusion_s, out_of_service(now), forgiven_nodes(runs))


def rows_of_nodes(
    earlier: Sequence[PastRun], now: float, exclusion_s: float,
    out: Mapping[str, tuple[float, str]], forgiven: Mapping[str, float],
) -> list[Row]:  # fmt: skip
    """The same for these runs. `out`: nodes out of service, for how many seconds and why; `forgiven`: what
    happened to a node before then no longer excludes it."""
    watched = [one for run in earlier for one in watched_in(run)]
    watched += more_exposure(earlier, comebacks(earlier, forgiven))
    fleet = prior().learned(*learned_before(watched, now)).rate
    records = history(
        earlier, now, exclusion_s, out_s={name: seconds for name, (seconds, _) in out.items()},
        forgiven=forgiven,
    )  # fmt: skip
    return [
        _row(record, out.get(record.name), fleet, now) for record in sorted(records.values(), key=worst_first)
    ]


def _row(record: NodeRecord, out: tuple[float, str] | None, fleet: float, now: float) -> Row:
    """The row of one node. `fleet`: failures per 1,000 node-days of all nodes."""
    last = record.departures[-1] if record.departures else None
    after_repair = AFTER_REPAIR if record.fresh(now) else 1.0
    rate = node_rate(fleet, record.failures, record.exposure_days) * after_repair
    return {
        "node": record.name, "runs": record.runs, "node_days": round(record.node_days, 3),
        "incidents": len(record.departures), "strikes": record.strikes,
        "last_cause": last.cause if last else None, "last_at": iso(last.at) if last else None,
        "last_evidence": last.evidence if last else None,
        "lemon_score": record.lemon_score,
        "expected_rate": round(rate, 3), "rate_times": round(rate / fleet, 3),
        "after_repair": record.fresh(now), "why_rate": record.why_frail(now),
        "signals": [
            {"name": s.name, "value": s.value, "limit": s.limit, "shows": s.shows, "evidence": s.evidence}
            for s in record.signals
        ],
        "excluded": record.excluded, "excluded_for_good": record.for_good,
        "excluded_until": iso(record.excluded_until), "why": record.why or None,
        "out_of_service_s": round(out[0], 1) if out else None, "slurm_reason": out[1] if out else None,
        "history": [{**asdict(departure), "at": iso(departure.at)} for departure in record.departures],
    }  # fmt: skip


def node_blocks(rows: list[Row], *, everything: bool) -> list[Block]:
    """Lay out the table. Without `everything` it has only nodes that something speaks against."""
    shown = [r for r in rows if everything or r["incidents"] or r["lemon_score"] or r["excluded"]]
    blocks: list[Block] = []
    if shown:
        headers = ("NODE", "RUNS", "INCIDENTS", "LAST", "STRIKES", "LEMON", "RATE", "EXCLUDED", "LAST CAUSE")
        table = [_cells(row) for row in shown]
        blocks.append(Table(headers, table, frozenset({1, 2, 4, 5, 6})))
    quiet = len(rows) - len(shown)
    if quiet:
        blocks.append(Line(f"{count(quiet, 'node')} without an incident", "dim"))
    return blocks


def _cells(row: Row) -> list[str]:
    signs = [s["evidence"] for s in row["signals"] if s["shows"]]
    cause = f"{row['last_cause']}: {row['last_evidence']}" if row["last_cause"] else "-"
    if signs:
        cause += f" ({'; '.join(signs)})"
    if row["after_repair"]:
        cause += f"; {row['why_rate']}"
    if row["out_of_service_s"] is not None:
        reason = row["slurm_reason"] or "no reason"
        cause += f"; out of service in Slurm for {duration(row['out_of_service_s'])}: {reason}"
    return [
        row["node"], str(row["runs"]), str(row["incidents"]), _when(row["last_at"]), str(row["strikes"]),
        f"{row['lemon_score']}/{len(row['signals'])}", _times(row["rate_times"]), _kept_out(row), cause,
    ]  # fmt: skip


def _when(at: str | None) -> str:
    return clock(datetime.fromisoformat(at).timestamp())[:16] if at else "-"


def _times(factor: float) -> str:
    return f"x {factor:,.0f}" if factor >= 10.0 else f"x {factor:.2g}"


def _kept_out(row: Row) -> str:
    if row["excluded_for_good"]:
        return until_text(None)
    until = row["excluded_until"]
    return until_text(datetime.fromisoformat(until).timestamp()) if until else "-"
