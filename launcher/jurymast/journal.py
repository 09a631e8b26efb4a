"""The journal: a run's events and decisions, one JSON object a line, one file an epoch. The truth.

Events rebuild the state (`replay`); decisions are written beside them, with their reasons, for people.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jurymast.core import events as ev
from jurymast.core.instructions import Instruction
from jurymast.core.run import step
from jurymast.core.settings import RunPlan
from jurymast.core.state import RunState
from jurymast.rundir import RunDirectory, sync_directory

VERSION = 1
# A shared file system that hangs must not stop the recovery: decisions wait this long for the disk.
FLUSH_LIMIT_S = 0.5
# What finds no room at the end has no later line to be tried again with.
LAST_TRIES_S = 2.0
LAST_TRY_EVERY_S = 0.1
# Lines that come within this time are written together, unless somebody waits for them: thousands of nodes
# that join at once must not mean as many writes.
GATHER_S = 0.01

Entry = dict[str, Any]


class JournalWriter:
    """Appends on a thread of its own; `flush` waits for the disk, but not for ever."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self._epoch = epoch
        self._number = 0
        self.path = directory / f"epoch-{epoch:06d}.jsonl"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        sync_directory(directory)
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self.error: OSError | None = None
        self._unwritten = b""
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def event(self, event: ev.Event) -> None:
        self._append(ev.to_json(event))

    def decision(self, t: float, instruction: Instruction) -> None:
        self._append({"decision": type(instruction).__name__, "t": t, **asdict(instruction)})

    def _append(self, fields: Entry) -> None:
        self._number += 1
        entry = {"v": VERSION, "epoch": self._epoch, "n": self._number, **fields}
        self._lines.put(json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> bool:
        """True when everything appended so far is on disk; False when that took longer than `limit_s`."""
        done = threading.Event()
        self._lines.put(done)
        self._hurry.set()
        return done.wait(limit_s) and self.error is None

    def close(self) -> None:
        self._lines.put(None)
        self._hurry.set()
        self._thread.join(timeout=5.0)

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            batch: list[bytes | threading.Event | None] = [item]
            while not self._lines.empty() and batch[-1] is not None:
                batch.append(self._lines.get())
            self._write_batch([line for line in batch if isinstance(line, bytes)])
            for waiting in batch:
                if isinstance(waiting, threading.Event):
                    waiting.set()
            if batch[-1] is None:
                break
        end = time.monotonic() + LAST_TRIES_S
        while self._unwritten and time.monotonic() < end:
            time.sleep(LAST_TRY_EVERY_S)
            self._write_batch([])
        os.close(self._descriptor)

    def _write_batch(self, lines: list[bytes]) -> None:
        self._unwritten += b"".join(lines)
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
            os.fsync(self._descriptor)
            self.error = None
        except OSError as error:  # a full disk: the run goes on, and the lines wait for the next try
            self.error = error


def first_events(directory: RunDirectory, t: float, version: str) -> list[ev.Event]:
    """The events that open a new run's journal; `version`: of jurymast."""
    plan = directory.plan()
    return [
        ev.RunStarted(
            t=t, run=plan.run, name=plan.name, active=plan.active, spares=plan.spares,
            ranks_per_node=plan.ranks_per_node, script=plan.script, submitted_at=plan.submitted_at,
            policy_hash=plan.policy_hash, version=version,
        )
    ]  # fmt: skip


def read(directory: RunDirectory) -> Iterator[Entry]:
    """All entries that count, oldest first.

    An epoch ends where the next begins: what a supervisor that had been stopped for a while still wrote
    after its successor had started, nobody acted on.
    """
    files = list(directory.journal_files())
    starts = [next((entry["t"] for entry in read_file(path)), math.inf) for path in files]
    for number, path in enumerate(files):
        until = min(starts[number + 1 :], default=math.inf)
        for entry in read_file(path):
            if entry["t"] <= until:
                yield entry


def read_file(path: Path) -> Iterator[Entry]:
    with open(path, "rb") as file:
        for line in file:
            if (entry := entry_of(line)) is not None:
                yield entry


def entry_of(line: bytes) -> Entry | None:
    """One line's entry; None for one that a crash cut short, or a newer version's."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.get("v") == VERSION and "t" in entry else None


def event_of(entry: Entry) -> ev.Event | None:
    """The entry's event; None for a decision, and for an event of an unknown kind."""
    try:
        return ev.from_json(entry) if "event" in entry else None
    except (KeyError, TypeError):
        return None


def events(entries: Iterable[Entry]) -> Iterator[ev.Event]:
    """The events among the entries."""
    for entry in entries:
        if (event := event_of(entry)) is not None:
            yield event


def initial_state(plan: RunPlan) -> RunState:
    """The state before the first event."""
    return RunState(
        settings=plan.settings,
        run=plan.run,
        name=plan.name,
        active=plan.active,
        spares=plan.spares,
        ranks_per_node=plan.ranks_per_node,
        submitted_at=plan.submitted_at,
        requeue_allowed=plan.requeue,
        earlier=(plan.earlier_incidents, plan.earlier_node_days),
        frail={frail.node: frail for frail in plan.frail},
    )


def replay(directory: RunDirectory) -> RunState:
    """The state that the journal leads to. Raises RunDirectoryError when the plan cannot be read."""
    state = initial_state(directory.plan())
    for event in events(read(directory)):
        step(state, event)
    return state
