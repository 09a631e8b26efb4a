"""An agent's ranks: the torchrun host's process, their step heartbeats, processes and events, and their end.

When a rank fails, this module collects the node's evidence: out-of-memory kills, a full /dev/shm, the end of
the rank's log. The supervisor itself sees only an exit code. At each launch it adds the variables that make
ranks work around failing network devices.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jurymast import background, foreign, programs, worker
from jurymast.core.judges import devices
from jurymast.core.judges.devices import work_around
from jurymast.core.judges.silence import IDLE_SHARE
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.findings import NETWORK, Finding, Verdict
from jurymast.core.state.host_messages import Apart, FromHosts, read_host
from jurymast.core.state.message import Unreadable
from jurymast.core.state.texts import signal_name
from jurymast.health.readings import Gains, memory_cgroups, oom_kills, where_kills_count
from jurymast.jobs import has_ended
from jurymast.processes import catches, die_with_parent, kill_group, process_state, shared_memory
from jurymast.worker import epilog
from jurymast.worker.agent_pipe import FD_VARIABLE
from jurymast.worker.link import (
    EVENT_BYTES_MAX,
    SCHEDULE_BYTES,
    SLOT_BYTES,
    RankBeat,
    ScheduleRecord,
    read_slot,
)

# ---- heartbeats and processes

# Seconds between reports of the parts of steps, which are less urgent than heartbeats.
TIMED_INTERVAL_S = 2.0
# If a look comes more than so many intervals after the last one, the whole machine stood still.
OVERSLEPT = 4.0
# The kernel counts processor time in ticks of 10 ms, which would be a large part of a shorter window.
BUSY_WINDOW_S = 0.4


# What a rank's process writes into the pipe by itself, or a part of it.
TOO_LONG = Unreadable("", f"a rank's message has more than {EVENT_BYTES_MAX} bytes")


class RankMemory:
    """The page for the ranks' heartbeats and the pipe for their events, both anonymous and the agent's.

    The ranks open them through /proc/<agent>/fd, as only the run's user can, and they always end with the
    agent.
    """

    def __init__(self, ranks: int) -> None:
        size = max(mmap.PAGESIZE, ranks * SLOT_BYTES + SCHEDULE_BYTES)
        self._page_fd, self.page = shared_memory("jurymast-ranks", size)
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

    def wants_cadence(self, event: within.Cadence) -> None:
        self._asked = event

    def set_cadence(self, order: msg.CadenceSet) -> None:
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
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[: EVENT_BYTES_MAX + 1]  # enough to see that the line is too long
        return [within.read_rank(line) if len(line) <= EVENT_BYTES_MAX else TOO_LONG for line in lines]


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
    _seen: list[RankBeat] = field(default_factory=list)
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
        self._seen = self.memory.beats()[: len(pids)]
        for pid, beat in zip(pids, self._seen, strict=False):
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
                    explicit=beat.explicit,
                    phase=beat.phase if beat.pid or beat.phase == within.DONE else "starting",
                    quiet_s=round(max(0.0, now - last - slept_s), 4) if last else None,
                    beat_s=round(now - beat.beat_at, 4) if beat.beat_at else None,
                    longest_s=round(beat.longest_s, 4),
                    settled=beat.settled,
                    idle_s=round(now - watch.idle_since, 3) if watch.idle_since is not None else 0.0,
                    stopped_s=round(now - watch.stopped_since, 3) if watch.stopped_since is not None else 0.0,
                )
            )
        return report

    def trained(self) -> list[msg.Trained] | None:
        """Return what the ranks' scripts had said by the last look; None if that is nothing."""
        found = [msg.Trained(beat.numbered, beat.samples, beat.tokens) for beat in self._seen]
        return found if any(map(any, found)) else None

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


# ---- the evidence of a failure

