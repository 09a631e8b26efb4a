"""A rank's link to its node's agent: step heartbeats through shared memory, events through a pipe.

Both are anonymous kernel objects of the agent, opened through /proc/<agent>/fd/N: they are in no file system,
only the run's own user can open them, and they end with the agent. Neither can block or fail the training;
without an agent (plain torchrun) every call does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from jurymast.core import within
from jurymast.core.message import encode
from jurymast.worker.schedule import ScheduleRecord

SLOT_BYTES = 128
# step, beats, pid, phase, time of the last beat, longest time between beats, time of the last phase change
# (times: seconds on the machine's CLOCK_MONOTONIC)
SLOT = struct.Struct("<qqqqddd")
# After them: the number of the newest schedule of saves that the rank has settled (see `worker.schedule`).
SETTLED = struct.Struct("q")
# In the second cache line: the number of timed optimizer steps and the total seconds of their parts (see
# `worker.hooks`): forward, backward, update. In native byte order, so that each word is read in one piece.
TIMED = struct.Struct("qddd")
TIMED_OFFSET = 64
STARTING, STEPPING, RESTORING, SAVING, DONE = range(5)
PHASES = ("starting", "stepping", "restoring", "saving", "done")
# Added to the phase while the script gives its own step numbers.
EXPLICIT = 16
# The first beats are slow (compilation, warm-up): the longest time between beats counts them only until the
# first normal step.
WARM_UP_BEATS = 3
# A write of up to PIPE_BUF bytes to a pipe is atomic, so ranks can share one (pipe(7)).
EVENT_BYTES_MAX = 4096

# Words in memory that several processes share.
Page: TypeAlias = "mmap.mmap | memoryview[int]"

PAGE_VARIABLE = "JURYMAST_PAGE"
EVENTS_VARIABLE = "JURYMAST_EVENTS"


@dataclass(frozen=True)
class RankBeat:
    """One rank's slot as the agent reads it; times in seconds of CLOCK_MONOTONIC."""

    step: int
    beats: int
    pid: int
    phase: str
    explicit: bool
    beat_at: float
    longest_s: float
    phase_at: float
    settled: int = 0
    timed: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)


def read_slot(page: Page, local_rank: int) -> RankBeat:
    offset = local_rank * SLOT_BYTES
    step, beats, pid, phase, beat_at, longest_s, phase_at = SLOT.unpack_from(page, offset)
    (settled,) = SETTLED.unpack_from(page, offset + SLOT.size)
    name = PHASES[phase % EXPLICIT] if phase % EXPLICIT < len(PHASES) else "starting"
    timed = TIMED.unpack_from(page, offset + TIMED_OFFSET)
    return RankBeat(step, beats, pid, name, phase >= EXPLICIT, beat_at, longest_s, phase_at, settled, timed)


class Link:
    """One rank's connection to its agent. `page` has `SLOT_BYTES` for each local rank, followed by the
    schedule of saves; `events` is the path of a pipe, or "".

    No file stays open: a script gets the same file descriptors as under torchrun."""

    def __init__(self, page: Page | None, events: str, local_rank: int) -> None:
        # Set once the script reports its own step numbers (Checkpointer): they are absolute, whereas the
        # optimizer hook can only count from the start of this process.
        self.explicit_steps = False
        self._page = page
        self._events = events
        self._offset = local_rank * SLOT_BYTES
        self._step = 0
        self._beats = 0
        self._pid = os.getpid()
        self._phase = STARTING
        self._beat_at = 0.0
        self._longest_s = 0.0
        self._scaled = False
        self._phase_at = time.monotonic()
        self._write()

    @property
    def schedule(self) -> ScheduleRecord | None:
        """The words in which the agent announces when to save; None without an agent."""
        return None if self._page is None else ScheduleRecord(self._page)

    def settled(self, number: int) -> None:
        """Show the agent that this rank has decided on the schedule `number`."""
        if self._page is not None:
            SETTLED.pack_into(self._page, self._offset + SLOT.size, number)

    def _write(self) -> None:
        if self._page is not None:
            SLOT.pack_into(
                self._page, self._offset, self._step, self._beats, self._pid,
                self._phase + EXPLICIT * self.explicit_steps, self._beat_at, self._longest_s, self._phase_at,
            )  # fmt: skip

    def beat(self, step: int) -> None:
        """Record that `step` steps are done. Costs well under 1 us; never raises."""
        now = time.monotonic()
        if self._phase <= STEPPING:
            gap_s = now - (self._beat_at or self._phase_at)
            if self._beats >= WARM_UP_BEATS and not self._scaled:
                self._longest_s, self._scaled = gap_s, True
            elif gap_s > self._longest_s:
                self._longest_s = gap_s
        self._step = step
        self._beats += 1
        self._phase = STEPPING
        self._beat_at = now
        if self._page is not None:
            SLOT.pack_into(
                self._page, self._offset, step, self._beats, self._pid,
                STEPPING + EXPLICIT * self.explicit_steps, now, self._longest_s, self._phase_at,
            )  # fmt: skip

    def timed(self, steps: int, forward_s: float, backward_s: float, update_s: float) -> None:
        """Record how the time of `steps` optimizer steps is divided over their parts, in seconds."""
        if self._page is not None:
            TIMED.pack_into(self._page, self._offset + TIMED_OFFSET, steps, forward_s, backward_s, update_s)

    def optimizer_stepped(self) -> None:
        """Count an optimizer step of this process as a heartbeat, unless the script numbers its steps."""
        if not self.explicit_steps and self._phase <= STEPPING:
            self.beat(self._step + 1)

    def stirred(self) -> None:
        """Show that the rank is alive although it has not finished a step."""
        if self._phase <= STEPPING:
            self._phase_at = time.monotonic()
            self._write()

    def enter(self, phase: int) -> None:
        """Show what the rank is doing (RESTORING, SAVING, ...), so that it is not taken for a hang."""
        self._phase = phase
        self._phase_at = time.monotonic()
        self._write()

    def resume_at(self, step: int) -> None:
        """Show that training continues from `step`. This is no heartbeat, because no step is done.

        The next step is timed from now, so that a restore or a save does not count as a long step.
        """
        self._step = step
        self._phase = STEPPING if self._beats else STARTING
        self._beat_at = self._phase_at = time.monotonic()
        self._write()

    def emit(self, event: within.FromRank) -> None:
        """Send an event to the agent, best effort: it is lost if the pipe is full or the agent is gone."""
        if not self._events:
            return
        line = encode(replace(event, local_rank=self._offset // SLOT_BYTES)) + b"\n"
        if len(line) > EVENT_BYTES_MAX:
            return
        with suppress(OSError):
            pipe = os.open(self._events, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, line)
            finally:
                os.close(pipe)


def open_page(path: str) -> Page | None:
    """Map a page of the agent's shared memory until this process ends; None without an agent."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            return _mapped(descriptor, size) if size else None
        finally:
            os.close(descriptor)
    except OSError:
        return None


def _mapped(descriptor: int, size: int) -> Page:
    """Map a file as mmap.mmap does, but without keeping a descriptor open, which it does before Python
    3.13. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


_current: Link | None = None


def current() -> Link:
    """Return this process's link, opened at the first call. Without an agent it does nothing."""
    global _current
    if _current is None or _current._pid != os.getpid():
        page = open_page(os.environ[PAGE_VARIABLE]) if PAGE_VARIABLE in os.environ else None
        events = os.environ.get(EVENTS_VARIABLE, "")
        _current = Link(page, events, int(os.environ.get("LOCAL_RANK", "0")))
    return _current
