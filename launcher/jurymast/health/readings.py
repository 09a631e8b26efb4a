"""Values from the kernel's files: single values, the recent gain of a counter, and a process's memory
cgroups.

See cgroups(7): lines of /proc/PID/cgroup are ID:CONTROLLERS:PATH, of version 2 with ID 0 and no controllers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def text(path: Path) -> str | None:
    """The stripped text of a small file; None if the file is missing or the driver does not answer (EINVAL,
    EIO, EPERM and others, depending on the device). Such a value is not known, which does not mean zero."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The whole number in a file; None for any other content."""
    said = text(path)
    return int(said) if said is not None and said.lstrip("-").isdigit() else None


class Gains:
    """The gain of a counter within the last `window_s` seconds, and since the first look.

    Counters of devices are lifetime totals: the first value is the baseline. A counter that falls was reset,
    and counts from its new value. One that stands at its `largest` value counts no further, so its gain is a
    lower bound: what was gained stays, because nothing shows that no more came.
    """

    def __init__(self, window_s: float, largest: int | None = None) -> None:
        self._window_s = window_s
        self._largest = largest
        self._last: int | None = None
        self._gained: deque[tuple[float, int]] = deque()
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether the counter stands at its largest value."""
        return self._last is not None and self._last == self._largest

    def add(self, now: float, value: int | None) -> int:
        """Add a value; returns the gain within the window that ends at `now` (seconds). None stands for one
        that could not be read: what was gained stays, too."""
        if value is not None:
            gain = value - self._last if self._last is not None else 0
            if gain > 0:
                self._gained.append((now, gain))
                self.total += gain
            self._last = value
            while self._gained and self._gained[0][0] <= now - self._window_s and not self.full:
                self._gained.popleft()
        return sum(gain for _, gain in self._gained)

    def remember(self) -> Any:
        """All of it as JSON, for `recall`."""
        return {"last": self._last, "gained": list(self._gained), "total": self.total}

    def recall(self, memory: Any) -> None:
        """Go on where another one was. Raises KeyError, TypeError or ValueError for anything else than what
        `remember` returned."""
        self._last = None if memory["last"] is None else int(memory["last"])
        self._gained = deque((float(at), int(gain)) for at, gain in memory["gained"])
        self.total = int(memory["total"])


# Kernel functions in which a process waits for shared storage: those of the file systems and of FUSE, and the
# wait for a page of any file.
_STORAGE_WAITS = (
    "nfs", "rpc_", "lustre", "ll_", "cl_", "ptlrpc", "ldlm", "osc_", "gpfs", "fuse", "ceph", "cifs",
    "request_wait_answer", "folio_wait", "wait_on_page",
)  # fmt: skip


def waits_for_storage(where: str) -> bool:
    """Whether a process in the kernel function `where` (/proc/PID/wchan) waits for storage."""
    return any(where.lstrip("_").startswith(word) or f"_{word}" in where for word in _STORAGE_WAITS)


def stands_in(pid: int, proc: Path = Path("/proc")) -> tuple[str, str]:
    """A process's state (R, S, D, ...) and the kernel function in which it waits; "" if not known."""
    state = (text(proc / str(pid) / "stat") or "").rpartition(")")[2].split()
    where = text(proc / str(pid) / "wchan") or ""
    return (state[0] if state else ""), where.strip("0")


MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """A cgroup. `path` is its name in the kernel, below `mount`. In a container the path may be the host's,
    while the mount shows the container's own cgroup: then the cgroup is outside the mount."""

    version: int
    mount: Path
    path: str

    def upwards(self) -> Iterator[Path]:
        """The directories from the cgroup's up to the mount."""
        parts = [part for part in self.path.split("/") if part and part != ".."]
        for count in range(len(parts), -1, -1):
            yield self.mount.joinpath(*parts[:count])

    @property
    def kills_file(self) -> Path | None:
        """The file with the counter `oom_kill`; None if there is none."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        places = (self.mount / self.path.lstrip("/"), self.mount)
        return next((place / name for place in places if (place / name).is_file()), None)


def memory_cgroups(own: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> list[Cgroup]:
    """The memory cgroups of a process; `own`: its /proc/PID/cgroup. [] if that cannot be read."""
    found = []
    for line in (text(own) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # with version 1 it is below `unified`
            found += [Cgroup(2, root, path) for root in (mount, mount / "unified")]
        elif "memory" in controllers.split(","):
            found.append(Cgroup(1, mount / "memory", path))
    return found


def where_kills_count(cgroups: Iterable[Cgroup]) -> tuple[str, Path | None]:
    """The cgroup whose kills can be counted, as (path as the kernel names it, "" for none; the file with its
    counter `oom_kill`, None if none can be seen)."""
    path = ""
    for cgroup in cgroups:
        if (file := cgroup.kills_file) is not None:
            return cgroup.path, file
        path = path or cgroup.path
    return path, None


def oom_kills(file: Path | None) -> int | None:
    """The counter `oom_kill` in `file`; None if it cannot be read."""
    for line in ((text(file) if file is not None else None) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None
