"""Reading a journal while it is being written: only what is new, each time."""

from __future__ import annotations

from pathlib import Path

from jurymast.core.ledger import Ledger
from jurymast.core.state import RunState
from jurymast.journal import Entry, entry_of, event_of, initial_state
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

    Epochs are read in order; what a supervisor still writes after the next one has begun does not count,
    as in `journal.read`.
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
                for entry in filter(None, map(entry_of, lines)):
                    if entry["epoch"] >= self.state.epoch:
                        self._take(entry)
                        entries.append(entry)
        return entries

    def _take(self, entry: Entry) -> None:
        event = event_of(entry)
        if event is not None:
            self.last_t = max(event.t, self.last_t or 0.0)
            self.ledger.feed(event)
