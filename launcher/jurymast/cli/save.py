"""`jurymast save`: save a checkpoint now; the run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jurymast.cli.options import ask_supervisor, json_option, run_argument, runs_option, show_json, the_run
from jurymast.errors import CheckpointError

if TYPE_CHECKING:
    from jurymast.report.status import StatusWatcher

POLL_S = 0.1


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
    from jurymast.core.checkpoints.copies import MEMORY
    from jurymast.report.status import read_status

    directory = the_run(run, runs)
    watcher = read_status(directory)
    done = watcher.state.step
    ask_supervisor(directory, "save")
    saved = _await_save(watcher, done, limit)
    if saved is None:
        raise CheckpointError(
            f"{directory.root.name} saved no step from {done} on within {limit} s",
            hint=f"see jurymast events {directory.root}",
        )
    step, tier = saved
    if as_json:
        show_json({"run": directory.root.name, "step": step, "tier": tier})
    else:
        follow = "; replicas and copies on storage follow" if tier == MEMORY else ""
        click.echo(f"step {step} of {directory.root.name} is saved in the {tier} tier{follow}")


def _await_save(watcher: StatusWatcher, done: int, limit_s: float) -> tuple[int, str] | None:
    """(step, tier) of the next checkpoint of step `done` or later in the journal; None after `limit_s`
    seconds or if the run has ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not watcher.state.ended:
        for entry in watcher.poll():
            if entry.get("event") == "Saved" and entry["ok"] and entry["step"] >= done:
                return entry["step"], entry["tier"]
        time.sleep(POLL_S)
    return None
