"""A rank's link to its node's agent: step heartbeats through shared memory, events through a pipe.

Both are anonymous kernel objects of the agent, opened through /proc/<agent>/fd/N: they are in no file system,
only the run's own user can open them, and they end with the agent. Neither can block or fail the training;
without an agent (plain torchrun) every call does nothing.

A schedule makes all ranks of an attempt save at the same steps, although they exchange no messages.

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

If ranks are about to be placed anew, the schedule says that they stay after its first save: until they are
ended, so that no step is done again, or until there is another schedule, but no longer than DOUBT_LIMIT_S.

`fence` orders accesses to shared memory, also on processors that reorder stores (Arm: Grace hosts, Graviton).
Python has no memory barrier, but its locks are made of atomic operations: no earlier access passes the store
that releases a lock, no later access passes the load that takes the next one, and Arm keeps these two in
order. So what is written before `fence()` is seen before what is written after it, and the same for reads. On
x86 all stores are seen in order anyway. A fence costs some tenths of a microsecond.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from operator import index
from threading import Lock
from typing import TypeAlias

from msgspec.structs import replace

from jurymast.core.state import within
from jurymast.core.state.message import encode
from jurymast.core.state.schedule import NEVER, Schedule


def fence() -> None:
    """Make this thread's accesses before the fence visible to other processes before those after it."""
    lock = Lock()  # a new one: nobody waits for it, and no fork inherits it locked
    with lock:
        pass
    with lock:
        pass


# ---- schedules

SCHEDULE_BYTES = 64
# In native byte order: such a word is read and written in one piece.
WORD = struct.Struct("q")
DOUBT_LIMIT_S = 30.0
POLL_S = 0.001


class _Word(IntEnum):
    NUMBER = 0  # the number of the schedule in the other words; 0: none, or it is being written
    AT = 1
    FIRST = 2
    EVERY = 3
    DECIDED = 4  # the number of the newest schedule decided on, negative if it was withdrawn
    STAYS = 5


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
            self[_Word.STAYS] = schedule.stays
            fence()
            self[_Word.NUMBER] = schedule.number
        if decided:
            self[_Word.DECIDED] = decided

    def read(self) -> Schedule | None:
        """Return the proposed schedule; None if there is none, or if it is just being written."""
        number = self.number
        fence()
        at, first, every = (self[word] for word in (_Word.AT, _Word.FIRST, _Word.EVERY))
        found = Schedule(number, at, first, every, bool(self[_Word.STAYS]))
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

    def stays(self, step: int) -> bool:
        """Return whether the ranks wait after the save of `step`. Then call `stay`."""
        mine = self._following
        return mine is not None and mine.stays and mine.first == step and self._record.number == mine.number

    def stay(self, step: int) -> None:
        """Wait while `stays`, for a limited time."""
        self._wait(lambda: not self.stays(step))

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


# ---- heartbeats and events

SLOT_BYTES = 128
# step, beats, pid, phase, time of the last beat, longest time between beats, time of the last phase change
# (times: seconds on the machine's CLOCK_MONOTONIC)
SLOT = struct.Struct("<qqqqddd")
PHASE_OFFSET = 24
# After them: the number of the newest schedule of saves that the rank has settled.
SETTLED = struct.Struct("q")
# In the second cache line: the number of timed optimizer steps and the total seconds of their parts (see
# `worker.hooks`): forward, backward, update. In native byte order, so that each word is read in one piece.
TIMED = struct.Struct("qddd")
TIMED_OFFSET = 64
# After them: the samples and tokens that the script has given so far.
TRAINED = struct.Struct("dd")
TRAINED_OFFSET = TIMED_OFFSET + TIMED.size
# A rank that has reached the end of its script is ending: only its exit code says whether it is done.
STARTING, STEPPING, RESTORING, SAVING, ENDING, DONE = range(6)
PHASES = ("starting", "stepping", "restoring", "saving", "ending", "done")
# Added to the phase while the script gives its own step numbers, and while steps are counted from such a
# number.
EXPLICIT, NUMBERED = 16, 32
# The first beats are slow (compilation, warm-up): the longest time between beats counts them only until the
# first normal step.
WARM_UP_BEATS = 3
# A write of up to PIPE_BUF bytes to a pipe is atomic, so ranks can share one (pipe(7)).
EVENT_BYTES_MAX = 4096

