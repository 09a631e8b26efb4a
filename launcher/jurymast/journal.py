"""The journal: a run's events and decisions, one JSON object per line, one file per epoch. It is
authoritative.

Events rebuild the state (`replay`); decisions are written next to them, with their reasons, for people.
Events of many nodes that differ little share one line, whose `each` has lists of the values that differ.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from jurymast import foreign
from jurymast.core.run.machine import step, step_quietly
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Instruction
from jurymast.core.state.run import RunState
from jurymast.core.state.settings import RunPlan
from jurymast.errors import OtherJournalError
from jurymast.rundir import RunDirectory, sync_directory

# Version of the events, which `tests/data/golden/journal.txt` lists. A field that is added has a default, and
# keeps the version; any other change raises it.
VERSION = 11
# A shared file system that hangs must not stop the recovery: decisions wait this long for the disk.
FLUSH_LIMIT_S = 0.5
# What did not fit on the disk is tried again so often, and at the end for so long.
TRY_EVERY_S, LAST_TRIES_S = 0.1, 2.0
# The beginning of an epoch is among its first lines.
FIRST_LINES = 3
# Lines that come within this time are written together, unless a caller waits for them: thousands of nodes
# that join at once must not cause as many writes.
GATHER_S = 0.01

# Thousands of nodes that start, stop or fail together would add megabytes to the journal. These events are
# written on one line if they differ only in these fields.
DIFFER: dict[type[ev.Event], frozenset[str]] = {
    ev.NodeJoined: frozenset({"t", "node", "address", "incarnation", "pid", "boot_id"}),
    ev.NodeReady: frozenset({"t", "node", "store_port"}),
    ev.NodeTested: frozenset({"t", "node", "slowness", "message", "seconds", "partner"}),
    ev.NodeFinished: frozenset({"t", "node"}),
    ev.WorkersStarted: frozenset({"t", "node", "pids"}),
    ev.WorkersStopped: frozenset({"t", "node", "store_port"}),
    ev.WorkerFailed: frozenset({"t", "node", "rank", "message", "shm_used"}),
    ev.StacksTaken: frozenset({"t", "node", "ranks"}),
}
TOGETHER_MIN = 8  # with fewer, each event has its line
# The most frequent events; see `core.run.machine.step_quietly`.
QUIET = {kind.__name__: kind for kind in (ev.WorkersStarted, ev.WorkersStopped)}
_ALIKE = {
    kind: tuple(name for name in kind.__struct_fields__ if name not in differ)
    for kind, differ in DIFFER.items()
}
_ALIKE_BY_NAME = {kind.__name__: names for kind, names in _ALIKE.items()}
_INSTRUCTIONS = {kind.__name__: kind for kind in Instruction.__subclasses__()}

Entry = dict[str, Any]
# Seconds since the epoch; larger numbers are not dates.
Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
_Item = ev.Event | tuple[float, Instruction]


def file_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}.jsonl"


class _Line(msgspec.Struct):
    """The fields that entries of all kinds have; an entry that begins an epoch has `read`."""

    t: Time
    epoch: int
    n: int = 0
    event: str = ""
    decision: str = ""
    read: dict[str, int] | None = None


# The fields that events of several nodes on one line have in common.
_SAID_ONCE = frozenset(_Line.__struct_fields__) - {"t"} | {"v", "each"}


@cache
def _each_of(name: str) -> type[msgspec.Struct]:
    """The type of `each` for events of this name; for events that this version does not know, only times."""
    kind = ev.KINDS.get(name, ev.Event)
    types = [(key, list[one]) for key, one in get_type_hints(kind).items() if key != "t"]  # type: ignore[valid-type]
    maybe = [(key, one | msgspec.UnsetType, msgspec.UNSET) for key, one in types]
    return msgspec.defstruct(f"Each{name}", [("t", list[Time]), *maybe], kw_only=True)


class JournalWriter:
    """Appends on a thread of its own; `flush` waits for the disk up to a limit. What a failed sync leaves is
    not known: the kernel may have dropped it, and the next sync succeeds all the same. So all since the last
    good one is written again, at its place, through a new descriptor."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self._epoch = epoch
        self._number = 0
        self.path = directory / file_name(epoch)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._synced_bytes = 0
        sync_directory(directory)
        self._items: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self.error: OSError | None = None
        self._unwritten = b""
        self.appended = self.written = 0  # entries so far: of the caller, and on the disk
        self._taken = 0
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def event(self, event: ev.Event) -> None:
        self.appended += 1
        self._items.put(event)

    def decision(self, t: float, instruction: Instruction) -> None:
        self.appended += 1
        self._items.put((t, instruction))

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> bool:
        """Wait for the disk. True if everything appended so far is on disk, False if that took longer than
        `limit_s`."""
        done = threading.Event()
        self._items.put(done)
        self._hurry.set()
        return done.wait(limit_s) and self.error is None

    def close(self) -> None:
        self._items.put(None)
        self._hurry.set()
        self._thread.join(timeout=5.0)

    def _write(self) -> None:
        while (item := self._next()) is not None:
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            batch: list[_Item | threading.Event | None] = [item]
            while not self._items.empty() and batch[-1] is not None:
                batch.append(self._items.get())
            self._write_batch([item for item in batch if isinstance(item, ev.Event | tuple)])
            for waiting in batch:
                if isinstance(waiting, threading.Event):
                    waiting.set()
            if batch[-1] is None:
                break
        end = time.monotonic() + LAST_TRIES_S
        while self._unwritten and time.monotonic() < end:
            time.sleep(TRY_EVERY_S)
            self._write_batch([])
        os.close(self._descriptor)

    def _next(self) -> _Item | threading.Event | None:
        """Wait for the next item, and try again meanwhile what could not be written."""
        while True:
            try:
                return self._items.get(timeout=TRY_EVERY_S if self.error is not None else None)
            except queue.Empty:
                self._write_batch([])

    def _write_batch(self, items: list[_Item]) -> None:
        self._taken += len(items)
        self._unwritten += b"".join(map(self._line, together(items)))
        try:
            if self.error is not None:
                self._open_anew()
            done = 0
            while done < len(self._unwritten):
                done += os.pwrite(self._descriptor, self._unwritten[done:], self._synced_bytes + done)
            os.fsync(self._descriptor)
        except OSError as error:  # a full disk: the run continues, and the lines are tried again later
            self.error = error
            return
        self._synced_bytes += len(self._unwritten)
        self._unwritten, self.error, self.written = b"", None, self._taken

    def _open_anew(self) -> None:
        """Also, a descriptor on a shared file system may have become stale for good."""
        old, self._descriptor = self._descriptor, foreign.writing(self.path, 0)
        with suppress(OSError):  # some file systems tell only here what they could not write; it is closed
            os.close(old)

    def _line(self, entry: Entry) -> bytes:
        self._number += 1
        entry = {"v": VERSION, "epoch": self._epoch, "n": self._number, **entry}
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def together(items: Iterable[_Item]) -> Iterator[Entry]:
    """Turn items into entries; events of several nodes that differ only in `DIFFER`'s fields become one
    entry."""
    for _, group in groupby(items, _key):
        same = list(group)
        first = same[0]
        if isinstance(first, tuple):
            t, instruction = first
            yield {"decision": type(instruction).__name__, "t": t, **msgspec.structs.asdict(instruction)}
        elif len(same) < TOGETHER_MIN:
            yield from (ev.to_json(event) for event in same if isinstance(event, ev.Event))
        else:
            differ = DIFFER[type(first)]
            common = {name: value for name, value in ev.to_json(first).items() if name not in differ}
            each = {name: [getattr(event, name) for event in same] for name in differ}
            yield {**common, "t": first.t, "each": each}


