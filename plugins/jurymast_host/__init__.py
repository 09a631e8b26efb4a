"""Health probe: the host's memory, local disks, processes blocked in the kernel, memory errors, kernel log.

A shortage before the run has done anything is the node's own: `suspect`. A later shortage may be caused by
the run, and would appear on another node as well: `unknown`, which only names the cause of a failure.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jurymast.health.probe import (
    APPLICATION,
    HARDWARE,
    HOST,
    NOT_OBSERVABLE,
    STORAGE,
    Context,
    Finding,
    Probe,
    Verdict,
    threshold,
)
from jurymast.health.readings import (
    memory_cgroups,
    oom_kills,
    stands_in,
    text,
    waits_for_storage,
    where_kills_count,
)
from jurymast_host.kernel_log import KernelLog
from jurymast_host.memory import uncorrectable

INTERVAL_S = 10.0
# Reading all processes costs more than everything else together.
PROCESSES_EVERY_S = 60.0
NETWORK_TYPES = (
    "nfs", "lustre", "gpfs", "mmfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "wekafs", "glusterfs",
    "pvfs", "orangefs", "afs", "daos",
)  # fmt: skip
NAME = "host"
_NOT_THE_DISK = (errno.ENOENT, errno.ENOTDIR, errno.EACCES)


def probe(context: Context) -> Probe | None:
    return HostProbe(context)


class HostProbe:
    """Looks at the host. `root` is where proc, sys and dev are: "/" except in tests."""

    name = NAME
    interval_s = INTERVAL_S

    def __init__(self, context: Context, root: Path = Path("/")) -> None:
        self._context = context
        self._root = root
        cgroup, self._oom_file = where_kills_count(
            memory_cgroups(root / "proc/self/cgroup", root / "sys/fs/cgroup")
        )
        memory = context.memory or {}
        self._disks = [path for path in _local_directories(context) if not _is_shared(path, root)]
        # If the cgroup counts its own kills, the kernel log can only add those of others.
        self._log = KernelLog(
            root, context, cgroup if self._oom_file is None else "",
            directories=("/", "/var", *self._disks), after=int(memory.get("log", -1)),
        )  # fmt: skip
        self._oom_kills = oom_kills(self._oom_file)
        self._memory_errors = self._errors_now = uncorrectable(self._root)
        self._short_at_start: set[tuple[str, str]] | None = None
        self._still: dict[int, tuple[str, float]] = {}
        if memory:
            self._oom_kills, self._memory_errors = memory["oom_kills"], memory["memory_errors"]
            self._errors_now = memory["errors_now"]
            self._short_at_start = {(code, device) for code, device in memory["short_at_start"]}
            self._still = {int(pid): (mark, since) for pid, (mark, since) in memory["still"].items()}
        self._stuck: list[Finding] = []
        self._processes_due = 0.0

    def look(self, now: float) -> Sequence[Finding]:
        shortages = [
            *self._memory(), *self._filesystem("/dev/shm", "shm-full", "shm-used"),
            *(f for path in self._disks for f in self._filesystem(path, "disk-full", "disk-used")),
        ]  # fmt: skip
        if self._short_at_start is None:
            fresh = self._context.fresh
            self._short_at_start = {(short.code, short.device) for short in shortages if fresh}
        if now >= self._processes_due:
            self._processes_due = now + PROCESSES_EVERY_S
            self._stuck = list(self._processes(now))
        held = [*map(self._judged, shortages), *self._load(), *self._memory_error(), *self._stuck]
        return [*held, *self._oom(now), *self._log.look(now)]

    def remember(self) -> Any:
        """The baselines, what was short at the start, and how far the kernel's log was read."""
        return {
            "oom_kills": self._oom_kills, "memory_errors": self._memory_errors,
            "errors_now": self._errors_now, "short_at_start": sorted(self._short_at_start or ()),
            "still": {str(pid): list(known) for pid, known in self._still.items()}, "log": self._log.last,
        }  # fmt: skip

    def close(self) -> None:
        self._log.close()

    def _judged(self, shortage: Finding) -> Finding:
        if shortage.verdict is not Verdict.UNKNOWN:
            return shortage
        at_start = (shortage.code, shortage.device) in (self._short_at_start or ())
        return replace(shortage, verdict=Verdict.SUSPECT if at_start else Verdict.UNKNOWN)

    def _limit(self, name: str) -> float:
        return threshold(self._context, name)

    def _memory(self) -> Iterator[Finding]:
        fields = dict(line.split(":", 1) for line in (text(self._root / "proc/meminfo") or "").splitlines())
        try:
            total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        except (KeyError, ValueError):
            return
        limit = self._limit("memory-available")
        if free < limit * total:
            yield _finding(
                "memory-low", HOST,
                f"{free / 2**30:.1f} of {total / 2**30:.0f} GiB memory available (limit {limit:.0%})",
            )  # fmt: skip

    def _filesystem(self, path: str, code: str, limit_name: str) -> Iterator[Finding]:
        try:
            found = os.statvfs(path)
        except OSError as error:
            # The run itself may have removed a directory, but it does not make a disk fail.
            verdict = Verdict.UNKNOWN if error.errno in _NOT_THE_DISK else Verdict.SUSPECT
            said = f"{path}: {error.strerror}"
            yield _finding("disk-error", HOST, said, verdict=verdict, device=path)
            # What was found there before cannot be judged now.
            yield _finding(NOT_OBSERVABLE, HOST, said, device=path)
            return
        used = 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0
        if used >= (limit := self._limit(limit_name)):
            yield _finding(code, HOST, f"{path} is {used:.1%} full (limit {limit:.0%})", device=path)
        inodes = 1 - found.f_favail / found.f_files if found.f_files else 0.0
        if inodes >= (limit := self._limit("inodes-used")):
            said = f"{path} has used {inodes:.1%} of its inodes (limit {limit:.0%})"
            yield _finding("inodes-used-up", HOST, said, device=path)

    def _load(self) -> Iterator[Finding]:
        said = text(self._root / "proc/loadavg")
        if not said:
            return
        cores = os.cpu_count() or 1
        load = float(said.split()[2])
        if load / cores >= (limit := self._limit("load-per-core")):
            yield _finding(
                "load-high", HOST, f"15-minute load {load:.0f} on {cores} cores (limit {limit:g} per core)"
            )

    def _oom(self, now: float) -> Iterator[Finding]:
        """Kills of the job's processes by the kernel because the job had used up its memory."""
        kills = oom_kills(self._oom_file)
        if kills is None:
            return
        before, self._oom_kills = self._oom_kills, kills
        if before is not None and kills > before:
            yield _finding(
                "oom-kill", APPLICATION, at=now, once=True,
                message=f"the job's memory was used up: the kernel killed {kills - before} of its processes",
            )  # fmt: skip

    def _memory_error(self) -> Iterator[Finding]:
        errors = uncorrectable(self._root)
        self._errors_now = self._errors_now if errors is None else errors
        if self._errors_now is None or self._memory_errors is None:
            return
        gained = self._errors_now - self._memory_errors
        if gained >= self._limit("host-memory-errors"):
            said = f"{gained} uncorrectable errors of the host's memory since the first look (EDAC)"
            yield _finding("memory-uncorrectable", HARDWARE, said, verdict=Verdict.BAD)

    def _processes(self, now: float) -> Iterator[Finding]:
        """Find this user's processes that are blocked in the kernel (state D, never scheduled in between)."""
        still: dict[int, tuple[str, float]] = {}
        limit = self._limit("stuck-process-s")
        for pid in _own_processes(self._root / "proc"):
            mark = _still_mark(self._root / "proc" / str(pid))
            if not mark:
                continue
            before, since = self._still.get(pid, ("", now))
            still[pid] = (mark, since if before == mark else now)
            if now - still[pid][1] >= limit:
                yield self._stuck_process(pid, now - still[pid][1])
        self._still = still

    def _stuck_process(self, pid: int, seconds: float) -> Finding:
        _, where = stands_in(pid, self._root / "proc")
        name = text(self._root / "proc" / str(pid) / "comm") or "?"
        on_storage = waits_for_storage(where)
        return _finding(
            "process-stuck", STORAGE if on_storage else HOST, device=f"pid {pid}",
            verdict=Verdict.SUSPECT if where and not on_storage else Verdict.UNKNOWN,
            message=f"{name} (pid {pid}) has been blocked in the kernel for {seconds:.0f} s"
            + (f", in {where}" if where else "; only root can see where"),
        )  # fmt: skip