SHM = "/dev/shm"
# Logs are on shared storage, which may hang; the failure must be reported anyway.
LOG_LIMIT_S = 0.2
LOG_BYTES = 16_000
LOG_LINES = 3
LOG_CHARACTERS = 600
# A rank that dies of these (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV) may have logged why. Other signals come
# from other processes, and the end of the rank's log does not explain them.
CRASHES = frozenset({-4, -6, -7, -8, -11})
# Where a crash's own report begins: Python's fault handler, C++, NCCL's watchdog, assertions.
_TELLING = re.compile(
    r"fatal python error|terminate called|what\(\):|watchdog|assert|\berror\b", re.IGNORECASE
)


# A kill for want of memory explains ends of ranks for so long: torch's loaders notice the end of a worker
# within 5 s, and what waits for another process may take as long again.
OOM_WINDOW_S = 30.0


# Says which log is to be read: to look for it is to wait for storage as well.
FindLog = Callable[[], Path]


class Evidence:
    """Collects evidence. `kills_file` has the counter `oom_kill` of the agent's cgroup; None if there is
    none."""

    def __init__(self, kills_file: Path | None = None) -> None:
        self._kills_file = kills_file or where_kills_count(memory_cgroups())[1]
        self.attempt_begins()

    def attempt_begins(self) -> None:
        """Ignore the kills so far, which are not of this attempt."""
        self._kills = Gains(OOM_WINDOW_S)
        self.count_kills()

    def count_kills(self) -> int | None:
        """Return how many processes of the node were killed lately for want of memory; None if the cgroup
        does not count them. To be called often: a kill counts from the call that sees it first."""
        kills = oom_kills(self._kills_file)
        lately = self._kills.add(time.monotonic(), kills)
        return None if kills is None else lately

    def look(self, exit_code: int, log: FindLog | None = None) -> dict[str, Any]:
        """Return fields for the report of a failure with this exit code (negative for a signal)."""
        found: dict[str, Any] = {"oom_kills": self.count_kills(), "shm_used": round(used_share(SHM), 4)}
        if log is not None and exit_code != 0:
            found["log"] = end_of(log) if exit_code in CRASHES else last_line(log) if exit_code > 0 else ""
        return found


def used_share(path: str) -> float:
    """Return the used share of the file system at `path`, 0..1; 0.0 if it is unknown."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0.0
    return 1.0 - status.f_bavail / status.f_blocks if status.f_blocks else 0.0


def end_of(log: FindLog) -> str:
    """Return the end of a log; "" if there is none, or if storage does not answer."""
    return telling_end(_last_lines(log))


def telling_end(lines: Sequence[str]) -> str:
    """Return the end of what was said, its lines joined with " | ": from the last line that reports an error,
    or else the last few lines."""
    telling = [place for place, line in enumerate(lines) if _TELLING.search(line)]
    start = telling[-1] if telling else -LOG_LINES
    return " | ".join(lines[start:][:LOG_LINES])[:LOG_CHARACTERS]


def last_line(log: FindLog) -> str:
    """Return the last line of a log, where a program that ends with an exit code often says why."""
    return "".join(_last_lines(log)[-1:])[:LOG_CHARACTERS]


_reader: threading.Thread | None = None  # the newest that reads a log


def _last_lines(find: FindLog) -> list[str]:
    """Return the last lines that are not empty; [] if storage does not answer.

    The event loop waits meanwhile, so nothing is read as long as storage has not answered an earlier call:
    the ranks of a node fail together.
    """
    global _reader
    if _reader is not None and _reader.is_alive():
        return []
    read: list[bytes] = []

    def look() -> None:
        try:
            with foreign.reading(find()) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                read.append(file.read(LOG_BYTES))
        except OSError:
            return

    reader = threading.Thread(target=look, daemon=True)
    try:
        reader.start()
    except RuntimeError:  # no more may be started here, for which ranks fail as well
        return []
    _reader = reader
    reader.join(LOG_LIMIT_S)
    return _lines_of(b"".join(read))


def _lines_of(said: bytes) -> list[str]:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    # What a rank left behind, Python's resource tracker tells there after the rank's end.
    return [line for line in lines if line and "resource_tracker" not in line]


# ---- network devices that fail

WORKED_AROUND = "worked-around"


class NetworkWorkaround:
    """Makes ranks avoid failing network devices. `findings` returns what holds on this node now. `tell`
    reports to the supervisor which devices were left out, as findings of the agent, which cause no action and
    end with the first attempt that uses the device again."""

    def __init__(
        self,
        enabled: bool,
        findings: Callable[[], Sequence[Finding]],
        tell: Callable[[msg.HealthFound], None],
    ) -> None:
        self._enabled = enabled
        self._findings = findings
        self._tell = tell
        self._out: set[str] = set()

    def environment(self, attempt: int) -> dict[str, str]:
        """Return variables for the ranks of `attempt` on this node."""
        if not self._enabled:
            return {}
        users = {name: os.environ.get(name, "") for name in devices.VARIABLES}
        around = work_around(self._findings(), rdma_ports(), interfaces(), users)
        for device in self._out - set(around.devices):
            self._say(device, Verdict.OK, f"the ranks of attempt {attempt} use {device} again")
        values = ", ".join(f"{name}={value}" for name, value in around.environment.items())
        for device in around.devices:
            told = f"the ranks of attempt {attempt} do not use {device} ({values}): {around.reason}"
            self._say(device, Verdict.UNKNOWN, told)
        self._out = set(around.devices)
        return around.environment

    def _say(self, device: str, verdict: Verdict, message: str) -> None:
        now = time.time()
        found = Finding(
            probe="agent", code=WORKED_AROUND, verdict=verdict, kind=NETWORK, device=device, message=message,
            at=now,
        )  # fmt: skip
        self._tell(msg.HealthFound(finding=found, clock=now))


def rdma_ports(sys: Path = Path("/sys")) -> list[str]:
    """List every port of every RDMA device here ("mlx5_0:1"). Only names are read: no driver is asked."""
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


def interfaces(sys: Path = Path("/sys")) -> list[str]:
    """List the names of this machine's network interfaces."""
    return sorted(interface.name for interface in (sys / "class/net").glob("*"))


