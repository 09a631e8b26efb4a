"""Makes all ranks of an attempt save at the same steps, although they exchange no messages.

The supervisor proposes a schedule that counts from a step `at` that no rank has reached. Each agent writes it
into its ranks' page, and its next heartbeat shows it together with the steps that its ranks have reached.
Once every agent has shown it, and no rank had reached `at`, every rank is certain to see the proposal at
`at`: the supervisor journals and confirms it. If some rank was faster, the supervisor withdraws it and
proposes a later step.

A rank reads one word of shared memory at each step. At `at` it follows the schedule if that is confirmed,
keeps its old one if it is withdrawn, and waits if neither is known: then the other ranks wait for the same
decision. So all ranks do the same at every step, however late a message is. Normally nobody waits, because
`at` is some heartbeats ahead. The wait ends after DOUBT_LIMIT_S if no supervisor decides; then this rank may
save at steps of its own, which never become a checkpoint.

Each rank then shows the number of the schedule that it has settled, and the next proposal waits for all of
them.

`fence` orders accesses to shared memory, also on processors that reorder stores (Arm: Grace hosts, Graviton).
Python has no memory barrier, but its locks are made of atomic operations: no earlier access passes the store
that releases a lock, no later access passes the load that takes the next one, and Arm keeps these two in
order. So what is written before `fence()` is seen before what is written after it, and the same for reads. On
x86 all stores are seen in order anyway. A fence costs some tenths of a microsecond.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from threading import Lock

from jurymast.core.checkpoints.cadence import NEVER, Schedule


def fence() -> None:
    """Make this thread's accesses before the fence visible to other processes before those after it."""
    lock = Lock()  # a new one: nobody waits for it, and no fork inherits it locked
    with lock:
        pass
    with lock:
        pass


SCHEDULE_BYTES = 64
# In native byte order: such a word is read and written in one piece.
WORD = struct.Struct("q")
DOUBT_LIMIT_S = 30.0
POLL_S = 0.001


class _Word(IntEnum):
    NUMBER = 0  # the number of the schedule in the next three words; 0: none, or it is being written
    AT = 1
    FIRST = 2
    EVERY = 3
    DECIDED = 4  # the number of the newest schedule decided on, negative if it was withdrawn


class ScheduleRecord:
    """The words for the schedule at the end of the ranks' page, written by the agent."""

    def __init__(self, page: mmap.mmap | memoryview[int]) -> None:
        self._page = page
        self._start = len(page) - SCHEDULE_BYTES

    def __getitem__(self, word: _Word) -> int:
        found: int = WORD.unpack_from(self._page, self._start + WORD.size * word)[0]
        return found

    def __setitem__(self, word: _Word, value: int) -> None:
        WORD.pack_into(self._page, self._start + WORD.size * word, value)

    @property
    def number(self) -> int:
        return self[_Word.NUMBER]

    @property
    def decided(self) -> int:
        return self[_Word.DECIDED]

    def take(self, schedule: Schedule, decided: int) -> None:
        """Write the supervisor's proposal, and its decision if there is one (else 0). No rank sees half of a
        proposal, because its number is written last."""
        if schedule.number != self.number:
            self[_Word.NUMBER] = 0
            fence()
            self[_Word.AT] = schedule.at
            self[_Word.FIRST] = schedule.first
            self[_Word.EVERY] = schedule.every
            fence()
            self[_Word.NUMBER] = schedule.number
        if decided:
            self[_Word.DECIDED] = decided

    def read(self) -> Schedule | None:
        """Return the proposed schedule; None if there is none, or if it is just being written."""
        number = self.number
        fence()
        found = Schedule(number, *(self[word] for word in (_Word.AT, _Word.FIRST, _Word.EVERY)))
        fence()
        return found if number and self.number == number else None


def wait_for(known: Callable[[], bool]) -> None:
    """Wait until `known`, at most DOUBT_LIMIT_S."""
    end = time.monotonic() + DOUBT_LIMIT_S
    while not known() and time.monotonic() < end:
        time.sleep(POLL_S)


class ScheduleFollower:
    """Follows the schedule for one rank. `settled` is called with the number of each schedule that this rank
    has decided on. Without `repeat`, for scripts with their own cadence, only a schedule's first save is due.
    `wait` waits until its argument returns true, for a limited time."""

    def __init__(
        self,
        record: ScheduleRecord,
        settled: Callable[[int], None],
        *,
        repeat: bool = True,
        wait: Callable[[Callable[[], bool]], None] = wait_for,
    ) -> None:
        self._record = record
        self._settled = settled
        self._repeat = repeat
        self._wait = wait
        self._seen = 0
        self._pending: Schedule | None = None
        self._following: Schedule | None = None
        self._due = NEVER

    def due(self, step: int) -> bool:
        """Return whether `step` is to be saved. Must be called once in each step, after its heartbeat."""
        number = self._record.number
        if number != self._seen:
            self._look()
        pending = self._pending
        if pending is not None and (step >= pending.at or self._record.decided == -pending.number):
            self._settle(pending)
        return step >= self._due

    def passed(self, step: int) -> None:
        """Note that `step` was saved, or that its save failed."""
        if self._following is not None:
            following = self._following.due_after(step)
            self._due = following if self._repeat or following == self._following.first else NEVER

    def next_due(self, step: int) -> int:
        """Return the first step after `step` to be saved, as far as that is decided; for callers that do not
        stop at every step."""
        if self._record.number != self._seen:
            self._look()
        due = NEVER if self._following is None else self._following.due_after(step)
        pending = self._pending
        if pending is not None and self._record.decided == pending.number and due >= pending.at:
            return pending.due_after(step)
        return due

    def _look(self) -> None:
        found = self._record.read()
        if found is not None:
            self._pending, self._seen = found, found.number

    def _settle(self, schedule: Schedule) -> None:
        """Decide, at the schedule's step, whether to follow it; all ranks decide alike."""
        self._wait(lambda: abs(self._record.decided) >= schedule.number)
        if self._record.decided == schedule.number:
            self._following = schedule
            self._due = schedule.first
        self._pending = None
        self._settled(schedule.number)
