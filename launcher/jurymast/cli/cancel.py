"""`jurymast cancel`: end a run, even if no supervisor is left to do it."""

from __future__ import annotations

from pathlib import Path

import click

from jurymast.cli.options import run_argument, runs_option, the_run
from jurymast.cli.output import echo
from jurymast.report.asking import user


@click.command()
@run_argument
@runs_option
def command(run: str, runs: Path | None) -> None:
    """End a run for good: its ranks are stopped, its newest checkpoint is written to storage, and its job
    leaves Slurm. Called again, it no longer waits for the checkpoint."""
    from jurymast.report.cancelling import cancel

    echo(cancel(the_run(run, runs), by=user()))