# ---- the torchrun host's process

LINE_BYTES_MAX = 4 * 1024 * 1024


class HostProcess:
    """One torchrun host. `on_message` gets its messages, `on_end` its exit code and its last words once it
    has ended, `failed` an error in either of these."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        writer: asyncio.StreamWriter,
        on_message: Callable[[FromHosts], None],
        on_end: Callable[[int, str], None],
        reader: asyncio.StreamReader,
        errors: socket.socket,
        failed: background.Failed,
        epilogs: bool,
    ) -> None:
        self._process = process
        self._epilogs = epilogs
        self._writer = writer
        self._said = b""
        self._heard = [
            background.start(self._read(reader, on_message), failed),
            background.start(self._pass_on(errors), failed),
        ]
        self._waits = background.start(self._wait(on_end), failed)

    @classmethod
    async def start(
        cls,
        plan: dict[str, Any],
        environment: dict[str, str],
        on_message: Callable[[FromHosts], None],
        on_end: Callable[[int, str], None],
        failed: background.Failed,
    ) -> HostProcess:
        """Start a host in this `environment`, in which its `plan`, which has no secret, is passed as well.
        Output joins the agent's.

        The command line is that of the ranks, which are forked from this interpreter."""
        ours, theirs = socket.socketpair()
        errors, their_errors = socket.socketpair()
        with theirs, their_errors:
            values = {**environment, FD_VARIABLE: str(theirs.fileno())}
            # A program's command line is not for Python: `-c ""` is a stand-in that the server never runs.
            module = ["-c", ""] if plan["program"] else ["-m"] if plan["module"] else []
            process = await asyncio.create_subprocess_exec(
                *programs.at_once([sys.executable, "-u", *module, plan["script"], *plan["arguments"]]),
                env=worker.variables({"server": plan}, values),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, cwd=plan["directory"],
                stderr=their_errors.fileno(),
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        errors.setblocking(False)
        return cls(process, writer, on_message, on_end, reader, errors, failed, any(plan["epilogs"]))

    def tell(self, order: msg.Launch | msg.Stop | Apart) -> None:
        if not self._writer.is_closing():
            self._writer.write(msg.encode(order) + b"\n")

    async def _read(self, reader: asyncio.StreamReader, on_message: Callable[[FromHosts], None]) -> None:
        try:
            while line := await reader.readline():
                on_message(read_host(line))
        except (ConnectionError, ValueError):  # ValueError: a line without an end
            pass

    async def _pass_on(self, errors: socket.socket) -> None:
        """Copy what the host writes to stderr to this process's, and keep the end of it."""
        loop = asyncio.get_running_loop()
        with errors, suppress(ConnectionError):
            while data := await loop.sock_recv(errors, LOG_BYTES):
                self._said = (self._said + data)[-LOG_BYTES:]
                with suppress(OSError):
                    os.write(2, data)

    async def _wait(self, on_end: Callable[[int, str], None]) -> None:
        code = await self._process.wait()
        # Its messages and words from before its end are handled first.
        await asyncio.wait(self._heard, timeout=1.0)
        for one in self._heard:  # no message may follow its end
            one.cancel()
        on_end(code, telling_end(_lines_of(self._said)))

    def kill(self) -> None:
        try:
            self._process.send_signal(signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def end(self) -> None:
        """Kill the host, because unloading torch would take a second. Its ranks have ended or were signalled,
        and it has nothing to save. What runs after them may first come to its end."""
        if self._epilogs:
            self._writer.close()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), epilog.LIMIT_S)
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._heard, self._waits, return_exceptions=True)
        self._writer.close()


