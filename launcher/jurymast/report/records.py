"""What the run directory still has of an incident, for the report's page: where ranks stood before they were
stopped, and the last lines that they wrote."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jurymast import foreign
from jurymast.core.state.incident import Incident
from jurymast.rundir import RunDirectory

LOG_BYTES, LOG_LINES = 6000, 25
STACKS_BYTES, FILES_MAX = 20_000, 3
# What a page of less than a megabyte has room for, as it is written there.
PAGE_CHARACTERS = 250_000

_STACKS = re.compile(r"stacks-(\d{1,9})-(\d{1,9})\.txt")
# From a line that names a file of /proc to the next rank.
_KERNEL = re.compile(r"^/proc/\d+/.*?(?=^rank \d+, |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Record:
    title: str
    text: str


def records_of(
    directory: RunDirectory, incidents: Sequence[Incident], ranks_per_node: int
) -> dict[int, list[Record]]:
    """The records of these incidents, by their number; of the newest ones while there is room."""
    found: dict[int, list[Record]] = {}
    room = PAGE_CHARACTERS
    for incident in reversed(incidents):
        own = [*_stacks(directory, incident), *_log(directory, incident, ranks_per_node)]
        room -= sum(len(html.escape(one.text)) for one in own)
        if room < 0:
            break
        if own:
            found[incident.id] = own
    return found


def _log(directory: RunDirectory, incident: Incident, ranks_per_node: int) -> Iterator[Record]:
    rank = incident.rank if incident.rank is not None and incident.rank >= 0 else None
    if rank is None:
        rank = max(0, incident.place) * ranks_per_node
    told = _end_of(directory.last_words(incident.attempt, rank), LOG_BYTES)
    if lines := told.splitlines()[-LOG_LINES:]:
        yield Record(f"last lines of rank {rank}", "\n".join(lines))


def _stacks(directory: RunDirectory, incident: Incident) -> Iterator[Record]:
    """Those of the rank at fault come first. What the kernel said of the processes is left out."""
    folder = directory.evidence(incident.attempt)
    folders = (folder, *foreign.found(folder, "ranks-*"))
    files = (file for one in folders for file in foreign.found(one, "stacks-*.txt"))
    named = [
        (file, tuple(map(int, match.groups()))) for file in files if (match := _STACKS.fullmatch(file.name))
    ]
    at_fault = -1 if incident.rank is None else incident.rank
    named.sort(key=lambda one: (not one[1][0] <= at_fault <= one[1][1], one[1]))
    for file, (first, last) in named[:FILES_MAX]:
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        if told := _KERNEL.sub("", _end_of(file, STACKS_BYTES, first=True)).strip():
            yield Record(f"stacks of {ranks}", told)


def _end_of(file: Path, most: int, *, first: bool = False) -> str:
    """So many bytes of its end, or `first` of its beginning, as text; "" if it cannot be read."""
    try:
        with foreign.reading(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most and not first:
                opened.seek(size - most)
            told = opened.read(most).decode(errors="replace")
    except OSError:
        return ""
    return told.strip("\n\0")
