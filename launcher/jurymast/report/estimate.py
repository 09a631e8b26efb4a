"""The goodput report of a job that jurymast did not launch: an estimate from Slurm's accounting and the job's
log, in the form of a run's report. Whatever shows it says that it is one."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jurymast
from jurymast import foreign
from jurymast.cluster.accounts import AccountedJob, outputs_now
from jurymast.cluster.sbatch import find_script, merged, read_script, split_command_line
from jurymast.core.estimate import Estimate, estimate
from jurymast.core.goodput import Account, ordered
from jurymast.core.judges.step_lines import StepLog, read_steps
from jurymast.core.state.failure_rate import prior
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.errors import JurymastError
from jurymast.report.advice import NONE_FORETOLD
from jurymast.report.goodput import (
    Report,
    Reported,
    account_json,
    charges,
    incidents_json,
    mtbf_json,
    node_failures,
)
from jurymast.report.instead import instead_view
from jurymast.report.text import (
    Block,
    Line,
    Table,
    between,
    count,
    iso,
    node_time,
    one_line,
    percent,
    throughput,
)
from jurymast.script.output import NO_ARRAY, expanded

LINE_BYTES = 1 << 16
NAME_CHARACTERS = 32
SENTENCE = (
    "All figures are an estimate from Slurm's accounting and the job's log: time that neither explains is "
    "unknown, and may have counted, so the ratios are ranges."
)
WHY_NO_ADVICE = "it needs the journal of a run; submit the job by jurymast, and its report has it"


def estimated(
    job: AccountedJob, log: Path | None = None, now: float | None = None, plan: RunPlan | None = None
) -> Reported:
    """Estimate a job's goodput. `log`: where its step lines are, if not in its standard output. `plan`: by
    which jurymast observed it."""
    now = time.time() if now is None else now
    path = log or output_of(job)
    steps, written_at, trouble = _read(path)
    found = estimate(job.attempts, steps, written_at, now)
    report = _report(job, found, path, steps, trouble)
    if plan is not None:
        report["instead"] = instead_view(found, plan)
    return Reported(
        report, found.account, RunState(Settings(), incidents=found.incidents, phase=Phase.SUCCEEDED)
    )


def output_of(job: AccountedJob) -> Path | None:
    """The job's standard output, as Slurm still knows it, or as its submission names it; None if that cannot
    be known."""
    for told in outputs_now(job.number):
        return Path(told)
    directory = Path(job.directory or "/")
    array, _, task = job.job.partition("_")
    try:
        line = split_command_line(shlex.split(job.submit_line)[1:], {})
        script = find_script(line.command, directory)
        told = merged(read_script(script, {}) if script else None, {}, line).last("output") or ""
    except (JurymastError, ValueError, OSError):  # another program submitted it, or its script is gone
        told = ""
    pattern = job.output or told or ("slurm-%A_%a.out" if task else "slurm-%j.out")
    names = {
        "SLURM_JOB_ID": job.number, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task or NO_ARRAY,
        "SLURM_JOB_NAME": job.name, "USER": job.user,
    }  # fmt: skip
    first = job.attempts[-1].nodes[0] if job.attempts[-1].nodes else ""
    return directory / expanded(pattern, names, 0, host=first)


def _read(path: Path | None) -> tuple[StepLog, float | None, str]:
    """The step lines of a log, when it was last written to, and what is wrong with it."""
    if path is None:
        return StepLog(), None, "where its log is cannot be known"
    try:
        written_at = foreign.status(path).st_mtime
        return read_steps(_lines(path)), written_at, ""
    except OSError as error:
        return StepLog(), None, f"its log {path} cannot be read ({error.strerror or error})"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a log; bars write theirs over one another."""
    with foreign.reading(path) as file:
        while line := file.readline(LINE_BYTES):
            yield from line.decode(errors="replace").split("\r")


def _report(job: AccountedJob, found: Estimate, path: Path | None, log: StepLog, trouble: str) -> Report:
    account, incidents = found.account, found.incidents
    nodes = account.asked_nodes
    used = count(found.lines_used, "step line")
    attempts = count(len(job.attempts), "attempt")
    basis = f"Slurm's accounting ({attempts})" + (f" and {path} ({used})" if not trouble else "")
    first, last = job.attempts[0], job.attempts[-1]
    return {
        "estimate": {
            "basis": basis, "sentence": SENTENCE, "log": str(path) if not trouble else None,
            "step_lines": found.lines_used, "attempts": len(job.attempts), "slurm_state": job.state,
        },
        "run": job.job, "name": job.name, "state": job.state.lower(), "end_reason": "",
        "provisional": not account.final, "until": iso(account.end / 1e6),
        "warnings": list(_warnings(job, found, log, trouble)),
        **account_json(account),
        "steps": {
            "done": found.best_step, "seconds": account.placed_us("step") / 1e6,
            "in_all_attempts": found.steps.done, "again": found.steps.again,
            "again_at_most": found.steps.again + found.steps.maybe_again,
        },
        "a_second": throughput(0.0, 0.0), "tiers": {}, "cost": None, "energy": None,
        "in_process": None,
        "nodes": {"active": nodes, "spares": 0, "seen": len(account.stays), "fewer": {}},
        "incidents": incidents_json(account, incidents),
        "mtbf": mtbf_json(
            node_failures(account, incidents), charges(incidents), prior().mtbf_s(max(1, nodes))
        ),
        "cadence": None,
        "advice": {"changes": [], **dict.fromkeys(NONE_FORETOLD), "why_none": WHY_NO_ADVICE},
        "provenance": {
            "script": job.submit_line, "arguments": [], "user": job.user, "account": job.account,
            "partition": job.partition, "slurm_jobs": [job.number], "submitted_at": iso(first.eligible),
            "ended_at": iso(last.end), "log": str(path) if path else None,
            "report_version": jurymast.__version__, "generated_at": iso(time.time()),
        },
    }  # fmt: skip


