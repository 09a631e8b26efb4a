"""For Prolog and Epilog: reports or removes what users without a job left on this node.

Calls no Slurm command, which a Prolog must not do: the processes below slurmstepd show who has a job here.
Leaves alone every user with a job, with a uid below `min_uid`, or in a login session. Always exits with 0,
because a failing Prolog or Epilog drains the node.
"""

from __future__ import annotations

import argparse
import math
import os
import pwd
import re
import signal
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jurymast_site.config import DEFAULT, Config, load
from jurymast_site.system import Log

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
# A job waits for its Prolog: what is left after these limits is left for the next sweep.
LIMIT_S = 5.0
ENTRIES_MAX = 100_000
# Processes and files younger than this may belong to a job that is just starting.
YOUNG_S = 60.0
KILL_AFTER_S = 2.0
POLL_S = 0.05
_OF_SLURM = re.compile(r"/(?:slurm[^/]*|uid_\d+)/")
_OF_LOGIN = re.compile(r"/user\.slice/|/session-[^/]*\.scope")
_GPU_DEVICE = re.compile(r"/dev/(?:nvidia\d+|kfd|dri/renderD\d+)$")


@dataclass(frozen=True)
class Process:
    """A process. `started`, in clock ticks since boot, distinguishes it from a later one with the same
    pid."""

    pid: int
    uid: int
    parent: int
    name: str
    cgroup: str
    started: int
    age_s: float
    slurms: bool = False  # it is a slurmstepd


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="sweep what users without a job left on this node")
    parser.add_argument("--config", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    path: Path = parser.parse_args(arguments).config
    log = Log("jurymast-sweep", "")
    try:
        config = load(path)
        log = Log("jurymast-sweep", config.log)
        sweep(config, log)
    except Exception as error:  # whatever it is: a node must not be drained for it
        log.say(f"failed: {type(error).__name__}: {error}")
    return 0


def sweep(config: Config, log: Log) -> None:
    """Report what is left, and remove what the site's settings say."""
    job_uid = os.environ.get("SLURM_JOB_UID", "")
    end_s = time.monotonic() + LIMIT_S
    found = list(processes(end_s))
    if time.monotonic() > end_s:
        # Who has a job here is not known as long as processes are missing.
        log.say(f"too many processes to look at in {LIMIT_S:g} s: nothing is swept")
        return
    busy = users_with_jobs(found) | ({int(job_uid)} if job_uid.isdigit() and not _is_epilog() else set())
    if config.sweep_processes != "off":
        strays = list(orphans(found, busy, config.min_uid))
        _report_strays(strays, log, end_s)
        if config.sweep_processes == "kill":
            _report_left(end(strays, end_s), log)
    if config.sweep_shared_memory != "off":
        alive = {process.uid for process in processes(end_s)}
        if time.monotonic() > end_s:
            log.say("stale shared memory: all of it is left for the next sweep")
            return
        stale = stale_files(SHARED_MEMORY, alive | busy, config.min_uid, end_s)
        remove = config.sweep_shared_memory == "remove"
        _sweep_files(stale, log, remove=remove, end_s=end_s)


def _report_strays(strays: Sequence[Process], log: Log, end_s: float) -> None:
    """Log one line per user: anybody can leave thousands of processes."""
    for uid in sorted({process.uid for process in strays}):
        theirs = [process for process in strays if process.uid == uid]
        held: set[str] = set()
        for process in theirs:
            held |= gpus_held(process.pid, end_s)
        first = theirs[0]
        others = f", and {len(theirs) - 1} others" if len(theirs) > 1 else ""
        holds = "".join(f", holds {device}" for device in sorted(held))
        log.say(f"stray {described(first)}, {first.age_s:.0f} s old{others}{holds}")


def _report_left(left: Sequence[Process], log: Log) -> None:
    """Log one line per user: there may be thousands."""
    for uid in sorted({process.uid for process in left}):
        theirs = [process for process in left if process.uid == uid]
        others = f", and {len(theirs) - 1} others" if len(theirs) > 1 else ""
        log.say(f"stray {described(theirs[0])}{others}: not ended yet, left for the next sweep")


def _sweep_files(stale: Iterable[tuple[Path, int, int]], log: Log, *, remove: bool, end_s: float) -> None:
    """Log one line per user, and whether all was looked at by `end_s`: anybody can leave a million files."""
    found: dict[int, list[int]] = {}
    too_many = False
    for number, (entry, uid, size) in enumerate(stale):
        if too_many := number >= ENTRIES_MAX:
            break
        found.setdefault(uid, []).append(size)
        if remove:
            _unlink(entry, uid)
    if too_many or time.monotonic() > end_s:
        log.say("stale shared memory: the rest is left for the next sweep")
    for uid, sizes in sorted(found.items()):
        many = f"{len(sizes)} file{'' if len(sizes) == 1 else 's'}"
        log.say(f"stale shared memory of {user(uid)}: {many}, {sum(sizes)} bytes")


def _is_epilog() -> bool:
    return os.environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog")


def processes(end_s: float = math.inf) -> Iterator[Process]:
    """Yield all processes on this node that live, or fewer once `end_s` (time.monotonic) has passed."""
    ticks = os.sysconf("SC_CLK_TCK")
    uptime_s = float((PROC / "uptime").read_text().split()[0])
    for entry in PROC.iterdir():
        if time.monotonic() > end_s:
            return
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            if _has_ended(fields):
                continue
            started = int(fields[19])
            uid, name = entry.stat().st_uid, name.partition("(")[2]
            yield Process(
                pid=int(entry.name), uid=uid, parent=int(fields[1]),
                name=name, cgroup=(entry / "cgroup").read_text(errors="replace"), started=started,
                age_s=uptime_s - started / ticks, slurms=uid == 0 and _is_slurms(entry, name),
            )  # fmt: skip
        except (OSError, IndexError, ValueError):
            continue  # it has ended in the meantime


def _has_ended(fields: Sequence[str]) -> bool:
    """Whether a process has ended, and only its parent has not heard of it. One whose first thread alone has
    ended looks like that as well."""
    return fields[0] == "Z" and int(fields[17]) <= 1


def _is_slurms(process: Path, name: str) -> bool:
    """Whether a process of root's is a slurmstepd. The name alone does not tell: a user's link of this name
    to su, or to another program that runs as root for everybody, gives it to what they start."""
    if not name.startswith("slurmstepd"):
        return False
    try:
        return os.path.basename(os.readlink(process / "exe")).startswith("slurmstepd")
    except PermissionError:  # as in a container without CAP_SYS_PTRACE: nothing may be swept that is Slurm's
        return True


def users_with_jobs(found: Iterable[Process]) -> set[int]:
    """The users with a process that descends from a slurmstepd, or is in one of Slurm's cgroups."""
    by_pid = {process.pid: process for process in found}
    users = set()
    known: dict[int, bool] = {}  # by pid: anybody can nest thousands of processes, and each is looked at once
    for process in by_pid.values():
        if _descends_from_slurm(process, by_pid, known) or _OF_SLURM.search(process.cgroup):
            users.add(process.uid)
    return users


def _descends_from_slurm(process: Process, by_pid: Mapping[int, Process], known: dict[int, bool]) -> bool:
    above: Process | None = process
    way: list[int] = []
    answer = False
    while above is not None:
        if above.pid in known or above.slurms:
            answer = known.get(above.pid, True)
            break
        known[above.pid] = False  # until more is known: pids that are used again may lead in a circle
        way.append(above.pid)
        above = by_pid.get(above.parent)
    known.update(dict.fromkeys(way, answer))
    return answer


def orphans(found: Iterable[Process], busy: set[int], min_uid: int) -> Iterator[Process]:
    """Yield processes of users who have no job here and did not log in."""
    for process in found:
        logged_in = _OF_LOGIN.search(process.cgroup)
        if process.uid >= min_uid and process.uid not in busy and process.age_s >= YOUNG_S and not logged_in:
            yield process


def gpus_held(pid: int, end_s: float = math.inf) -> set[str]:
    """The GPU devices that the process has open, whose memory it may still hold; fewer once `end_s`
    (time.monotonic) has passed: it may have a million files open."""
    held = set()
    try:
        with os.scandir(PROC / str(pid) / "fd") as descriptors:
            for descriptor in descriptors:
                if time.monotonic() > end_s:
                    break
                target = os.readlink(descriptor)
                if _GPU_DEVICE.match(target):
                    held.add(target)
    except OSError:
        pass  # it has ended in the meantime
    return held


def end(strays: Sequence[Process], end_s: float = math.inf) -> list[Process]:
    """Send SIGTERM, then SIGKILL; returns the processes that are left, blocked in the kernel. Once `end_s`
    (time.monotonic) has passed, nothing more is sent or waited for: the next sweep does the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in strays:
            if time.monotonic() > end_s:
                break
            _signal(process, number)
        deadline = min(end_s, time.monotonic() + KILL_AFTER_S)
        while (left := [p for p in strays if _alive(p)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        strays = left
    return list(strays)


def _signal(process: Process, number: signal.Signals) -> None:
    """Signal through a descriptor of the process, so that a later one with the same pid is never hit."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if _alive(process):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _alive(process: Process) -> bool:
    try:
        fields = (PROC / str(process.pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]) == process.started and not _has_ended(fields)
    except (OSError, IndexError, ValueError):
        return False


def stale_files(
    directory: Path, alive: set[int], min_uid: int, end_s: float = math.inf
) -> Iterator[tuple[Path, int, int]]:
    """Yield (path, owner's uid, bytes) of files whose owner has no process and no job here, or fewer once
    `end_s` (time.monotonic) has passed: others may have a million there, too."""
    young = time.time() - YOUNG_S
    with os.scandir(directory) as entries:  # one by one: there may be very many
        for entry in entries:
            if time.monotonic() > end_s:
                return
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            theirs = status.st_uid >= min_uid and status.st_uid not in alive
            # Not the time of the last write, which anybody can set to that of another century.
            if stat.S_ISREG(status.st_mode) and theirs and status.st_ctime < young:
                yield Path(entry.path), status.st_uid, status.st_size


def _unlink(path: Path, uid: int) -> None:
    """Remove the file. The directory is sticky, so only the user could have replaced it in the meantime."""
    try:
        if path.lstat().st_uid == uid:
            path.unlink()
    except OSError:
        pass


def described(process: Process) -> str:
    return f"process {process.pid} ({process.name}) of {user(process.uid)}"


def user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
