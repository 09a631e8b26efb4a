"""All runs of a runs directory, as rows and as a table, with squeue's columns for runs that Slurm knows."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.allocation import run_command
from jurymast.errors import ClusterUnavailableError, RunDirectoryError
from jurymast.report.liveness import ANSWER_LIMIT_S, Liveness, judge, look, slurm_jobs
from jurymast.report.status import StatusWatcher, public_state, read_status, shown_step
from jurymast.report.text import Block, Table, iso, percent, squeue_time
from jurymast.rundir import RunDirectory

# squeue's codes for our states.
CODES = {
    "queued": "PD", "requeued": "PD", "starting": "R", "running": "R", "recovering": "R", "succeeded": "CD",
    "failed": "F", "cancelled": "CA",
}  # fmt: skip
ENDED_SHOWN_S = 86_400.0
_FORMAT = "%i|%P|%j|%u|%t|%M|%D|%T|%r|%R"
# The columns: squeue's first, then the run's own.
COLUMNS = {
    "job": "JOBID", "partition": "PARTITION", "name": "NAME", "user": "USER", "st": "ST", "time": "TIME",
    "nodes": "NODES", "nodelist": "NODELIST(REASON)", "step": "STEP", "restarts": "RESTARTS",
    "goodput": "GOODPUT", "state": "STATE", "run": "RUN",
}  # fmt: skip
_RIGHT = frozenset({0, 5, 6, 8, 9, 10})

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
        ended = foreign.load(path)["state"] in ("succeeded", "failed", "cancelled")
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
        life = judge(squeue[0], squeue[7], squeue[8])
    else:
        life = look(watcher.directory, state)
    word, _ = public_state(state, life)
    goodput = watcher.account(life, time.time()).ratios()["runtime_goodput"]
    row = _empty(state.run or plan.run)
    ended_at = state.ended_at or (None if life.kind != "gone" else state.now or plan.submitted_at)
    row.update(
        job=jobs[-1][0] if jobs else str(life.pid or "") or None, name=state.name or plan.name,
        user=_owner(watcher.directory), st=CODES[word], state=word, step=shown_step(state),
        nodes=len(state.nodes) or plan.nodes, nodelist=_nodelist(state.placement or tuple(state.nodes)),
        time=squeue_time((ended_at or time.time()) - (state.submitted_at or plan.submitted_at)),
        goodput=None if goodput is None else round(goodput, 4), restarts=max(0, state.attempt - 1),
        submitted_at=iso(state.submitted_at or plan.submitted_at), directory=str(watcher.directory.root),
    )  # fmt: skip
    if squeue is not None and not state.ended:
        row.update(
            zip(("job", "partition", "name", "user", "st", "time"), squeue[:6], strict=True),
            nodelist=squeue[9],
        )
        row["nodes"] = int(squeue[6]) if squeue[6].isdigit() else row["nodes"]
    return row


def _empty(run: str) -> Row:
    return {**dict.fromkeys(COLUMNS), "name": run, "run": run}


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


def ps_blocks(rows: Sequence[Row]) -> list[Block]:
    table = [[_cell(key, row[key]) for key in COLUMNS] for row in rows]
    return [Table(list(COLUMNS.values()), table, right=_RIGHT, wrap=False)]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return percent(value) if key == "goodput" else str(value)
