"""`jurymast drain`: replace a node of a run by a spare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from jurymast.cli.options import examples, run_argument, runs_option, the_run
from jurymast.cli.output import echo
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import UsageError
from jurymast.report.asking import ask_supervisor

if TYPE_CHECKING:
    from jurymast.core.state.run import RunState


@click.command(epilog=examples("jurymast drain 4711 node012"))
@run_argument
@click.argument("node")
@runs_option
def command(run: str, node: str, runs: Path | None) -> None:
    """Save, take NODE out of a run, and put a spare in its place.

    If no spare is ready, the run waits for another node (nodes_policy.refill), or goes on with fewer
    (nodes.min), or its job is requeued without NODE and waits in Slurm's queue again; one that must not be
    requeued ends. The answer says which. NODE's state in Slurm does not change.
    """
    from jurymast.report.status import read_status

    directory = the_run(run, runs)
    state = read_status(directory).state
    if state.nodes and not state.ended and node not in state.nodes:
        raise UsageError(
            f"no node {node} in this run{did_you_mean(node, state.nodes)}",
            hint=f"its nodes are {', '.join(state.nodes)}",
        )
    then = what_follows(state, node)
    more = ask_supervisor(directory, "drain", node)
    echo(f"{node} is being taken out of {directory.root.name}: {then}{more}")


def what_follows(state: RunState, node: str) -> str:
    """The decision that the restart ladder will make once the ranks are stopped, in words."""
    from jurymast.core.run import refill, size
    from jurymast.core.run.ladder import without_spare
    from jurymast.core.state.run import Role
    from jurymast.report.text import duration

    if node not in state.placement:
        return "it has no ranks"
    spares = [spare.name for spare in state.spare_nodes() if spare.name != node]
    coming = [n for n in state.nodes.values() if n.role is Role.JOINING and n.incarnation and n.name != node]
    if spares or coming:
        return "a spare takes its place"
    left = len(state.placement) - 1
    then = {
        size.SHRINK: size.told(state, left), "requeue": "the job will be requeued without it",
        "stop": "the job cannot be requeued: THE RUN WILL END",
    }[without_spare(state, left)]  # fmt: skip
    if refill.would_hold(state):
        hold = duration(state.settings.hold_s)
        return f"no spare is ready: the run waits for another node, for up to {hold}; if none comes, {then}"
    return f"no spare is ready{' and' if then.startswith('the job cannot') else ':'} {then}"