# Words in memory that several processes share.
Page: TypeAlias = "mmap.mmap | memoryview[int]"

PAGE_VARIABLE = "JURYMAST_PAGE"
EVENTS_VARIABLE = "JURYMAST_EVENTS"
# In place of torchrun's, for ranks that do not have these.
LOCAL_RANK_VARIABLE, WORLD_SIZE_VARIABLE = "JURYMAST_LOCAL_RANK", "JURYMAST_WORLD_SIZE"


@dataclass(frozen=True)
class RankBeat:
    """One rank's slot as the agent reads it; times in seconds of CLOCK_MONOTONIC."""

    step: int
    beats: int
    pid: int
    phase: str
    explicit: bool
    numbered: bool
    beat_at: float
    longest_s: float
    phase_at: float
    settled: int = 0
    timed: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    samples: int = 0
    tokens: int = 0


# The kernel's own limit (PID_MAX_LIMIT).
PID_MAX = 1 << 22


def read_slot(page: Page, local_rank: int) -> RankBeat:
    offset = local_rank * SLOT_BYTES
    step, beats, pid, phase, beat_at, longest_s, phase_at = SLOT.unpack_from(page, offset)
    (settled,) = SETTLED.unpack_from(page, offset + SLOT.size)
    name = PHASES[phase % EXPLICIT] if phase % EXPLICIT < len(PHASES) else "starting"
    timed = TIMED.unpack_from(page, offset + TIMED_OFFSET)
    samples, tokens = map(_whole, TRAINED.unpack_from(page, offset + TRAINED_OFFSET))
    return RankBeat(
        step, beats, pid if 0 < pid <= PID_MAX else 0, name, bool(phase & EXPLICIT), bool(phase & NUMBERED),
        _seconds(beat_at), _seconds(longest_s), _seconds(phase_at), settled,
        (timed[0], *map(_seconds, timed[1:])), samples, tokens,
    )  # fmt: skip


