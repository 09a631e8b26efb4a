"""Reading a journal while it is being written: only what is new, each time."""

from __future__ import annotations

import json
from pathlib import Path

from jurymast.core import events as ev
from jurymast.core.ledger import Ledger
from jurymast.core.state import RunState
from jurymast.journal import VERSION, Entry, initial_state
from jurymast.rundir import RunDirectory


class FileTail:
    """The whole lines of one file that were not read yet; a line still being written waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self, limit_bytes: int = 1 << 24, *, partial: bool = False) -> list[bytes]:
        """The next lines, at most `limit_bytes` of them at once; [] when there are none for now.

        A line longer than the limit comes in pieces. `partial`: the rest of a last line comes too.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read(limit_bytes)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        if end == 0 and (partial or len(data) == limit_bytes):
            end = len(data)
        self._offset += end
        return data[:end].splitlines()


class JournalTail:
    """New entries of a run's journal, and the state and accounts they lead to.

    Epochs are read in order. What a supervisor still wrote after the next one had begun comes late here,
    in the order of arrival; `journal.replay` has it in its epoch's place.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.ledger = Ledger(initial_state(directory.plan()))
        self.last_t: float | None = None
        self._tails: dict[str, FileTail] = {}

    @property
    def state(self) -> RunState:
        return self.ledger.state

    def poll(self) -> list[Entry]:
        """The entries since the last call, oldest first; `state` has taken them in."""
        entries: list[Entry] = []
        for path in self.directory.journal_files():
            tail = self._tails.setdefault(path.name, FileTail(path))
            while lines := tail.lines():
                entries += [entry for line in lines if (entry := _entry(line)) is not None]
        for entry in entries:
            self._take(entry)
        return entries

    def _take(self, entry: Entry) -> None:
        if "event" not in entry:
            return
        try:
            event = ev.from_json(entry)
        except (KeyError, TypeError):
            return
        self.last_t = max(event.t, self.last_t or 0.0)
        self.ledger.feed(event)


def _entry(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.get("v") == VERSION else None
