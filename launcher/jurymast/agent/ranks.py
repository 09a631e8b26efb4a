"""What the agent sees of its ranks: their step heartbeats, their processes, the events they send."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.messages import CadenceReport, RankReport, Times
from jurymast.core.nodes.silence import IDLE_SHARE
from jurymast.worker.link import SLOT_BYTES, RankBeat, read_slot
from jurymast.worker.schedule import SCHEDULE_BYTES, ScheduleRecord

# What the ranks' steps are made of is told less often than that they step: nobody waits for it (seconds).
TIMED_INTERVAL_S = 2.0
# A look that comes later than so many intervals after the last: not only the ranks stood still.
OVERSLEPT = 4.0
# The kernel counts processor time in ticks of 10 ms: of a shorter time one of them would be much.
BUSY_WINDOW_S = 0.4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankMemory:
    """The page that the ranks beat into and the pipe for their events; both anonymous, both ours.

    They are opened by the ranks through /proc/<agent>/fd, so only the run's user can, and they are gone
    with the agent, however it dies.
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
        """For the ranks."""
        return {"JURYMAST_PAGE": self.page_path, "JURYMAST_EVENTS": self.events_path}

    def clear(self) -> None:
        """Forget the last attempt's beats, and when it was to save."""
        self.page[:] = bytes(len(self.page))
        self._asked = None

    def heard(self, event: within.Cadence) -> None:
        self._asked = event

    def order(self, order: msg.CadenceSet) -> None:
        self._schedule.take(order.schedule, order.decided)

    def cadence(self) -> CadenceReport | None:
        """For the heartbeat, to be asked before the ranks are looked at: their schedule as they see it, and
        what their script wants; None: no Checkpointer."""
        asked = self._asked
        if asked is None:
            return None
        return CadenceReport(self._schedule.number, self._schedule.decided, asked.steps, asked.seconds)

    def beats(self) -> list[RankBeat]:
        return [read_slot(self.page, local_rank) for local_rank in range(self.ranks)]

    def trains(self, pids: Sequence[int]) -> list[int]:
        """The processes that train, of ranks that were started as these: a program's Python has its own."""
        return [beat.pid or pid for pid, beat in zip(pids, self.beats(), strict=False)]

    def read_events(self) -> list[within.FromRanks]:
        """Events sent since the last call."""
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
    last: float = 0.0  # its newest word
    slept_s: float = 0.0  # of the machine, up to then
    idle_since: float | None = None
    stopped_since: float | None = None


@dataclass
class RankWatch:
    """Turns beats and process states into what the supervisor judges hangs by. `programs`: ranks are
    started as what starts their Python itself."""

    memory: RankMemory
    interval_s: float = 0.5
    programs: bool = False
    watches: dict[int, ProcessWatch] = field(default_factory=dict)
    _looked_at: float = field(default_factory=time.monotonic)
    _slept_s: float = 0.0
    _timed_at: float = 0.0

    def look(self, pids: list[int]) -> list[RankReport]:
        """One report a local rank; ages in seconds at the time of the call, without those that the whole
        machine slept through (a virtual machine that was held, say): no rank is to blame for them."""
        now = time.monotonic()
        slept_before_s = self._slept_s
        self._slept_s += max(0.0, now - self._looked_at - OVERSLEPT * self.interval_s)
        woke, self._looked_at = self._slept_s > slept_before_s, now
        new = ProcessWatch(seen_at=now, slept_s=self._slept_s)
        self.watches = {pid: self.watches.get(pid) or replace(new) for pid in pids}
        report: list[RankReport] = []
        for pid, beat in zip(pids, self.memory.beats(), strict=False):
            watch = self.watches[pid]
            _update(watch, beat.pid or pid, now)
            if woke or (self.programs and not beat.pid):  # before its Python it may wait for anything
                watch.idle_since = None
            last = max(beat.beat_at, beat.phase_at) if beat.pid else 0.0
            if last != watch.last:
                watch.slept_s = slept_before_s if watch.last else watch.slept_s
                watch.last = last
            slept_s = self._slept_s - watch.slept_s
            report.append(
                RankReport(
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

    def times(self) -> list[Times] | None:
        """Now and then: what the steps of all ranks are made of."""
        now = time.monotonic()
        if now < self._timed_at + TIMED_INTERVAL_S:
            return None
        self._timed_at = now
        return [beat.timed for beat in self.memory.beats()]


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
    """(state letter, CPU seconds used so far) of a process; ("", 0.0) when it is gone. See proc(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