def _key(item: _Item) -> object:
    names = _ALIKE.get(type(item))  # type: ignore[arg-type]
    return id(item) if names is None else (type(item), [getattr(item, name) for name in names])


def first_events(directory: RunDirectory, t: float, version: str) -> list[ev.Event]:
    """The events that open a new run's journal; `version` is jurymast's."""
    plan = directory.plan()
    return [
        ev.RunStarted(
            t=t, run=plan.run, name=plan.name, active=plan.active, spares=plan.spares,
            ranks_per_node=plan.ranks_per_node, script=plan.script, submitted_at=plan.submitted_at,
            policy_hash=plan.policy_hash, version=version, guessed=plan.guessed,
            kill_on_bad_exit=plan.kill_on_bad_exit,
        )
    ]  # fmt: skip


def read(directory: RunDirectory) -> Iterator[Entry]:
    """All entries that count, oldest first. Events of several nodes stay together (see `single`).

    An epoch ends where the next begins (see `EpochBegin`): entries that a paused supervisor wrote after its
    successor had started had no effect, and do not count.
    """
    files = list(directory.journal_files())
    yield from _replaced(files)
    for path in files[-1:]:
        yield from read_file(path)


def _replaced(files: Sequence[Path]) -> Iterator[Entry]:
    """The entries that count of all files but the newest."""
    yield from counting([read_file(path) for path in files], [begin_of(read_file(path)) for path in files])


def counting(files: Sequence[Iterable[Entry]], begins: Sequence[EpochBegin]) -> Iterator[Entry]:
    """The entries that count of all these epochs' files but the last, given each epoch's beginning."""
    for number, entries in enumerate(files[:-1]):
        later = begins[number + 1 :]
        yield from (entry for entry in entries if all(begin.counts(entry) for begin in later))


