"""Stops every process of a machine at one instant: the cgroup freezer, or SIGSTOP where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from testcluster.errors import ClusterError, DeadlineError
from testcluster.processes import wait_until

_FREEZE_DEADLINE_S = _EMPTY_DEADLINE_S = 20.0


def find_root() -> Path | None:
    """Where the version 2 cgroup tree is mounted and writable; None in a container without one."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, fstype, options = line.split()[:4]
        if fstype == "cgroup2" and "rw" in options.split(","):
            return Path(target)
    return None


def create(name: str) -> Path | None:
    """Make a cgroup below the tree's root; None when this system has no freezer."""
    root = find_root()
    if root is None:
        return None
    group = root / name
    try:
        group.mkdir(exist_ok=True)
    except OSError:
        return None
    return group if (group / "cgroup.freeze").exists() else None


def remove_all(prefix: str) -> None:
    """Remove the cgroups whose names start so, best effort. Processes that have just ended, and are listed no
    more, keep theirs for a moment."""

    def removed() -> bool:
        for group in remaining(prefix):
            with contextlib.suppress(OSError):
                group.rmdir()
        return not remaining(prefix)

    with contextlib.suppress(DeadlineError):
        wait_until(removed, _EMPTY_DEADLINE_S, "the cgroups to be empty")


def remaining(prefix: str) -> list[Path]:
    """The cgroups whose names start so."""
    root = find_root()
    return sorted(root.glob(f"{prefix}*")) if root else []


def is_frozen(group: Path) -> bool:
    """Whether the machine of this cgroup is frozen."""
    try:
        return (group / "cgroup.freeze").read_text().strip() == "1"
    except OSError:
        return False


def freeze(group: Path | None, pids: Callable[[], list[int]]) -> None:
    """Stop everything, and return when everything stands."""
    if group is None:
        _stop_each(pids)
        return
    (group / "cgroup.freeze").write_text("1")
    events = group / "cgroup.events"
    wait_until(lambda: "frozen 1" in events.read_text(), _FREEZE_DEADLINE_S, "the freezer", poll_s=0.001)


def thaw(group: Path | None, pids: Callable[[], list[int]]) -> None:
    """Let everything go on."""
    if group is not None:
        with contextlib.suppress(FileNotFoundError):
            (group / "cgroup.freeze").write_text("0")
        return
    for pid in pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stop_each(pids: Callable[[], list[int]]) -> None:
    stopped: set[int] = set()
    # A process may be born between the listing and the signal: go on until a round finds nothing new.
    for _ in range(100):
        fresh = set(pids()) - stopped
        if not fresh:
            return
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= fresh
    raise ClusterError("the machine makes processes faster than they can be stopped")


def members(prefix: str) -> list[int]:
    """Processes in the cgroups whose names start so."""
    found: list[int] = []
    for group in remaining(prefix):
        with contextlib.suppress(OSError):
            found += [int(line) for line in (group / "cgroup.procs").read_text().split()]
    return [pid for pid in found if pid != 0]
