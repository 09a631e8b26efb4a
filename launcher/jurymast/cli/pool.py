"""`jurymast pool`: nodes that wait for any of a user's runs."""

from __future__ import annotations

from pathlib import Path

import click

from jurymast.cli.options import examples, file_option, json_option, resolved_policy, show, show_json
from jurymast.cli.output import echo
from jurymast.errors import RunDirectoryError, UsageError


@click.command(epilog=examples("jurymast pool", "jurymast pool end --policy team.yaml"))
@click.argument("what", type=click.Choice(["end"]), required=False)
@file_option("--policy", help="Policy file whose pool.directory is meant.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The pool's directory.  [that of the policy]",
)
@json_option
def command(what: str | None, policy: Path | None, directory: Path | None, as_json: bool) -> None:
    """Show the nodes that wait in the pool, since when, and which runs took others. With `end`, end the jobs
    that wait: a run whose policy has the pool fills it again within a minute.

    STATE is queued (the job has no node yet), starting, waiting, or taken (by a run, just now). What a node
    costs after a run took it stands in that run's report.
    """
    from jurymast.cluster.pool import PoolDirectory, end_all
    from jurymast.report.pool import pool_blocks, pool_view

    root = str(directory.absolute()) if directory else resolved_policy(policy).settings().pool_directory
    if not root:
        raise UsageError("the policy has no pool.directory", hint="name one with --policy or --directory")
    place = PoolDirectory(root)
    try:
        ended = end_all(place) if what else []
        view = pool_view(place)
    except FileNotFoundError as error:
        hint = "the first run whose policy names it makes it"
        raise RunDirectoryError(f"pool.directory {root} is not there", hint=hint) from error
    except OSError as error:
        raise RunDirectoryError(f"pool.directory {root}: {error.strerror or error}") from error
    if as_json:
        show_json({**view, "ended": ended})
        return
    if ended:
        echo(f"ended: {', '.join(ended)}")
    show(pool_blocks(view))