@dataclass(frozen=True)
class EpochBegin:
    """The beginning of an epoch: its time by its supervisor's clock, and how much that supervisor had `read`:
    the last line of each earlier epoch; None if the journal does not say. The clocks of two nodes may differ
    by more than a take-over takes."""

    t: float = math.inf
    read: Mapping[str, int] | None = None

    def counts(self, entry: Entry) -> bool:
        """Whether this entry of an earlier epoch was known when the epoch began."""
        if self.read is None:
            return bool(entry["t"] <= self.t)
        return bool(entry.get("n", 0) <= self.read.get(str(entry.get("epoch")), 0))


def begin_of(entries: Iterable[Entry]) -> EpochBegin:
    """Find the beginning in the first lines of an epoch's file."""
    begin = EpochBegin()
    for entry in islice(entries, FIRST_LINES):
        begin = EpochBegin(min(begin.t, entry["t"]), entry.get("read"))
        if entry.get("event") == ev.SupervisorStarted.__name__:
            break
    return begin


def read_file(path: Path) -> Iterator[Entry]:
    tail = FileTail(path)
    while lines := tail.lines(partial=True):
        for line in lines:
            if (entry := entry_of(line, path)) is not None:
                yield entry


def entry_of(line: bytes, path: Path) -> Entry | None:
    """The entry on a line of `path`; None for a line that is damaged or that a crash cut short.

    Raises OtherJournalError for an entry of another version, which could mean something else.
    """
    entry = _decode(line)
    if not isinstance(entry, dict):
        return None
    version = entry.get("v")
    if version != VERSION and type(version) is int:
        raise OtherJournalError(
            f"{path} has lines of journal version {version}, but this jurymast reads version {VERSION}",
            version,
        )
    try:
        _check(entry, path)
    except ValueError:
        return None
    return entry if version == VERSION else None


def _check(entry: Entry, path: Path) -> None:
    """Raise ValueError for a field that is missing or of another type, and for an entry of another epoch than
    the file's."""
    line = msgspec.convert(entry, _Line)
    if path.name != file_name(line.epoch):
        raise ValueError(f"an entry of epoch {line.epoch}")
    first = entry
    if "each" in entry:
        each = msgspec.convert(entry["each"], dict[str, list[Any]])
        msgspec.convert(each, _each_of(line.event))
        if len({len(values) for values in each.values()}) != 1 or not each["t"]:
            raise ValueError("lists of different lengths, or none")
        if _SAID_ONCE & each.keys():
            raise ValueError("several nodes' events are not of one kind")
        first = {**entry, **{name: values[0] for name, values in each.items()}}
    for kinds, name in ((ev.KINDS, line.event), (_INSTRUCTIONS, line.decision)):
        if name in kinds:
            msgspec.convert(first, kinds[name])


def single(entry: Entry) -> list[Entry]:
    """Split an entry into the entries that were written together."""
    if "each" not in entry:
        return [entry]
    each = entry["each"]
    common = {name: value for name, value in entry.items() if name != "each"}
    return [common | dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)]


def alike(entry: Entry) -> object:
    """A key that is equal for entries that could share a line; None for kinds that never do."""
    kind = str(entry.get("event"))
    names = _ALIKE_BY_NAME.get(kind)
    return None if names is None else (kind, [entry.get(name) for name in names])


def nodes_in(entry: Entry) -> int:
    """The number of nodes whose events the entry has."""
    return len(entry["each"]["t"]) if "each" in entry else 1


def _decode(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError):  # the quicker reader, which does not accept Infinity
        pass
    try:
        return foreign.parse(line)
    except ValueError:
        return None


def events_of(entry: Entry) -> list[ev.Event]:
    """The events of the entry; none for a decision and for events of an unknown kind."""
    return [ev.from_json(one) for one in single(entry)] if entry.get("event") in ev.KINDS else []


def events(entries: Iterable[Entry]) -> Iterator[ev.Event]:
    """The events of the entries."""
    for entry in entries:
        yield from events_of(entry)


def take(state: RunState, entry: Entry, feed: Callable[[ev.Event], object]) -> None:
    """Apply an entry to `state`; `feed` handles the events that may have consequences."""
    state.lines_read[str(entry.get("epoch"))] = entry.get("n", 0)
    if _taken_quietly(state, entry):
        entry = {**entry, "each": {name: values[-1:] for name, values in entry["each"].items()}}
    for event in events_of(entry):
        feed(event)


def _taken_quietly(state: RunState, entry: Entry) -> bool:
    """Apply all but the last of the entry's events if they have no consequences; returns whether it did."""
    kind = QUIET.get(entry.get("event", ""))
    if kind is None or "each" not in entry or entry.get("spared"):
        return False
    each = entry["each"]
    return step_quietly(state, kind, entry["attempt"], each["node"][:-1], each.get("store_port", ())[:-1])