def _finding(
    code: str, kind: str, message: str, *, verdict: Verdict = Verdict.UNKNOWN, device: str = "",
    at: float = 0.0, once: bool = False,
) -> Finding:  # fmt: skip
    return Finding(
        probe=NAME, code=code, verdict=verdict, kind=kind, message=message, device=device, at=at, once=once
    )


def _local_directories(context: Context) -> list[str]:
    found = [tempfile.gettempdir()]
    if context.local_path:
        path = Path(context.local_path)
        found.append(str(next((p for p in (path, *path.parents) if p.is_dir()), path)))
    return list(dict.fromkeys(found))


def _is_shared(path: str, root: Path) -> bool:
    """Whether `path` is on storage shared with other nodes, which is not this probe's business. Reads only
    the table of mounts, not a file system."""
    best, kind = "", ""
    for line in (text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        mounted = before.split()[4]
        inside = path == mounted or path.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(best):
            best, kind = mounted, after.split()[0]
    return kind.startswith(NETWORK_TYPES)


def _own_processes(proc: Path) -> Iterator[int]:
    uid = os.getuid()
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit():
                try:
                    if entry.stat().st_uid == uid:
                        yield int(entry.name)
                except OSError:
                    continue  # it has ended in the meantime


def _still_mark(folder: Path) -> str:
    """A mark of a process in uninterruptible sleep that changes when the process is scheduled; "" for
    others."""
    stat = text(folder / "stat")
    if stat is None or stat.rpartition(")")[2].split()[0] != "D":
        return ""
    started = stat.rpartition(")")[2].split()[19]
    switches = [line for line in (text(folder / "status") or "").splitlines() if "ctxt_switches" in line]
    return " ".join([started, *switches])
