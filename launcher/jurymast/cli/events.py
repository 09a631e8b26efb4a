"""`jurymast events`: the journal as sentences, decisions with their reasons."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast.cli import patience
from jurymast.cli.options import examples, json_text, run_argument, runs_option, the_run
from jurymast.cli.output import echo

if TYPE_CHECKING:
    from jurymast.journal import Entry
    from jurymast.report.status import StatusWatcher

FOLLOW_EVERY_S = 0.2
# Least seconds between two reports of steps that are shown, by whether the run is followed.
PROGRESS_EVERY_S = {True: 30.0, False: 3600.0}
# If more nodes report the same one after the other, only this many are shown.
ALIKE_SHOWN = 3


@click.command(epilog=examples("jurymast events 4711 --follow"))
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Also show routine reports of every node and step."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, with `at` and `text`.")
@runs_option
def command(run: str, follow: bool, everything: bool, as_json: bool, runs: Path | None) -> None:
    """Show what happened in a run, and what was decided (=>) and why."""
    from jurymast.report.status import StatusWatcher

    watcher = StatusWatcher(the_run(run, runs, only_look=True))
    entries = _entries(watcher, follow)
    lines: Iterable[str]
    if as_json:
        lines = (json_text(_as_json(one)) for one in _singles(entries))
    elif everything:
        lines = map(_as_text, _singles(entries))
    else:
        lines = _brief(_wanted(entries, PROGRESS_EVERY_S[follow]))
    for line in lines:
        echo(line)
    for text in watcher.unread:
        echo(f"warning    {text}", err=True)


def _entries(watcher: StatusWatcher, follow: bool) -> Iterator[Entry]:
    yield from watcher.new()
    if follow:
        patience.follow_on()
    while follow and not watcher.state.ended:
        follow = not watcher.gone()
        time.sleep(FOLLOW_EVERY_S)
        yield from watcher.new()


def _wanted(entries: Iterable[Entry], progress_every_s: float) -> Iterator[Entry]:
    """The entries without routine. A report of steps is kept if the last one is `progress_every_s` old, or if
    another entry follows."""
    from jurymast.report.sentences import is_routine

    held: Entry | None = None
    told_at = float("-inf")
    for entry in entries:
        kind = entry.get("event")
        if is_routine(entry):
            continue
        if kind == "Progress":
            held = entry
            if entry["t"] - told_at < progress_every_s:
                continue
            told_at = entry["t"]
        if held is not None:
            yield held
            held = None
        if kind != "Progress":
            yield entry
    if held is not None:
        yield held


def _singles(entries: Iterable[Entry]) -> Iterator[Entry]:
    from jurymast.journal import single

    return chain.from_iterable(map(single, entries))


def _brief(entries: Iterable[Entry]) -> Iterator[str]:
    """One line for each entry; nodes that report the same in thousands are counted."""
    from jurymast.journal import alike, nodes_in, single

    for same, group in groupby(entries, alike):
        shown = count = 0
        last_t = 0.0
        for entry in group:
            count += nodes_in(entry)
            last_t = entry["each"]["t"][-1] if "each" in entry else entry["t"]
            for one in single(entry) if same is None or shown < ALIKE_SHOWN else ():
                if same is None or shown < ALIKE_SHOWN:
                    shown += 1
                    yield _as_text(one)
        if count > shown:
            yield f"{_at(last_t)}  ... {count - shown} more nodes reported the same until then (--all)"


def _at(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _as_text(entry: Entry) -> str:
    from jurymast.report.sentences import sentence
    from jurymast.report.text import one_line

    return f"{_at(entry['t'])}  {one_line(sentence(entry))}"


def _as_json(entry: Entry) -> dict[str, Any]:
    from jurymast.report.sentences import sentence
    from jurymast.report.text import iso

    own = {"found_at": entry["at"]} if "at" in entry else {}  # of a finding
    return {**entry, **own, "at": iso(entry["t"]), "text": sentence(entry)}
