"""How a process becomes a helper that ends together with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# What Slurm may send to processes of a job, and people through it. They are for the ranks, and the agent
# knows what they mean for the run: its helpers ignore them, and ranks begin as if nobody had.
OF_JOBS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM,
)  # fmt: skip
# Those that Python itself ignores, as no other program does.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
# Set where a signal for a step reaches only its tasks, and not all that runs below them: with every
# ProctrackType of Slurm's but linuxproc.
TASKS_ALONE_VARIABLE = "JURYMAST_TASKS_ALONE"
# The kernel's largest, and so the only one that always counts for more than all memory that a process has or
# maps: an agent maps every image, and may be the largest process of its node. See proc_pid_oom_score_adj(5).
OOM_SCORE_FIRST = 1000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STAT_BYTES = 4096  # more than a process's /proc/PID/stat has


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process when the thread that started it ends, for whatever
    reason."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_first() -> None:
    """Have the kernel kill this process and those that it starts from now on before the agent, its storage
    processes, the supervisor and the batch process, when memory runs out. For all that runs others' code.
    Needs no rights; a process may undo it for itself."""
    with contextlib.suppress(OSError):  # without /proc, or if a site forbids it, the kernel chooses by size
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_FIRST), encoding="ascii")


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends, instead of init: none of them
    escapes by a session or a double fork. They must be reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_like(code: int) -> NoReturn:
    """End with the exit code of another process, or by its signal if the code is negative."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def end_at_once(code: int) -> NoReturn:
    """End without taking the interpreter down: that takes 30 ms of a processor, in which nothing happens that
    the kernel does not do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@dataclass(frozen=True)
class _Process:
    """From /proc/PID/stat; see proc_pid_stat(5)."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def _processes() -> Iterator[_Process]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            file = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has ended
            continue
        try:
            fields = os.read(file, STAT_BYTES)
        except OSError:
            continue
        finally:
            os.close(file)
        state, *numbers = fields.rpartition(b")")[2].split()[:4]
        yield _Process(int(name), state.decode(), *map(int, numbers))


def process_state(pid: int) -> tuple[str, float]:
    """Return (state letter, CPU seconds used so far) of a process; ("", 0.0) if it is gone. See proc(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def kill_group(group: int) -> None:
    """Kill a rank's process group. Python's resource tracker in it lives on: it removes the shared memory
    with a name that the others leave behind, and then ends by itself."""
    _kill(lambda: {one.pid for one in _processes() if one.group == group and one.state not in "ZX"})


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal; False if it is gone. See proc(5)."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _kill(found: Callable[[], set[int]]) -> set[int]:
    """Kill the processes that `found` returns, but none that removes what they leave, until it returns no
    others. Return those that it returned last."""
    killed: set[int] = set()
    while True:
        left = found()
        new = {pid for pid in left - killed if not (is_tracker(pid) or is_torchs_manager(pid))}
        if not new:
            return left
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= new


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's multiprocessing. Killed with the others of its
    group, it would leave files of semaphores and shared memory behind."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_torchs_manager(pid: int) -> bool:
    """Whether a process removes the memory that ranks share by torch's strategy `file_system`, two seconds
    after the last of them has ended. Its names are no other rank's."""
    try:
        program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return False
    return program.rpartition(b"/")[2] == b"torch_shm_manager"


# Resource trackers take milliseconds; a process that is killed takes longer only while a driver or storage
# holds it (seconds).
STRAYS_LIMIT_S, STRAYS_POLL_S = 5.0, 0.02


def kill_strays() -> None:
    """Kill all that ranks below this process have left behind, without waiting for it. No rank may run. Ranks
    lead sessions of their own, so what they start is never in this process's session, in which all our own
    processes are."""
    _kill(lambda: _strays([*_processes()]))


