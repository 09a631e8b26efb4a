"""`jurymast report`: where a run's time went."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from jurymast.cli.options import (
    examples,
    file_option,
    json_option,
    run_argument,
    runs_option,
    show,
    show_json,
    the_run,
    write_page,
)
from jurymast.errors import UsageError


@click.command(
    epilog=examples("jurymast report 4711 --html report.html", "jurymast report 4711 --compare 4630")
)
@run_argument
@file_option("--html", help="Write the report to FILE as one HTML page.")
@click.option("--compare", metavar="RUN2", help="Compare with another run.")
@json_option
@runs_option
def command(run: str, html: Path | None, compare: str | None, as_json: bool, runs: Path | None) -> None:
    """Show where a run's node-time went, and what its failures cost."""
    from jurymast.report.goodput import compare as compared
    from jurymast.report.goodput import compare_blocks, report_blocks, report_view
    from jurymast.report.liveness import look
    from jurymast.report.status import read_status

    watcher = read_status(the_run(run, runs, only_look=True))
    if compare is not None:
        if html is not None:
            raise UsageError("--html and --compare exclude each other")
        other = read_status(the_run(compare, runs, only_look=True))
        both = compared(report_view(watcher), report_view(other))
        show_json(both) if as_json else show(compare_blocks(both))
        return
    life, now = look(watcher.directory, watcher.state), time.time()
    report = report_view(watcher, life, now)
    if html is not None:
        from jurymast.report.goodput import page

        write_page(page(report, watcher.account(life, now), watcher.state), html)
    if as_json:
        show_json(report)
    elif html is None:
        show(report_blocks(report, bar="█" if sys.stdout.isatty() else "#"))