IMPORT_LIMIT_S = 120.0
IMPORT_CHARACTERS = 300
_CRASHED_AT = re.compile(r'  File "[^"]*?([^"/]+/[^"/]+)", line (\d+)')


async def unloadable(environment: dict[str, str], directory: str) -> str:
    """Return why a Python with this environment cannot load torch: the last line of what it says, or how it
    ends; "" if it can, or if that takes too long. Raises OSError."""
    loads = [sys.executable, "-X", "faulthandler", "-c", "import torch.distributed"]
    process = await asyncio.create_subprocess_exec(
        *programs.at_once(loads), env=environment, cwd=directory,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        _, told = await asyncio.wait_for(process.communicate(), IMPORT_LIMIT_S)
    except asyncio.TimeoutError:
        return ""
    finally:  # also if the agent is told to leave in the meantime
        with suppress(ProcessLookupError):
            process.kill()
    lines = told.decode(errors="replace").strip().splitlines()
    return _why_not_loaded(process.returncode or 0, lines)[:IMPORT_CHARACTERS]


def _why_not_loaded(code: int, lines: Sequence[str]) -> str:
    if code < 0:  # a library for another processor or of another build; the place is faulthandler's first
        places = [f", at {found[1]}:{found[2]}" for line in lines if (found := _CRASHED_AT.match(line))]
        return f"{signal_name(-code)} while Python loaded torch{''.join(places[:1])}"
    return (lines[-1] if lines else f"exit code {code} while Python loaded torch") if code else ""


async def end_ranks(pids: Sequence[int], grace_s: float) -> None:
    """Send SIGTERM, so that the user's handlers run, and SIGKILL to those still there after `grace_s`."""
    signal_ranks(pids, signal.SIGTERM)
    await gone(pids, grace_s)
    signal_ranks(pids, signal.SIGKILL)


async def gone(pids: Sequence[int], limit_s: float) -> None:
    """Wait until the processes are gone, at most `limit_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while loop.time() < end and not all(map(has_ended, pids)):
        await asyncio.sleep(0.01)


def tell_ranks(pids: Sequence[int], trains: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to the ranks with these ids, of which those in `trains` are the processes that train: a
    program that catches it gets it, as Slurm's task would, and otherwise the Python that it has started. What
    else ranks have started, such as loader workers, gets none, and most of that would end by it."""
    for pid, train in zip(pids, trains, strict=True):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid if catches(pid, number) else train, number)


def signal_ranks(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal the process groups of the ranks with these ids. The server reaps ranks as soon as they end, and
    then their ids may be reused; hence the check of the environment.
    """
    for pid in pids:
        try:
            if b"JURYMAST_" in Path(f"/proc/{pid}/environ").read_bytes():
                kill_group(pid) if number == signal.SIGKILL else os.killpg(pid, number)
        except OSError:
            continue
