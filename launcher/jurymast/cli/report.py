"""`jurymast report`: where a run's time went."""

from __future__ import annotations

import sys
import time
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
from jurymast.errors import UsageError

if TYPE_CHECKING:
    from jurymast.cluster.accounts import AccountedJob


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
@file_option("--log", help="With --slurm: where the job's step lines are.  [its standard output]")
@json_option
@runs_option
def command(run: str | None, compare: str | None, as_json: bool, runs: Path | None, **options: Any) -> None:
    """Show where a run's node-time went, and what its failures cost."""
    from jurymast.report.goodput import compare as compared
    from jurymast.report.goodput import compare_page, compare_table, page, report_blocks, report_view
    from jurymast.report.liveness import look
    from jurymast.report.status import read_status

    html: Path | None = options["html"]
    _check(run, compare, options)
    if options["user"] is not None:
        _show_jobs(options["user"], options["since"] or WEEK_S, as_json)
        return
    assert run is not None
    if options["slurm"]:
        from jurymast.report.estimate import estimated

        job = _one_job(run, as_json, alone=html is not None or compare is not None)
        if job is None:
            return
        one = estimated(job, options["log"])
        report, account, state = one.report, one.account, one.state
    else:
        watcher = read_status(the_run(run, runs, only_look=True))
        life, now = look(watcher.directory, watcher.state), time.time()
        report, account, state = report_view(watcher, life, now), watcher.account(life, now), watcher.state
    if compare is not None:
        both = compared(report, report_view(read_status(the_run(compare, runs, only_look=True))))
        if html is not None:
            write_page(compare_page(both), html)
        if as_json:
            show_json(both)
        elif html is None:
            show([compare_table(both)])
        return
    if html is not None:
        write_page(page(report, account, state), html)
    if as_json:
        show_json(report)
    elif html is None:
        show(report_blocks(report, bar="█" if sys.stdout.isatty() else "#"))


WEEK_S = 7 * 86_400.0


def _check(run: str | None, compare: str | None, options: dict[str, Any]) -> None:
    """Raise UsageError for options that contradict each other."""
    given = [name for name in ("user", "since", "log") if options[name] is not None]
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


def _one_job(number: str, as_json: bool, *, alone: bool) -> AccountedJob | None:
    """The job; None if it is an array, whose tasks are shown then. Raises UsageError for one if it must be
    `alone`."""
    from jurymast.cluster import accounts
    from jurymast.report.estimate import estimated, jobs_blocks, jobs_view

    found = accounts.job(number)
    array = found[0].job.startswith(f"{number}_")  # also while Slurm's accounts have one task of it only
    if len(found) == 1 and not array:
        return found[0]
    if alone:
        raise UsageError(
            f"{number} is an array, and --html and --compare take one job",
            hint=f"name a task, like {found[0].job}",
        )
    view = jobs_view(f"of {number}", [estimated(job) for job in found])
    show_json(view) if as_json else show(jobs_blocks(view))
    return None


def _show_jobs(user: str, since_s: float, as_json: bool) -> None:
    from jurymast.cluster import accounts
    from jurymast.report.estimate import estimated, jobs_blocks, jobs_view
    from jurymast.report.text import duration

    found = [estimated(job) for job in accounts.jobs_of(user, since_s)]
    view = jobs_view(f"of {user} in the last {duration(since_s)}", found)
    show_json(view) if as_json else show(jobs_blocks(view))
