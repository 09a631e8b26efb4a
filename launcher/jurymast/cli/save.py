"""`jurymast save`: save a checkpoint now; the run goes on."""

from __future__ import annotations

from pathlib import Path

import click

from jurymast.cli.options import json_option, run_argument, runs_option, show_json, the_run
from jurymast.cli.output import echo
from jurymast.errors import CheckpointError
from jurymast.report.asking import ask_supervisor


@click.command()
@run_argument
@click.option(
    "--limit", type=click.IntRange(1), default=120, show_default=True, metavar="SECONDS",
    help="Seconds to wait for the save.",
)  # fmt: skip
@json_option
@runs_option
def command(run: str, limit: int, as_json: bool, runs: Path | None) -> None:
    """Save a checkpoint now: all ranks save at their next common step. The command waits until all have
    that step in memory; replicas and copies on storage follow."""
    from jurymast.core.state.images import MEMORY
    from jurymast.report.status import read_status

    directory = the_run(run, runs)
    watcher = read_status(directory)
    done = watcher.state.step
    ask_supervisor(directory, "save")
    saved = (e for e in watcher.new_for(limit) if e.get("event") == "Saved" and e["ok"] and e["step"] >= done)
    entry = next(saved, None)
    if entry is None:
        raise CheckpointError(
            f"{directory.root.name} saved no step from {done} on within {limit} s",
            hint=f"see jurymast events {directory.root}",
        )
    step, tier = entry["step"], entry["tier"]
    if as_json:
        show_json({"run": directory.root.name, "step": step, "tier": tier})
    else:
        follow = "; replicas and copies on storage follow" if tier == MEMORY else ""
        echo(f"step {step} of {directory.root.name} is saved in the {tier} tier{follow}")
