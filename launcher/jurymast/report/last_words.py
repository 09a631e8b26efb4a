"""`python -m jurymast.report.last_words RUN_DIRECTORY [JOB]`: sums a run up where people look first after it:
at the end of the job's log, and in the comment of the Slurm job unless its owner gave it one. It also leaves
a summary for `jurymast fleet`."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress

from jurymast.errors import ClusterUnavailableError, JurymastError
from jurymast.jobs import run_command
from jurymast.processes import log_as
from jurymast.report.advice import sentences
from jurymast.report.fleet import leave_summary
from jurymast.report.follow import end_lines
from jurymast.report.goodput import Report, report_view
from jurymast.report.liveness import Liveness
from jurymast.report.status import StatusWatcher, read_status
from jurymast.report.text import between, count, one_line
from jurymast.rundir import RunDirectory

log = logging.getLogger("jurymast.last_words")

SCONTROL_LIMIT_S = 3.0
NO_COMMENT = ("", "(null)")


def summary(watcher: StatusWatcher, report: Report) -> list[str]:
    """How the run ended, what came of its time, and how to see more."""
    life = Liveness("ended", watcher.state.phase.value)
    ratios, at_most = report["ratios"], report["ratios_at_most"]
    told = ", ".join(
        f"{name.replace('_', ' ')} {between(ratios[name], at_most[name])}"
        for name in ("runtime_goodput", "allocation_goodput")
    )
    advice = [f"to change: {text}" for text in sentences(report["advice"]) if report["advice"]["changes"]]
    return [
        *end_lines(watcher.state, life), told, *advice,
        f"jurymast report {report['run']} shows where the time went",
    ]  # fmt: skip


def comment(report: Report) -> str:
    goodput = between(report["ratios"]["runtime_goodput"], report["ratios_at_most"]["runtime_goodput"])
    incidents = count(len(report["incidents"]), "incident")
    return f"jurymast: {report['state']}, goodput {goodput}, {incidents}, run {report['run']}"


def annotate(job: str, text: str) -> None:
    """Make it the Slurm job's comment, unless it has one. What Slurm refuses is left."""
    try:
        known = run_command(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], SCONTROL_LIMIT_S)
        if known.strip() in NO_COMMENT:
            run_command(["scontrol", "update", f"JobId={job}", f"Comment={text}"], SCONTROL_LIMIT_S)
    except ClusterUnavailableError:
        pass


def main(run_directory: str, job: str = "") -> int:
    log_as("jurymast")
    try:
        watcher = read_status(RunDirectory(run_directory))
        report = report_view(watcher, Liveness("ended", watcher.state.phase.value), time.time())
    except JurymastError as error:
        log.error("%s", error)
        return error.exit_code
    for line in summary(watcher, report):
        log.info("%s", one_line(line))
    with suppress(OSError, JurymastError):  # then a fleet reads the journal
        leave_summary(watcher.directory)
    if job:
        annotate(job, comment(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