def initial_state(plan: RunPlan) -> RunState:
    """The run's state before the first event."""
    return RunState(
        settings=plan.settings,
        run=plan.run,
        name=plan.name,
        active=plan.active,
        spares=plan.spares,
        ranks_per_node=plan.ranks_per_node,
        submitted_at=plan.submitted_at,
        requeue_allowed=plan.requeue,
        may_refill=plan.may_refill,
        pooled=plan.pooled,
        nodes_min=plan.nodes_min,
        signal_s=plan.signal_s,
        timeouts_most=plan.timeouts,
        keeps_s=plan.keeps_s,
        earlier=(plan.earlier_incidents, plan.earlier_node_days),
        frail={frail.node: frail for frail in plan.frail},
    )


def replay(directory: RunDirectory) -> RunState:
    """The state that results from the journal. Raises RunDirectoryError if the plan cannot be read."""
    state = initial_state(directory.plan())
    for entry in read(directory):
        take(state, entry, lambda event: step(state, event))
    return state


class FileTail:
    """Reads the new whole lines of one file; a line that is still being written waits."""

    def __init__(self, path: Path, *, one_of_many: bool = False) -> None:
        """With `one_of_many`, calls raise no OSError: it is kept in `error`, and the other files are read."""
        self.path = path
        self.more = False  # the last call left lines behind because of its limit
        self.error: OSError | None = None  # of the last call
        self._one_of_many = one_of_many
        self._offset = 0

    def lines(self, limit_bytes: int = 1 << 24, *, partial: bool = False) -> list[bytes]:
        """The next lines, at most `limit_bytes` in all; [] if there are none at the moment.

        A line longer than the limit comes in pieces. `partial`: include an unfinished last line. Only a line
        feed ends a line: a progress bar is one line, however often it returns to its beginning.
        """
        lines = self.data(limit_bytes, partial=partial).split(b"\n")
        return lines if lines[-1] else lines[:-1]

    def data(self, limit_bytes: int = 1 << 24, *, partial: bool = False, bars: bool = False) -> bytes:
        """The bytes of the next lines, as `lines` chooses them. `bars`: include an unfinished last line that
        has a carriage return, a progress bar as it is now."""
        data = self._read(limit_bytes, ends=False)
        self.more = len(data) == limit_bytes
        end = data.rfind(b"\n") + 1
        if (end == 0) if self.more else partial or (bars and b"\r" in data[end:]):
            end = len(data)
        self._offset += end
        return data[:end]

    def leave_out(self, all_but_bytes: int) -> None:
        """Leave out all but so many bytes of the file's end, and the rest of the line that begins before."""
        with suppress(OSError):  # the next call says it
            size = foreign.status(self.path).st_size
            if size - self._offset > all_but_bytes:
                self._offset = size - all_but_bytes
                self._offset += self._read(all_but_bytes, ends=False).find(b"\n") + 1

    def bar(self, limit_bytes: int = 1 << 16) -> bytes:
        """The unfinished last line if it has a carriage return, a progress bar, as far as it was not returned
        yet; b"" if there is none. It stays unread."""
        data = self._read(limit_bytes, ends=True)
        return data if b"\r" in data and b"\n" not in data else b""

    def _read(self, limit_bytes: int, *, ends: bool) -> bytes:
        """What was not returned yet: its beginning, or, if it `ends` there, its end."""
        self.error = None
        try:
            with foreign.reading(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._offset, size - limit_bytes) if ends else self._offset)
                return file.read(limit_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if not self._one_of_many:
                raise
            self.error = error
            return b""


class JournalFollower:
    """The state that results from a growing journal: `catch_up` reads what is new."""

    def __init__(self, directory: RunDirectory) -> None:
        """Raises RunDirectoryError if the plan cannot be read."""
        self._directory = directory
        self._plan = directory.plan()
        self._files: list[Path] = []
        self._state = initial_state(self._plan)

    def catch_up(self) -> RunState:
        """The state that `replay` would return now. Raises OSError; the next call reads what this one could
        not."""
        files = [path for path in self._directory.journal_files() if foreign.status(path).st_size]
        if (
            files and files != self._files
        ):  # lines that a supervisor wrote after the next epoch began do not count
            self._state, self._files = initial_state(self._plan), []
            self._take(_replaced(files))
            self._files, self._newest = files, FileTail(files[-1])
        while files and (lines := self._newest.lines()):
            path = self._newest.path
            self._take(entry for line in lines if (entry := entry_of(line, path)) is not None)
        return self._state

    def _take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            take(self._state, entry, lambda event: step(self._state, event))
