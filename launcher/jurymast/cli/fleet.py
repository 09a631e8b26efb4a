"""`jurymast fleet`: where the node-time of all runs went."""

from __future__ import annotations

import time
from pathlib import Path

import click

from jurymast.cli.options import (
    examples,
    file_option,
    json_option,
    read_by,
    runs_place,
    show,
    show_json,
    write_page,
)
from jurymast.cli.output import echo
from jurymast.core.state.texts import age_s
from jurymast.errors import UsageError

# As in core.fleet, which takes long to import.
BY = ("team", "partition", "user", "month")


def _by(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    found = dict.fromkeys(name.strip() for value in values for name in value.split(","))
    for name in found:
        if name not in BY:
            raise click.BadParameter(f"{name} is none of {', '.join(BY)}", context, option)
    return tuple(found)


@click.command(
    epilog=examples("jurymast fleet --by team,month", "jurymast fleet --since 28d --html fleet.html")
)
@click.option(
    "--by", multiple=True, default=("team",), callback=_by, metavar="KEY,...",
    help=f"Group by {', '.join(BY)}; may be repeated.  [team]",
)  # fmt: skip
@click.option("--since", callback=read_by(age_s), metavar="TIME", help="Only the last days, like 28d.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line per group.")
@file_option("--html", help="Write the figures to FILE as one HTML page.")
@json_option
@click.option(
    "--runs", "places", type=click.Path(path_type=Path), multiple=True, metavar="DIR",
    help="Where run directories are kept; may be repeated.  [$JURYMAST_RUNS, or ./runs]",
)  # fmt: skip
def command(
    by: tuple[str, ...], since: float | None, as_csv: bool, html: Path | None, as_json: bool,
    places: tuple[Path, ...],
) -> None:  # fmt: skip
    """Show goodput, failures and losses of all runs: by team (the Slurm account), partition, user or month.

    GOODPUT is the share of allocated node-time in steps that counted, a range where the journals do not tell;
    MTBF the time of one node between failures in the last 7 and 28 days, and TREND whether the last week is
    better or worse than the three before it. The runs of other users count if you may read them.
    """
    from jurymast.report.fleet import fleet_blocks, fleet_csv, fleet_page, fleet_view, read_fleet

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other")
    found = [runs_place(place.expanduser().absolute()) for place in places] or [runs_place(None)]
    now = time.time()
    view = fleet_view(read_fleet(found), by, None if since is None else now - since, now)
    if html is not None:
        write_page(fleet_page(view), html)
    if as_json:
        show_json(view)
    elif as_csv:
        echo(fleet_csv(view), nl=False)
    elif html is None:
        if not view["total"]["runs"] and not view["unreadable"]:
            echo(f"no runs in {', '.join(map(str, found))}", err=True)
            return
        show(fleet_blocks(view))
