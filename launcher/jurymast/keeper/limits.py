"""How much memory this node can still give to checkpoints.

A memfd's pages count against the memory cgroups of the agent, up to the root, and against the machine.
Beyond a cgroup's limit the kernel kills processes of the job, so we ask before we take. The size of
/dev/shm does not matter: nothing lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jurymast.core.checkpoints.foresight import Room

RESERVE_SHARE = 0.05
RESERVE_BYTES = 512 << 20
_MOUNT = Path("/sys/fs/cgroup")


def room(proc: Path = Path("/proc"), mount: Path = _MOUNT) -> Room:
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
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for root in (mount, mount / "unified"):  # the second: both versions at once
                for place in _upwards(root, path):
                    for limit in ("memory.max", "memory.high"):
                        yield from _cgroup(place, limit, "memory.current", "")
        elif "memory" in controllers.split(","):
            for place in _upwards(mount / "memory", path):
                yield from _cgroup(place, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """From the cgroup up to the mount. In a container the path may lie outside of what is mounted."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _cgroup(place: Path, limit_name: str, used_name: str, prefix: str) -> Iterator[Room]:
    limit, used = _text(place / limit_name).strip(), _text(place / used_name).strip()
    if limit.isdigit() and used.isdigit():  # else "max", or not there
        table = _table(place / "memory.stat")
        # Pages of files that were read can be taken back; half of them, as the kernel reckons MemAvailable.
        cache = table.get(f"{prefix}inactive_file", 0) + table.get(f"{prefix}active_file", 0)
        yield _room(int(limit), int(used) - cache // 2, place / limit_name)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
