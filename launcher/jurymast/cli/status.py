"""`jurymast status`: nodes with role and reason, step, checkpoints, incidents."""

from __future__ import annotations

import time
from pathlib import Path

import click

from jurymast.cli import patience
from jurymast.cli.options import (
    examples,
    json_option,
    run_argument,
    runs_option,
    show_json,
    shown,
    the_run,
)
from jurymast.cli.output import echo_coloured

WATCH_EVERY_S = 1.0


@click.command(epilog=examples("jurymast status 4711", "jurymast status 4711 --watch"))
@run_argument
@click.option("-w", "--watch", is_flag=True, help="Refresh every second, until the run ends.")
@click.option("-a", "--all", "everything", is_flag=True, help="List every node, incident and note.")
@json_option
@runs_option
def command(run: str, watch: bool, everything: bool, as_json: bool, runs: Path | None) -> None:
    """Show how a run is doing."""
    from jurymast.report.observed import ENDED, observed_blocks, observed_view
    from jurymast.report.status import read_status, status_blocks

    watcher = read_status(the_run(run, runs, only_look=True))
    observed = watcher.plan.observed
    if watch:
        patience.follow_on()
    while True:
        view = observed_view(watcher) if observed else watcher.view()
        if as_json:
            show_json(view)
        else:
            now = time.time()
            blocks = (
                observed_blocks(view) if observed else status_blocks(view, now=now, everything=everything)
            )
            text = shown(blocks)  # before the screen is cleared
            if watch:
                click.clear()
            echo_coloured(text)
        if not watch or view["exit_code"] is not None or view["state"] == ENDED:
            return
        time.sleep(WATCH_EVERY_S)
        watcher.poll()
