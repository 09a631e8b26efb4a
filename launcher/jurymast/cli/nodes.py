"""`jurymast nodes`: each node's history over all runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from jurymast.cli.options import (
    examples,
    json_option,
    resolved_policy,
    runs_option,
    runs_place,
    show,
    show_json,
)
from jurymast.cli.output import echo
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import RunDirectoryError, UsageError


@click.command(epilog=examples("jurymast nodes --all", "jurymast nodes --forgive node012"))
@click.option("-a", "--all", "everything", is_flag=True, help="Also show nodes without an incident.")
@click.option("--forgive", metavar="NODE", help="Disregard NODE's history from now on: it was repaired.")
@json_option
@runs_option
def command(everything: bool, forgive: str | None, as_json: bool, runs: Path | None) -> None:
    """Show each node's incidents over my runs. A node that new runs exclude is listed with the end of
    the exclusion and its reason.

    LEMON counts the signs of a node that fails again and again: how many of six it showed within 28 days.
    RATE is the failure rate expected of the node, relative to the average of all nodes; on the day after it
    returned from a failure it is multiplied by 25. One strike excludes a node for the time that the policy's
    nodes_policy.expire sets, three within 28 days exclude it for good.
    """
    from jurymast.cluster.earlier import forgive as wipe
    from jurymast.cluster.earlier import passed_over
    from jurymast.report.runs import node_blocks, node_rows

    place = runs_place(runs)
    exclusion_s = resolved_policy(None).settings().exclusion_s
    if forgive is not None:
        known = [row["node"] for row in node_rows(place, exclusion_s)]
        if forgive not in known:
            raise UsageError(f"no run in {place} had a node {forgive}{did_you_mean(forgive, known)}")
        try:
            wipe(place, forgive, time.time())
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {place}: {error.strerror or error}") from error
    others = list[int]()
    rows = node_rows(place, exclusion_s, others.append)
    for note in passed_over(others):
        echo(f"jurymast: note: {note}", err=True)
    if as_json:
        show_json(rows)
        return
    if not rows:
        echo(f"{place} has no runs on Slurm's nodes", err=True)
        return
    show(node_blocks(rows, everything=everything))
