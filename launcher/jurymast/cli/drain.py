"""`jurymast drain`: take a node out of a run."""

from __future__ import annotations

from pathlib import Path

import click

from jurymast.cli.asking import ask_supervisor
from jurymast.cli.options import run_argument, runs_option, the_run


@click.command()
@run_argument
@click.argument("node")
@runs_option
def command(run: str, node: str, runs: Path | None) -> None:
    """Take NODE out of a run; a spare takes its place. Slurm's own view of the node stays as it is."""
    directory = the_run(run, runs)
    ask_supervisor(directory, "drain", node)
    click.echo(f"{node} is being taken out of {directory.root.name}")