def _warnings(job: AccountedJob, found: Estimate, log: StepLog, trouble: str) -> Iterator[str]:
    yield (
        "this is an estimate: jurymast did not launch this job. Time that Slurm's accounting and the log do "
        "not explain is unknown, and the ratios are ranges"
    )
    if trouble:
        yield f"{trouble}, so only the time in which the job's steps ran bounds the goodput; name it by --log"
    elif not log.lines:
        yield (
            "the log has no lines that tell of steps, so only the time in which the job's steps ran bounds "
            "the goodput; --log names another file"
        )
    elif not found.lines_used:
        yield "the step lines of the log have no times, or none within the job's own, so they tell nothing"
    elif not any(line.at is not None for line in log.lines):
        yield "the step lines have no times: the newest bar is taken to end when the log was last written to"
    if log.kind == "epoch" and found.lines_used:
        yield "the log tells epochs, not steps: a thousandth of an epoch counts as a step"
    if found.lines_used and len(job.attempts) > 1 and found.incidents and not found.incidents[0].rework_known:
        yield (
            "of attempts without step lines little is known: a requeue empties the log, unless "
            "--open-mode=append is given"
        )
    if found.went_back:
        yield f"the log goes back to earlier steps {count(found.went_back, 'time')} within an attempt"


# ---- many jobs


def jobs_view(of: str, found: Sequence[Reported]) -> dict[str, Any]:
    """The jobs' estimates, and their sum. Ratios are weighted with the nodes."""
    totals: Counter[str] = Counter()
    allocated = 0.0
    for one in found:
        totals.update(one.report["categories"])
        allocated += one.report["allocated_node_seconds"]
    counted = [sum(_counted(one.account, at_most) for one in found) for at_most in (False, True)]
    low, high = (each / allocated if allocated else None for each in counted)
    return {
        "estimate": {"basis": "Slurm's accounting and the jobs' logs", "sentence": SENTENCE},
        "of": of, "jobs": [one.report for one in found],
        "allocation_goodput": low, "allocation_goodput_at_most": high,
        "categories": {name: totals[name] for name in ordered(list(totals))},
        "allocated_node_seconds": allocated, "total_node_seconds": sum(totals.values()),
    }  # fmt: skip


def _counted(account: Account, at_most: bool) -> float:
    names = ("step", *account.doubtful) if at_most else ("step",)
    return sum(account.totals[name] for name in names) / 1e6


def jobs_blocks(view: Mapping[str, Any]) -> list[Block]:
    rows = []
    for job in view["jobs"]:
        told = [
            between(job["ratios"][name], job["ratios_at_most"][name])
            for name in ("allocation_goodput", "ettr")
        ]
        rows.append(
            [
                job["run"], one_line(job["name"], NAME_CHARACTERS), job["state"], str(job["nodes"]["active"]),
                node_time(job["allocated_node_seconds"]), *told, str(job["estimate"]["attempts"]),
                str(job["estimate"]["step_lines"]),
            ]
        )  # fmt: skip
    headers = ("JOB", "NAME", "STATE", "NODES", "NODE-TIME", "GOODPUT", "ETTR", "ATTEMPTS", "STEP LINES")
    spent = sorted(view["categories"].items(), key=lambda one: -one[1])
    total = view["total_node_seconds"] or 1.0
    most = ", ".join(f"{name.replace('_', ' ')} {percent(seconds / total)}" for name, seconds in spent[:5])
    all_of = between(view["allocation_goodput"], view["allocation_goodput_at_most"])
    return [
        Line(f"ESTIMATE of {count(len(rows), 'Slurm job')} {view['of']}", "bold"),
        Line(view["estimate"]["sentence"], "bold yellow"),
        Line(""),
        Table(headers, rows, right=frozenset(range(3, 9)), wrap=False),
        Line(""),
        Line(f"all jobs: goodput {all_of} of {node_time(view['allocated_node_seconds'])} allocated", "bold"),
        Line(f"spent on: {most}"),
    ]
