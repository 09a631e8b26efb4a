"""Reads a journal while it is being written: each time only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jurymast import foreign
from jurymast.core.events import Event
from jurymast.core.goodput import Ledger
from jurymast.core.run.state import RunState
from jurymast.errors import RunDirectoryError
from jurymast.journal import Entry, EpochBegin, FileTail, begin_of, entry_of, initial_state, read_file, take
from jurymast.report.text import some
from jurymast.rundir import RunDirectory


class _EpochTail:
    """Reads one epoch's file. Entries are numbered from 1, so missing ones are noticed."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self.line = 0  # number of the newest entry's line, from 1
        self._number = 0
        self._bad: list[int] = []
        self._missing = 0

    def entries(self, *, over: bool) -> Iterator[Entry]:
        """The new entries. `over`: a later epoch has begun, so an unfinished line will not be completed."""
        while lines := self._tail.lines(partial=over):
            for line in lines:
                self.line += 1
                entry = entry_of(line, self._tail.path)
                if entry is None:
                    self._bad.append(self.line)
                    continue
                self._missing += max(0, entry.get("n", 0) - self._number - 1)
                self._number = entry.get("n", 0)
                yield entry

    def unread(self) -> Iterator[str]:
        name = self._tail.path.name
        if self._bad:
            lines = some([str(number) for number in self._bad])
            yield f"{name}: {'line' if len(self._bad) == 1 else 'lines'} {lines} could not be read"
        if self._missing > len(self._bad):
            entries = "1 entry" if self._missing == 1 else f"{self._missing} entries"
            yield f"{name}: {entries} missing"


class JournalTail:
    """New entries of a run's journal, and the state and account to which they lead.

    Epochs are read in order. As in `journal.read`, entries that a supervisor wrote after the next epoch had
    begun do not count.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.plan = directory.plan()
        self.ledger = Ledger(initial_state(self.plan))
        self.last_t: float | None = None
        self._epochs: dict[str, _EpochTail] = {}
        self._begins: dict[str, EpochBegin] = {}

    @property
    def state(self) -> RunState:
        return self.ledger.state

    @property
    def unread(self) -> list[str]:
        """What is missing from the journal or could not be read, in words."""
        found = [text for epoch in self._epochs.values() for text in epoch.unread()]
        if self._epochs and not any(name.endswith("-000001.jsonl") for name in self._epochs):
            found.insert(0, f"the journal begins with {min(self._epochs)}: what came before is not shown")
        elif not self._epochs and foreign.found(self.directory.epochs, "*.claim"):
            found.append(f"there is no journal in {self.directory.journal}: what the run did is not known")
        return found

    def poll(self) -> list[Entry]:
        """The entries since the last call, oldest first. Entries that report the same of several nodes stay
        together (see `journal.single`). `state` includes them."""
        return list(self.new())

    def new(self) -> Iterator[Entry]:
        """Like `poll`, but yields one entry at a time; `state` includes the yielded ones. Raises
        RunDirectoryError, which names the line, for an entry that contradicts earlier lines."""
        files = list(self.directory.journal_files())
        for number, path in enumerate(files, 1):
            epoch = self._epochs.setdefault(path.name, _EpochTail(path))
            later = [self._begin(other) for other in files[number:]]
            for entry in epoch.entries(over=path != files[-1]):
                if all(begin.counts(entry) for begin in later):
                    self._take(entry, f"{path}, line {epoch.line}")
                    yield entry

    def _take(self, entry: Entry, where: str) -> None:
        """Accept any content: a colleague's journal may not have been written by jurymast."""
        try:
            take(self.state, entry, self._feed)
        except Exception as error:
            what = entry.get("event", "this")
            raise RunDirectoryError(
                f"{where}: {what} contradicts the lines before it ({type(error).__name__}: {error})"
            ) from error

    def _begin(self, path: Path) -> EpochBegin:
        """The beginning of that epoch, kept as soon as it is known."""
        if path.name not in self._begins:
            begin = begin_of(read_file(path))
            if begin == EpochBegin():
                return begin
            self._begins[path.name] = begin
        return self._begins[path.name]

    def _feed(self, event: Event) -> None:
        self.last_t = max(event.t, self.last_t or 0.0)
        self.ledger.feed(event)