def ended(page: Page, local_rank: int) -> None:
    """Show that this rank has ended, with exit code 0. For the process that has waited for its end."""
    place = local_rank * SLOT_BYTES + PHASE_OFFSET
    (phase,) = WORD.unpack_from(page, place)
    WORD.pack_into(page, place, DONE + phase // EXPLICIT * EXPLICIT)


def _seconds(value: float) -> float:
    """A rank's word, or 0.0 if it is no number of seconds: its whole process may write into the page."""
    return value if 0.0 <= value < math.inf else 0.0


def _whole(value: float) -> int:
    """A rank's word as a number that every reader can hold; 0 if it is none."""
    return round(value) if 0.0 <= value < 2.0**53 else 0


class Link:
    """One rank's connection to its agent. `page` has `SLOT_BYTES` for each local rank, followed by the
    schedule of saves; `events` is the path of a pipe, or "".

    No file stays open: a script gets the same file descriptors as under torchrun."""

    def __init__(self, page: Page | None, events: str, local_rank: int) -> None:
        self._page = page
        self._events = events
        self._offset = local_rank * SLOT_BYTES
        self.attempt_begins()

    def attempt_begins(self) -> None:
        """Begin an attempt, perhaps not the first of this process."""
        # Added to the phase. EXPLICIT once the script reports its own step numbers (`jurymast.step`,
        # Checkpointer): they are absolute, whereas the optimizer hook can only count, from the start of this
        # process or from `resume_at`, which sets NUMBERED.
        self.numbering = 0
        self._step = 0
        # The number that the script gave last, the optimizer's steps since, and how many of them it did for
        # as many numbers between the last two: they number the steps of a script that says only each tenth.
        self._number, self._since, self._every = 0, 0, 0
        self._refused = False
        self._beats = 0
        self._pid = os.getpid()
        self._phase = STARTING
        self._samples = self._tokens = 0.0
        self._beat_at = 0.0
        self._longest_s = 0.0
        self._scaled = False
        self._loss_told = False
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
                self._phase + self.numbering, self._beat_at, self._longest_s, self._phase_at,
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
                STEPPING + self.numbering, now, self._longest_s, self._phase_at,
            )  # fmt: skip

    def timed(self, steps: int, forward_s: float, backward_s: float, update_s: float) -> None:
        """Record how the time of `steps` optimizer steps is divided over their parts, in seconds."""
        if self._page is not None:
            TIMED.pack_into(self._page, self._offset + TIMED_OFFSET, steps, forward_s, backward_s, update_s)

    def trained(self, samples: float, tokens: float) -> None:
        """Add to what all ranks together have trained on. Call it before the step's heartbeat."""
        self._samples += samples
        self._tokens += tokens
        if self._page is not None:
            TRAINED.pack_into(self._page, self._offset + TRAINED_OFFSET, self._samples, self._tokens)

    def optimizer_stepped(self) -> None:
        """Count an optimizer step of this process as a heartbeat, unless the script numbers its steps."""
        if self._phase > STEPPING:
            return
        self._since += 1
        if not self.numbering & EXPLICIT:
            self.beat(self._step + 1)
        elif self._since < self._every:
            self.beat(self._number + self._since)

    def began(self, began: within.BeganAt) -> None:
        """Report where this attempt begins, unless its steps have numbers already."""
        if not self.numbering:
            self.emit(began)

    def is_count(self, step: int) -> bool:
        """Whether so many steps may be done in all: not fewer than the optimizer has done in this process."""
        if self.numbering & EXPLICIT or step >= self._step:
            return True
        if not self._refused and os.environ.get("RANK") == "0":
            import logging  # rarely needed, and scripts set it up themselves

            logging.getLogger("jurymast").warning(
                "jurymast.step(%d) is not used: the optimizer has done %d steps by now, and the number of "
                "all steps is wanted, not that of epochs",
                step, self._step,
            )  # fmt: skip
        self._refused = True
        return False

    def number_given(self, step: int) -> None:
        """The script says that `step` steps are done: from now on its numbers count, not those of its
        optimizer."""
        if self.numbering & EXPLICIT:
            self._every = self._since if step - self._number == self._since else 0
        else:
            self._every = self._step if self._step and step % self._step == 0 else 0
            if os.environ.get("RANK") == "0":
                self.began(within.BeganAt(step=max(0, step - max(1, self._step)), given=True))
        self.numbering |= EXPLICIT
        self._number, self._since = step, 0

    @property
    def next_step(self) -> int:
        return self._step + 1

    def lost(self, step: int, loss: float | None, of: str = "loss") -> None:
        """Report the first loss, or other value, that is not finite; None: that there is none."""
        told = within.NONE if loss is None else str(loss)
        if not (self._loss_told or (loss is not None and math.isfinite(loss))):
            self._loss_told = True
            self.emit(within.LossNotFinite(step=step, loss=told, of=of))

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
        self.numbering |= NUMBERED
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


def local_rank() -> int:
    """Return this rank's number on its node."""
    return int(os.environ.get(LOCAL_RANK_VARIABLE) or os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ.get(WORLD_SIZE_VARIABLE) or os.environ.get("WORLD_SIZE", "1"))


_current: Link | None = None


def current() -> Link:
    """Return this process's link, opened at the first call. Without an agent it does nothing."""
    global _current
    if _current is None or _current._pid != os.getpid():
        page = open_page(os.environ[PAGE_VARIABLE]) if PAGE_VARIABLE in os.environ else None
        events = os.environ.get(EVENTS_VARIABLE, "")
        _current = Link(page, events, local_rank())
    return _current


def step(done: int, loss: float | None = None, *, samples: float = 0, tokens: float = 0) -> None:
    """Report that `done` steps are done since the beginning of the training, not of the attempt.

    For scripts that save by themselves, after each step, or each tenth, and on every rank: reports can then
    tell new steps from those that were done again after a failure. Scripts with a `Checkpointer` call its
    method `step` instead. Costs about a microsecond, and does nothing outside of a run. Raises TypeError if
    `done` is not a whole number.

    `loss`: the newest loss; people are warned of the first that is not finite. `samples`, `tokens`: how many
    all ranks together trained on since the last call; people are shown how many these are a second. A tensor
    on a GPU is waited for."""
    number = index(done)
    link = current()
    if samples or tokens:
        link.trained(float(samples), float(tokens))
    if link.is_count(number):
        link.number_given(number)
        link.beat(number)
    if loss is not None:
        link.lost(number, float(loss))
