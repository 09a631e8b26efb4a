"""How a rank that lives goes on in the next attempt without a new process (recovery in process): what its
torchrun host and the rank say to each other, and the record in which the host keeps what is the rank's own.

    host -> rank   {"leave": attempt}, {"join": {the variables of the next attempt}}
    rank -> host   {"rank": local, "pid": ..., "says": "offers" | "withdraws" | "left", "step": ...}

Each direction is a pipe of the host, which ranks open through /proc/<host>/fd, as only the run's own user
can. A rank reads and offers only while its script is within `Checkpointer.run`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jurymast.core.state.evidence import SparedRank
from jurymast.processes import process_state, shared_memory
from jurymast.worker.link import EVENT_BYTES_MAX, fence

PIPES_VARIABLE = "JURYMAST_SPARING"
# In ranks of an attempt for which others were spared: the step that was saved, to which all go back if that
# is newer than what those have.
JOINS_VARIABLE = "JURYMAST_JOINS"
# A rank that was told to leave its step has this long, and no longer than the policy's `stop_grace`.
LEAVE_LIMIT_S = 2.0
# What a rank may record as its own at each step; twice, so that one record is whole at any time.
OWN_BYTES_MAX = 1 << 18
_HEAD = struct.Struct("qq")  # the step, -1 while it is being written, and the length
_SLOT_BYTES = OWN_BYTES_MAX + 64
PIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class Pipes:
    """The paths by which a rank reaches its host."""

    orders: str
    said: str
    own: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Pipes | None:
        parts = environment.get(PIPES_VARIABLE, "").split()
        return cls(*parts) if len(parts) == 3 else None


class OwnRecord:
    """What is a rank's own (random generators, the position of its loader) at its last two steps."""

    def __init__(self, buffer: Any) -> None:
        self._data = memoryview(buffer)

    def _at(self, slot: int) -> tuple[int, int]:
        step, size = _HEAD.unpack_from(self._data, slot * _SLOT_BYTES)
        return step, size

    def steps(self) -> list[int]:
        """The steps that are recorded."""
        return [step for step, size in map(self._at, range(2)) if step >= 0 and size > 0]

    def write(self, step: int, data: bytes) -> None:
        """Record `data` as of `step`, in place of the older record."""
        slot = min(range(2), key=lambda one: self._at(one)[0])
        start = slot * _SLOT_BYTES
        _HEAD.pack_into(self._data, start, -1, 0)
        fence()
        self._data[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        fence()
        _HEAD.pack_into(self._data, start, step, len(data))

    def read(self, step: int) -> bytes | None:
        for slot in range(2):
            found, size = self._at(slot)
            if found == step and 0 < size <= OWN_BYTES_MAX:
                start = slot * _SLOT_BYTES + _HEAD.size
                return bytes(self._data[start : start + size])
        return None

    def clear(self) -> None:
        for slot in range(2):
            _HEAD.pack_into(self._data, slot * _SLOT_BYTES, -1, 0)


def open_record(path: str) -> OwnRecord:
    """Map the record of this rank. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return OwnRecord(mmap.mmap(descriptor, 2 * _SLOT_BYTES))
    finally:
        os.close(descriptor)


def _stopped(pid: int) -> bool:
    """Whether somebody has stopped the process by a signal."""
    return process_state(pid)[0] in ("T", "t")


class Sparing:
    """The host's side, for its `count` ranks. `lives` says whether the rank's process with this id runs."""

    def __init__(self, count: int, lives: Callable[[int], bool]) -> None:
        self._lives = lives
        self._orders = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(count)]
        self._said_out, self._said_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        own = [shared_memory("jurymast-own", 2 * _SLOT_BYTES) for _ in range(count)]
        self._own_fds = [descriptor for descriptor, _ in own]
        self._own = [OwnRecord(page) for _, page in own]
        self._rest = b""
        self._offers: dict[int, int] = {}  # local rank: process id
        self._left: dict[int, SparedRank] = {}
        self.forget()

    def forget(self) -> None:
        """All ranks start anew: what is recorded is of no use."""
        for own in self._own:
            own.clear()

    def environment(self, local: int) -> dict[str, str]:
        paths = (self._orders[local][0], self._said_in, self._own_fds[local])
        return {PIPES_VARIABLE: " ".join(f"/proc/{os.getpid()}/fd/{number}" for number in paths)}

    def starts(self, local: int) -> None:
        """A new process is about to be this rank."""
        self._offers.pop(local, None)
        self._left.pop(local, None)
        with contextlib.suppress(BlockingIOError):  # what its predecessor did not read
            while os.read(self._orders[local][0], PIPE_BYTES):
                pass

    def leave(self, pids: Mapping[int, int], attempt: int, limit_s: float) -> tuple[SparedRank, ...]:
        """Have those of the ranks with these ids that offer it leave their step; return those that have in
        `limit_s` seconds. The others are to be ended."""
        self._hear()
        offer = {local for local, pid in self._offers.items() if pids.get(local) == pid}
        asked = {local for local in offer if self._lives(pids[local]) and not _stopped(pids[local])}
        self._left = {}
        for local in asked:
            self._tell(local, {"leave": attempt})
        end = time.monotonic() + limit_s
        while any(local not in self._left and self._lives(pids[local]) for local in asked):
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            select.select([self._said_out], [], [], min(left_s, 0.05))
            self._hear()
        return tuple(one for local, one in sorted(self._left.items()) if self._lives(one.pid))

    def join(self, local: int, environment: Mapping[str, str]) -> bool:
        """Have this rank, if it was spared and lives, go on in the attempt with these variables."""
        one = self._left.pop(local, None)
        if one is None or not self._lives(one.pid):
            return False
        return self._tell(local, {"join": dict(environment)})

    def spared(self, local: int) -> int:
        """The id of this rank's process, if it waits; else 0."""
        one = self._left.get(local)
        return one.pid if one is not None and self._lives(one.pid) else 0

    def _tell(self, local: int, order: Mapping[str, Any]) -> bool:
        try:
            data = json.dumps(order).encode() + b"\n"
            return os.write(self._orders[local][1], data) == len(data)
        except OSError:  # it reads no more
            return False

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._said_out, PIPE_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        self._take(json.loads(line))
                self._rest = self._rest[-EVENT_BYTES_MAX:]

    def _take(self, said: Mapping[str, Any]) -> None:
        local, pid, what = int(said["rank"]), int(said["pid"]), said["says"]
        if not 0 <= local < len(self._orders):
            return
        match what:
            case "offers":
                self._offers[local] = pid
            case "withdraws" if self._offers.get(local) == pid:
                del self._offers[local]
            case "left" if self._offers.get(local) == pid:
                self._left[local] = SparedRank(local, pid, int(said["step"]))


class RankSide:
    """A rank's side."""

    def __init__(self, pipes: Pipes, local: int) -> None:
        """Raises OSError if the host cannot be reached."""
        self._local = local
        self._orders = os.open(pipes.orders, os.O_RDONLY | os.O_CLOEXEC)
        self._said = pipes.said
        self.own = open_record(pipes.own)

    def say(self, what: str, step: int = -1) -> None:
        said = {"rank": self._local, "pid": os.getpid(), "says": what, "step": step}
        with contextlib.suppress(OSError):
            pipe = os.open(self._said, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, json.dumps(said).encode() + b"\n")
            finally:
                os.close(pipe)

    def listen(self, told: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `told` with each order, until the host ends."""
        rest = b""
        while data := os.read(self._orders, PIPE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told(json.loads(line))
