"""Observes an agent's ranks: their step heartbeats, their processes, and the events they send."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.nodes.silence import IDLE_SHARE
from jurymast.worker.link import SLOT_BYTES, RankBeat, read_slot
from jurymast.worker.schedule import SCHEDULE_BYTES, ScheduleRecord

# Seconds between reports of the parts of steps, which are less urgent than heartbeats.
TIMED_INTERVAL_S = 2.0
# If a look comes more than so many intervals after the last one, the whole machine stood still.
OVERSLEPT = 4.0
# The kernel counts processor time in ticks of 10 ms, which would be a large part of a shorter window.
BUSY_WINDOW_S = 0.4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankMemory:
    """The page for the ranks' heartbeats and the pipe for their events, both anonymous and the agent's.

    The ranks open them through /proc/<agent>/fd, as only the run's user can, and they always end with the
    agent.
    """

    def __init__(self, ranks: int) -> None:
        size = max(mmap.PAGESIZE, ranks * SLOT_BYTES + SCHEDULE_BYTES)
        self._page_fd = os.memfd_create("jurymast-ranks", os.MFD_CLOEXEC)
        os.ftruncate(self._page_fd, size)
        self.page = mmap.mmap(self._page_fd, size)
        self._schedule = ScheduleRecord(self.page)
        self._asked: within.Cadence | None = None
        self.events_fd, self._events_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""
        self.ranks = ranks

    @property
    def page_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._page_fd}"

    @property
    def events_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._events_in}"

    def environment(self) -> dict[str, str]:
        """Return variables for the ranks."""
        return {"JURYMAST_PAGE": self.page_path, "JURYMAST_EVENTS": self.events_path}

    def clear(self) -> None:
        """Forget the last attempt's heartbeats and its schedule of saves."""
        self.page[:] = bytes(len(self.page))
        self._asked = None

    def heard(self, event: within.Cadence) -> None:
        self._asked = event

    def order(self, order: msg.CadenceSet) -> None:
        self._schedule.take(order.schedule, order.decided)

    def cadence(self) -> msg.CadenceReport | None:
        """Return, for the heartbeat, the schedule that the ranks see and the cadence that their script wants;
        None without a Checkpointer. Must be called before the ranks are looked at."""
        asked = self._asked
        if asked is None:
            return None
        return msg.CadenceReport(self._schedule.number, self._schedule.decided, asked.steps, asked.seconds)

    def beats(self) -> list[RankBeat]:
        return [read_slot(self.page, local_rank) for local_rank in range(self.ranks)]

    def trains(self, pids: Sequence[int]) -> list[int]:
        """Return the ids of the processes that train, given those that were started: a program starts its
        Python as another process."""
        return [beat.pid or pid for pid, beat in zip(pids, self.beats(), strict=False)]

    def read_events(self) -> list[within.FromRanks]:
        """Return the events sent since the last call."""
        try:
            data = os.read(self.events_fd, 65536)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [within.read_rank(line) for line in lines]


@dataclass
class ProcessWatch:
    """CPU use and state of one rank's process, from /proc/PID/stat."""

    cpu_s: float = 0.0
    seen_at: float = 0.0
    last: float = 0.0  # when the rank last gave a sign of life
    slept_s: float = 0.0  # how long the machine had slept by then
    idle_since: float | None = None
    stopped_since: float | None = None


@dataclass
class RankWatch:
    """Makes the reports by which the supervisor judges hangs, from heartbeats and process states. `programs`:
    each rank is started as a program that starts its Python itself."""

    memory: RankMemory
    interval_s: float = 0.5
    programs: bool = False
    watches: dict[int, ProcessWatch] = field(default_factory=dict)
    _looked_at: float = field(default_factory=time.monotonic)
    _slept_s: float = 0.0
    _timed_at: float = 0.0

    def look(self, pids: list[int]) -> list[msg.RankReport]:
        """Return one report per local rank. Ages are in seconds at the time of the call, without the time for
        which the whole machine slept (a paused virtual machine), which is no rank's fault."""
        now = time.monotonic()
        slept_before_s = self._slept_s
        self._slept_s += max(0.0, now - self._looked_at - OVERSLEPT * self.interval_s)
        woke, self._looked_at = self._slept_s > slept_before_s, now
        new = ProcessWatch(seen_at=now, slept_s=self._slept_s)
        self.watches = {pid: self.watches.get(pid) or replace(new) for pid in pids}
        report: list[msg.RankReport] = []
        for pid, beat in zip(pids, self.memory.beats(), strict=False):
            watch = self.watches[pid]
            _update(watch, beat.pid or pid, now)
            if woke or (self.programs and not beat.pid):  # a program may wait before it starts Python
                watch.idle_since = None
            last = max(beat.beat_at, beat.phase_at) if beat.pid else 0.0
            if last != watch.last:
                watch.slept_s = slept_before_s if watch.last else watch.slept_s
                watch.last = last
            slept_s = self._slept_s - watch.slept_s
            report.append(
                msg.RankReport(
                    step=beat.step,
                    beats=beat.beats,
                    explicit=bool(beat.explicit),
                    phase=beat.phase if beat.pid else "starting",
                    quiet_s=round(max(0.0, now - last - slept_s), 4) if last else None,
                    beat_s=round(now - beat.beat_at, 4) if beat.beat_at else None,
                    longest_s=round(beat.longest_s, 4),
                    settled=beat.settled,
                    idle_s=round(now - watch.idle_since, 3) if watch.idle_since is not None else 0.0,
                    stopped_s=round(now - watch.stopped_since, 3) if watch.stopped_since is not None else 0.0,
                )
            )
        return report

    def times(self) -> list[msg.Times] | None:
        """Return the times of the parts of all ranks' steps; None if they were returned recently."""
        now = time.monotonic()
        if now < self._timed_at + TIMED_INTERVAL_S:
            return None
        self._timed_at = now
        return [msg.Times(*beat.timed) for beat in self.memory.beats()]


def _update(watch: ProcessWatch, pid: int, now: float) -> None:
    state, cpu_s = process_state(pid)
    if state == "T":
        watch.stopped_since = now if watch.stopped_since is None else watch.stopped_since
    else:
        watch.stopped_since = None
    passed = now - watch.seen_at
    if passed >= BUSY_WINDOW_S:
        busy = (cpu_s - watch.cpu_s) / passed > IDLE_SHARE
        watch.idle_since = None if busy else (watch.idle_since or watch.seen_at)
        watch.cpu_s, watch.seen_at = cpu_s, now


def process_state(pid: int) -> tuple[str, float]:
    """Return (state letter, CPU seconds used so far) of a process; ("", 0.0) if it is gone. See proc(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