def end_strays(
    limit_s: float = STRAYS_LIMIT_S,
    *,
    probes: bool = False,
    spared: Collection[int] = (),
    again: bool = False,
) -> bool:
    """Kill all that ranks have left behind, as `kill_strays` does, and wait for it. False if something is
    left after `limit_s` seconds. `probes`: none runs either, and what they left behind is killed too.
    `spared`: the ids of ranks that live, which keep what they have started. `again`: ranks may start after
    this, and are not held up by what goes by itself and is in nobody's way."""

    def strays() -> set[int]:
        # One look at all processes, of which a node may have thousands: what a spared rank starts meanwhile
        # is never without it.
        found = [*_processes()]
        kept = {*spared, *(one.pid for pid in spared for one in _below(pid, found))}
        left = _strays(found, probes=probes) - kept
        return {pid for pid in left if not is_torchs_manager(pid)} if again else left

    end = time.monotonic() + limit_s
    while left := _kill(strays):
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # another process of ours has adopted it
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > end:
            for pid in strays():  # a tracker that does not end
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(STRAYS_POLL_S)
    return True


def kill_below(pid: int) -> None:
    """Kill the group of this process, and all that descends from it, in whatever session or group; but not
    the process itself, which would leave those to others that it still starts."""

    def found() -> set[int]:
        processes = [*_processes()]
        group = {one.pid for one in processes if one.group == pid}
        return (group | {one.pid for one in _below(pid, processes)}) - {pid}

    _kill(found)


def _below(pid: int, processes: Iterable[_Process]) -> Iterator[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    below = [pid]
    while below:
        for process in children.get(below.pop(), ()):
            below.append(process.pid)
            yield process


def _strays(processes: Iterable[_Process], *, probes: bool = False) -> set[int]:
    """Those of the `processes` that descend from this one, in other sessions than its own, without those that
    have ended and wait for another parent to notice. With `probes`, also those in its session that run
    others' code."""
    own, session = os.getpid(), os.getsid(0)
    probes = probes and not _dies_first(own)
    return {
        process.pid for process in _below(own, processes)
        if (process.session != session or (probes and _dies_first(process.pid)))
        and (process.state not in "ZX" or process.parent == own)
    }  # fmt: skip


def _dies_first(pid: int) -> bool:
    """Whether the process, or one that it descends from, has called `die_first`."""
    try:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii")) == OOM_SCORE_FIRST
    except (OSError, ValueError):
        return False


def ignore_signals() -> None:
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_IGN)


def signals_by_default() -> None:
    """Undo `ignore_signals`, in a process that has inherited it."""
    for number in OF_JOBS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_helper(nice: int) -> int:
    """Become the agent's helper: lower the priority by `nice` in favour of the ranks, and ignore the signals
    that Slurm sends to the whole job, since the agent decides when to end. Returns a descriptor for answers
    on the former stdout: what libraries print goes to stderr from now on."""
    os.nice(nice)
    die_with_parent()
    ignore_signals()
    os.umask(0o077)
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def leave_no_core() -> int:
    """Have the kernel write no core file of this process, which would hold the run's secret and the ranks'
    images. Returns the limit that held before, in bytes, for those that it starts for the user."""
    before, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    return before


# Nobody can change the size of memory with these: a page that is gone ends by SIGBUS whoever touches it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def shared_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Make memory of `size` bytes that other processes of this user may map, and can neither shorten nor
    extend. Return its descriptor and its mapping, which no core file has. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(descriptor, size)
        leave_out_of_cores(memory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def leave_out_of_cores(memory: mmap.mmap) -> None:
    """Have core files of this process leave this memory out: the ranks' images, which are the user's data and
    far larger than all the rest. (`coredump_filter` cannot tell them from other shared memory.)"""
    with contextlib.suppress(OSError):  # a kernel that cannot do so writes larger core files
        memory.madvise(mmap.MADV_DONTDUMP)


def allow_core(limit: int) -> None:
    """Restore the limit that `leave_no_core` returned."""
    resource.setrlimit(resource.RLIMIT_CORE, (limit, resource.getrlimit(resource.RLIMIT_CORE)[1]))


REAP_S = 1.0


def ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait so long for a process to end, and else kill it. After that it is waited for only a moment: even
    SIGKILL does not end one that storage blocks."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
        return False
    return True


def log_as(name: str) -> None:
    """Send this process's log to its standard output, the job's log, with the time and `name`."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format=f"%(asctime)s {name}: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )  # fmt: skip


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` shows for this process; 15 characters at most."""
    with contextlib.suppress(OSError):  # only people look at the name
        Path("/proc/self/comm").write_text(name, encoding="utf-8")
