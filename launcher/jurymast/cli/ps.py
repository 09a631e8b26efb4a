"""`jurymast ps`: my runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from jurymast.cli.options import json_option, runs_option, runs_place, show, show_json
from jurymast.cli.output import echo
from jurymast.report.which_run import run_ids


@click.command()
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Also list runs that ended more than a day ago."
)
@json_option
@runs_option
def command(everything: bool, as_json: bool, runs: Path | None) -> None:
    """List my runs: squeue's columns first, then step, restarts and goodput."""
    from jurymast.report.runs import list_runs, ps_blocks

    place = runs_place(runs)
    rows = list_runs(place, run_ids(place), everything=everything)
    if as_json:
        show_json(rows)
        return
    if not rows:
        echo(f"no runs in {place}", err=True)
    show(ps_blocks(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
