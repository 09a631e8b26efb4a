"""`jurymast restart`: stop all ranks and start them again from the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from jurymast.cli.options import run_argument, runs_option, the_run
from jurymast.cli.output import echo
from jurymast.report.asking import ask_supervisor


@click.command()
@run_argument
@runs_option
def command(run: str, runs: Path | None) -> None:
    """Restart a run's ranks in place, from the newest checkpoint; no budget is charged."""
    directory = the_run(run, runs)
    more = ask_supervisor(directory, "restart")
    echo(f"restart of {directory.root.name} requested{more}")
