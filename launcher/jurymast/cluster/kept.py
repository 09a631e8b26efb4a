"""What was learned of each run below a runs directory, kept in a file there: a journal is read once.

Nothing depends on the file: what is not in it, was kept by another version, or no longer fits the run is read
again, and a directory that cannot be written has none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from jurymast import foreign
from jurymast.rundir import RunDirectory, write_atomically

# Of this user alone, and for tens of thousands of runs.
KEPT_BYTES_MAX = 256 << 20

Stamp = list[list[int]]
Summary = TypeVar("Summary")


class Kept(Generic[Summary]):
    """Ask for each run's summary with `of`, then `save`, even if not all were asked for: the next reader goes
    on from there. `from_json` raises ValueError for anything that `to_json` did not make."""

    def __init__(
        self, path: Path, version: Any, from_json: Callable[[Any], Summary], to_json: Callable[[Summary], Any]
    ) -> None:
        self._path, self._version = path, version
        self._from_json, self._to_json = from_json, to_json
        self._before = entries_in(path, version)
        self._now = dict(self._before)

    def knows(self, name: str) -> bool:
        """Whether anything is kept of the run with this name."""
        return name in self._now

    def of(
        self,
        directory: RunDirectory,
        read: Callable[[RunDirectory], Summary],
        told: tuple[Stamp, Summary] | None = None,
    ) -> Summary:
        """The run's summary, by `read` unless the kept one still holds, or what was `told` of it as of a
        stamp. Raises what `read` raises."""
        name, stamp = directory.root.name, stamp_of(directory)
        entry: Any = self._now.pop(name, None)
        try:
            if entry["stamp"] != stamp:
                raise ValueError("the run has changed")
            found = self._from_json(entry["run"])
        except (KeyError, TypeError, ValueError):
            found = told[1] if told is not None and told[0] == stamp else read(directory)
            entry = {"stamp": stamp, "run": self._to_json(found)}
        self._now[name] = entry
        return found

    def save(self, names: Iterable[str]) -> None:
        """Keep the summaries of the runs with these names, and forget all others."""
        entries = {name: self._now[name] for name in names if name in self._now}
        if entries != self._before:
            data = json.dumps({"v": self._version, "entries": entries}).encode()
            if len(data) > KEPT_BYTES_MAX:  # nobody would read it, and others' runs can say ever so much
                return
            # In another user's runs directory, or on a full disk, the next reader reads the journals again.
            with contextlib.suppress(OSError):
                write_atomically(self._path, data, durable=False)


def entries_in(path: Path, version: Any) -> dict[str, Any]:
    """The entries of the file; {} if it is not this user's, since anybody could have made it."""
    try:
        content = foreign.load_own(path, KEPT_BYTES_MAX)
        entries = content["entries"] if content["v"] == version else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def stamp_of(directory: RunDirectory) -> Stamp:
    """The sizes (bytes) and times of change (ns) of the plan and the journal's files, which differ whenever
    these have changed."""
    stamp = []
    for path in (directory.plan_file, *directory.journal_files()):
        try:
            status = foreign.status(path)
        except OSError:
            continue
        stamp.append([status.st_size, status.st_mtime_ns])
    return stamp
