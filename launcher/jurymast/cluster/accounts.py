"""Jobs as Slurm's accounting has them: each with all its attempts, also those before it was requeued."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jurymast.core.estimate import AccountedAttempt, without_overlap
from jurymast.core.state.texts import expanded
from jurymast.errors import ClusterUnavailableError, RunNotFoundError
from jurymast.jobs import UNIX_TIMES, run_command

LIMIT_S = 120.0
# What people write (names, command lines) may have any character but this one, and line breaks as well: a
# record ends with a field of Slurm's own, so its end is found by the number of fields.
_BETWEEN = "\x1f"
_FIELDS = (
    "JobID", "JobName", "User", "Account", "Partition", "State", "Submit", "Eligible", "Start", "End",
    "NNodes", "NodeList", "WorkDir", "SubmitLine", "ExitCode", "JobIDRaw", "DBIndex",
)  # fmt: skip
# Which only newer releases have.
_LATER_FIELDS = ("FailedNode", "StdOut")

Row = Mapping[str, str]


@dataclass(frozen=True)
class _Step:
    start: float
    end: float | None
    state: str
    code: str


@dataclass(frozen=True)
class AccountedJob:
    """A job, or a task of an array: `job` is its name in Slurm, `number` its own number. `state` is that of
    its newest attempt."""

    job: str
    number: str
    name: str
    user: str
    account: str
    partition: str
    state: str
    directory: str
    output: str  # as submitted, so perhaps with % fields; "" where Slurm does not say
    submit_line: str
    attempts: tuple[AccountedAttempt, ...]


def job(number: str, cluster: str = "") -> list[AccountedJob]:
    """The job with this id; of an array all tasks. Raises RunNotFoundError, ClusterUnavailableError."""
    found = _ask([f"--jobs={number}", *([f"--clusters={cluster}"] if cluster else [])])
    if not found:
        raise RunNotFoundError(
            f"Slurm's accounting has no job {number}",
            hint="a site may hide other users' jobs (PrivateData), and remove those of long ago",
        )
    return found


def jobs_of(user: str, since_s: float) -> list[AccountedJob]:
    """The user's jobs of the last seconds. Raises ClusterUnavailableError."""
    return _ask([f"--user={user}", f"--starttime=now-{round(since_s)}seconds"])


def _ask(which: list[str]) -> list[AccountedJob]:
    command = ["sacct", "--noheader", "--parsable2", f"--delimiter={_BETWEEN}", "--duplicates", *which]
    try:
        there = run_command(["sacct", "--helpformat"]).split()
        fields = (*(name for name in _LATER_FIELDS if name in there), *_FIELDS)
        told = run_command([*command, f"--format={','.join(fields)}"], LIMIT_S, variables=UNIX_TIMES)
    except ClusterUnavailableError as error:
        if "accounting storage is disabled" in str(error).lower():
            raise ClusterUnavailableError(
                "accounting is disabled on this cluster, so nothing is known of jobs that have ended",
                hint="it needs slurmdbd (AccountingStorageType); runs of jurymast have their own report",
            ) from error
        raise
    return jobs_in(told, fields)


def jobs_in(told: str, fields: Sequence[str] = _FIELDS) -> list[AccountedJob]:
    """The jobs in sacct's lines, with times in seconds since the epoch."""
    rows: dict[str, list[Row]] = {}
    steps: dict[str, list[_Step]] = {}  # by the number of their attempt in the database
    scripts: dict[str, str] = {}  # how the batch script of that attempt ended
    for row in _records(told, fields):
        number, dot, step = row["JobIDRaw"].partition(".")
        if not dot:
            rows.setdefault(number, []).append(row)
        elif step == "batch":
            scripts[row["DBIndex"]] = row["State"]
        elif step.isdigit() and (start := _time(row["Start"])) is not None:
            one = _Step(start, _time(row["End"]), row["State"].partition(" ")[0], row["ExitCode"])
            steps.setdefault(row["DBIndex"], []).append(one)
    return [_job(number, _of_one(found), steps, scripts) for number, found in rows.items()]


def _records(told: str, fields: Sequence[str]) -> Iterator[Row]:
    record = ""
    for line in told.split("\n"):
        record = f"{record}\n{line}" if record else line
        if record.count(_BETWEEN) == len(fields) - 1:
            yield dict(zip(fields, record.split(_BETWEEN), strict=True))
            record = ""


def _of_one(rows: list[Row]) -> list[Row]:
    """The rows of the newest job with this id: Slurm's ids begin again some day."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda one: _time(one["Submit"]) or 0.0):
        if kept and any(row[name] != kept[-1][name] for name in ("User", "JobName", "SubmitLine")):
            kept = []
        kept.append(row)
    return kept


def _job(
    number: str, rows: list[Row], steps: Mapping[str, list[_Step]], scripts: Mapping[str, str]
) -> AccountedJob:
    last = rows[-1]
    attempts = without_overlap(
        [_attempt(row, steps.get(row["DBIndex"], []), scripts.get(row["DBIndex"], "")) for row in rows]
    )
    return AccountedJob(
        last["JobID"], number, last["JobName"], last["User"], last["Account"], last["Partition"],
        attempts[-1].state, last["WorkDir"], last.get("StdOut", ""), last["SubmitLine"], tuple(attempts),
    )  # fmt: skip


def _attempt(row: Row, steps: Sequence[_Step], script: str) -> AccountedAttempt:
    start, end = _time(row["Start"]), _time(row["End"])
    state = (row["State"].split() or ["UNKNOWN"])[0]  # CANCELLED by 1000
    nodes = expanded(row["NodeList"]) if start is not None else []
    if len(nodes) != _number(row["NNodes"]):  # such as "None assigned"
        nodes = [f"node {n + 1}" for n in range(_number(row["NNodes"]))]
    failed = row.get("FailedNode", "")
    return AccountedAttempt(
        state, tuple(nodes), _time(row["Eligible"]), start, end, tuple((one.start, one.end) for one in steps),
        row["ExitCode"], failed if failed in nodes else "", _failed_step(state, steps, script),
    )  # fmt: skip


def _failed_step(state: str, steps: Sequence[_Step], script: str) -> str:
    """The exit code of the newest step if that failed. A script that requeues its own job after that ends by
    itself; if somebody else does, Slurm ends it. srun cancels a step of which a task failed."""
    if not steps:
        return ""
    newest = max(steps, key=lambda one: one.start)
    itself = state == "REQUEUED" and script in ("COMPLETED", "FAILED") and newest.state != "COMPLETED"
    return newest.code if itself or newest.state == "FAILED" else ""


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() and int(text) > 0 else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 1


_OUTPUT = re.compile(r"^ +StdOut=(.+)$", re.MULTILINE)


def outputs_now(number: str) -> list[str]:
    """The job's output file, or one for each task of an array, as long as slurmctld knows the job."""
    try:
        return _OUTPUT.findall(run_command(["scontrol", "show", "job", number]))
    except ClusterUnavailableError:
        return []
