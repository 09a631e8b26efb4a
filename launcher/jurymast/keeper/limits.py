"""How much memory this node can still give to checkpoints.

A memfd's pages count against the memory cgroups of the agent, up to the root, and against the machine.
Beyond a cgroup's limit the kernel kills processes of the job, so we ask before we take. The size of
/dev/shm does not matter: nothing lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jurymast.core.checkpoints.foresight import Room
from jurymast.health.cgroups import MOUNT, memory_cgroups
from jurymast.health.readings import number, text

RESERVE_SHARE = 0.05
RESERVE_BYTES = 512 << 20


def room(proc: Path = Path("/proc"), mount: Path = MOUNT) -> Room:
    """The tightest of all limits over this process. A limit that cannot be read is none."""
    rooms = [*_cgroups(proc, mount), *_machine(proc)]
    return min(rooms, key=lambda one: one.free, default=Room(0, f"{proc}/meminfo, which cannot be read"))


def _room(limit: int, used: int, file: Path) -> Room:
    reserve = max(int(limit * RESERVE_SHARE), RESERVE_BYTES)
    return Room(max(0, limit - used - reserve), str(file))


def _machine(proc: Path) -> Iterator[Room]:
    values = {name.rstrip(":"): value * 1024 for name, value in _table(proc / "meminfo").items()}
    if "MemAvailable" in values and "MemTotal" in values:
        total = values["MemTotal"]
        yield _room(total, total - values["MemAvailable"], proc / "meminfo")


def _cgroups(proc: Path, mount: Path) -> Iterator[Room]:
    """One for each limit at or above this process's cgroup, of version 2 and of version 1."""
    for cgroup in memory_cgroups(proc / "self" / "cgroup", mount):
        for place in cgroup.upwards():
            if cgroup.version == 1:
                yield from _cgroup(place, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                for limit in ("memory.max", "memory.high"):
                    yield from _cgroup(place, limit, "memory.current", "")


def _cgroup(place: Path, limit_name: str, used_name: str, prefix: str) -> Iterator[Room]:
    limit, used = number(place / limit_name), number(place / used_name)
    if limit is not None and used is not None:  # else "max", or not there
        table = _table(place / "memory.stat")
        # Pages of files that were read can be taken back; half of them, as the kernel reckons MemAvailable.
        cache = table.get(f"{prefix}inactive_file", 0) + table.get(f"{prefix}active_file", 0)
        yield _room(limit, used - cache // 2, place / limit_name)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in (text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
