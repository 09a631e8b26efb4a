"""`jurymast report`: where a run's time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast.cli.options import (
    complete_run,
    examples,
    file_option,
    json_option,
    read_by,
    runs_option,
    show,
    show_json,
    the_run,
    write_page,
)
from jurymast.core.state.texts import age_s
from jurymast.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from jurymast.core.state.settings import RunPlan
    from jurymast.report.goodput import Reported


@click.command(
    epilog=examples(
        "jurymast report 4711 --html report.html",
        "jurymast report 4711 --compare 4630",
        "jurymast report 4711 --compare 4630 --html both.html",
        "jurymast report --slurm 4711",
        "jurymast report --slurm --user alice --since 28d",
    )
)
@click.argument("run", metavar="RUN", required=False, shell_complete=complete_run)
@file_option("--html", help="Write the report to FILE as one HTML page.")
@click.option("--compare", metavar="RUN2", help="Compare with another run.")
@click.option(
    "--slurm", is_flag=True,
    help="Estimate the goodput of a job that jurymast did not launch, by Slurm's accounting and its log; RUN "
    "is its Slurm job id.",
)  # fmt: skip
@click.option("--user", metavar="USER", help="With --slurm: estimate all jobs of this user.")
@click.option(
    "--since", callback=read_by(age_s), metavar="TIME", help="With --user: jobs since then, like 28d.  [7d]"
)
@file_option(
    "--log", help="With --slurm, or of an observed job: where its step lines are.  [its standard output]"
)
@json_option
@runs_option
def command(run: str | None, compare: str | None, as_json: bool, runs: Path | None, **options: Any) -> None:
    """Show where a run's node-time went, and what its failures cost."""
    from jurymast.report.goodput import compare as compared
    from jurymast.report.goodput import compare_page, compare_table, page, report_blocks

    html: Path | None = options["html"]
    _check(run, compare, options)
    if options["user"] is not None:
        _show_jobs(options["user"], options["since"] or WEEK_S, as_json)
        return
    assert run is not None
    alone = html is not None or compare is not None
    one = (
        _of_job(run, "", options["log"], as_json, alone=alone)
        if options["slurm"]
        else _of_run(run, runs, options["log"], as_json, alone=alone)
    )
    if one is None:
        return
    report = one.report
    if compare is not None:
        other = _of_run(compare, runs, None, as_json, alone=True)
        assert other is not None
        both = compared(report, other.report)
        if html is not None:
            write_page(compare_page(both), html)
        if as_json:
            show_json(both)
        elif html is None:
            show([compare_table(both)])
        return
    if html is not None:
        write_page(page(report, one.account, one.state, one.records), html)
    if as_json:
        show_json(report)
    elif html is None:
        show(report_blocks(report, bar="█" if sys.stdout.isatty() else "#"))


WEEK_S = 7 * 86_400.0


def _check(run: str | None, compare: str | None, options: dict[str, Any]) -> None:
    """Raise UsageError for options that contradict each other."""
    given = [name for name in ("user", "since") if options[name] is not None]
    if given and not options["slurm"]:
        raise UsageError(f"--{given[0]} works only with --slurm")
    if options["user"] is None and options["since"] is not None:
        raise UsageError("--since works only with --user")
    if options["user"] is not None:
        other = [name for name in ("html", "log") if options[name] is not None]
        if run is not None or compare is not None or other:
            raise UsageError("--user estimates all jobs of a user: give only --since and --json with it")
    elif run is None:
        raise (
            UsageError("missing argument 'RUN'", hint="jurymast report --help")
            if not options["slurm"]
            else UsageError("--slurm needs a Slurm job id, or --user", hint="jurymast report --slurm 4711")
        )
    elif options["slurm"] and not run[:1].isdigit():
        raise UsageError(f"{run} is not a Slurm job id", hint="without --slurm, RUN is a run of jurymast")


def _of_run(run: str, runs: Path | None, log: Path | None, as_json: bool, *, alone: bool) -> Reported | None:
    """The report of a run, or of the job that it observes."""
    from jurymast.report.goodput import reported
    from jurymast.report.liveness import slurm_jobs
    from jurymast.report.status import read_status

    watcher = read_status(the_run(run, runs, only_look=True))
    if not watcher.plan.observed:
        if log is not None:
            raise UsageError("--log works only with --slurm, and for a job that is observed")
        return reported(watcher)
    jobs = slurm_jobs(watcher.directory, watcher.state)
    if not jobs:
        raise RunNotFoundError(f"no job is recorded for {watcher.plan.run}", hint="squeue --me may show it")
    return _of_job(*jobs[-1], log, as_json, alone=alone, plan=watcher.plan)


def _of_job(
    number: str, cluster: str, log: Path | None, as_json: bool, *, alone: bool, plan: RunPlan | None = None
) -> Reported | None:
    """The estimate of the job; None if it is an array, whose tasks are shown then. Raises UsageError for one
    if it must be `alone`. `plan`: by which it is observed."""
    from jurymast.cluster import accounts
    from jurymast.report.estimate import estimated, jobs_blocks, jobs_view

    found = accounts.job(number, cluster)
    array = found[0].job.startswith(f"{number}_")  # also while Slurm's accounts have one task of it only
    if len(found) == 1 and not array:
        return estimated(found[0], log, plan=plan)
    if alone:
        raise UsageError(
            f"{number} is an array, and --html and --compare take one job",
            hint=f"name a task, like {found[0].job}",
        )
    view = jobs_view(f"of {number}", [estimated(job, plan=plan) for job in found])
    show_json(view) if as_json else show(jobs_blocks(view))
    return None


def _show_jobs(user: str, since_s: float, as_json: bool) -> None:
    from jurymast.cluster import accounts
    from jurymast.report.estimate import estimated, jobs_blocks, jobs_view
    from jurymast.report.text import duration

    found = [estimated(job) for job in accounts.jobs_of(user, since_s)]
    view = jobs_view(f"of {user} in the last {duration(since_s)}", found)
    show_json(view) if as_json else show(jobs_blocks(view))
