"""`jurymast nodes`: what earlier runs say about each node."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from jurymast.cli.options import examples, json_option, runs_option, runs_place, show, show_json
from jurymast.core.texts import did_you_mean
from jurymast.errors import RunDirectoryError, UsageError


@click.command(epilog=examples("jurymast nodes --all", "jurymast nodes --forgive node012"))
@click.option("-a", "--all", "everything", is_flag=True, help="Also nodes without an incident.")
@click.option("--forgive", metavar="NODE", help="NODE was repaired: its history no longer excludes it.")
@json_option
@runs_option
def command(everything: bool, forgive: str | None, as_json: bool, runs: Path | None) -> None:
    """Show each node's incidents over my runs, and which are kept out of new ones, until when and why.

    LEMON counts the signals of a node that fails again and again (of six, over 28 days). RATE is how often it
    is expected to fail against all nodes on average: 25 times its own rate on the day after it came back
    from a failure. A strike keeps a node out for the policy's nodes_policy.expire, three within 28 days for
    good.
    """
    from jurymast.past_runs import forgive as wipe
    from jurymast.policy.load import site_layers
    from jurymast.policy.resolve import resolve
    from jurymast.report.nodes import node_blocks, node_rows

    place = runs_place(runs)
    exclusion_s = resolve(site_layers(os.environ)).settings().exclusion_s
    if forgive is not None:
        known = [row["node"] for row in node_rows(place, exclusion_s)]
        if forgive not in known:
            raise UsageError(f"no run in {place} knows a node {forgive}{did_you_mean(forgive, known)}")
        try:
            wipe(place, forgive, time.time())
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {place}: {error.strerror}") from error
    rows = node_rows(place, exclusion_s)
    if as_json:
        show_json(rows)
        return
    if not rows:
        click.echo(f"no run on Slurm's nodes in {place}", err=True)
        return
    show(node_blocks(rows, everything=everything))
