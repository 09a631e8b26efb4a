"""The memory cgroups that a process is in, of version 1 and of version 2, and what the kernel counts there.

See cgroups(7): lines of /proc/PID/cgroup are ID:CONTROLLERS:PATH, of version 2 with ID 0 and no controllers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jurymast.health.readings import text

MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """`path` as the kernel names it, below `mount`. In a container it may be the host's, and the mount the
    container's own cgroup: then it lies outside of what is mounted."""

    version: int
    mount: Path
    path: str

    def upwards(self) -> Iterator[Path]:
        """From the cgroup's directory up to the mount."""
        parts = [part for part in self.path.split("/") if part and part != ".."]
        for count in range(len(parts), -1, -1):
            yield self.mount.joinpath(*parts[:count])

    @property
    def kills_file(self) -> Path | None:
        """What has the counter `oom_kill`; None where there is none."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        places = (self.mount / self.path.lstrip("/"), self.mount)
        return next((place / name for place in places if (place / name).is_file()), None)


def memory_cgroups(own: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> list[Cgroup]:
    """Those of a process; `own`: its /proc/PID/cgroup. [] when that cannot be read."""
    found = []
    for line in (text(own) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # below `unified` where there is version 1 as well
            found += [Cgroup(2, root, path) for root in (mount, mount / "unified")]
        elif "memory" in controllers.split(","):
            found.append(Cgroup(1, mount / "memory", path))
    return found


def where_kills_count(cgroups: Iterable[Cgroup]) -> tuple[str, Path | None]:
    """(the cgroup's path as the kernel names it, "" for none; the file that has the counter `oom_kill` of it,
    None where there is none to be seen)."""
    path = ""
    for cgroup in cgroups:
        if (file := cgroup.kills_file) is not None:
            return cgroup.path, file
        path = path or cgroup.path
    return path, None


def oom_kills(file: Path | None) -> int | None:
    """The counter `oom_kill` in `file`; None when it cannot be read."""
    for line in ((text(file) if file is not None else None) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None
