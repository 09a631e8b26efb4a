"""Memory cgroups of tests, below the one that the tests are in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.waiting import wait_until


@contextmanager
def new_cgroup(below: Path | None = None) -> Iterator[Path]:
    """A memory cgroup without a limit yet, below this one or the one that the tests are in. Skips the test
    where none can be made."""
    parent = below or _own_cgroup()
    place = parent / f"jurymast-test-{os.getpid()}"
    if below is not None and (control := below / "cgroup.subtree_control").exists():
        control.write_text("+memory")  # of version 2
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not limit_file(place).exists():
            pytest.skip("the memory of cgroups cannot be limited here")
        yield place
    finally:
        wait_until("end of all in the cgroup", lambda: _removed(place))


def _removed(place: Path) -> bool:
    """Processes that have just ended, and are listed no more, keep their cgroup for a moment."""
    with suppress(OSError):
        place.rmdir()
    return not place.exists()


def _own_cgroup() -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    mine = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    root = Path("/sys/fs/cgroup")
    return root / "memory" / mine["memory"][1:] if "memory" in mine else root / mine.get("", "/")[1:]


def limit_file(place: Path) -> Path:
    old = place / "memory.limit_in_bytes"
    return old if old.exists() else place / "memory.max"


def leave_bytes(place: Path, size: int) -> None:
    """Set the limit so that the processes in the cgroup can take this much more."""
    old = place / "memory.usage_in_bytes"
    used = old if old.exists() else place / "memory.current"
    limit_file(place).write_text(str(int(used.read_text()) + size))


def kills(place: Path) -> int:
    """How many of its processes were killed for want of memory."""
    old = place / "memory.oom_control"
    lines = (old if old.exists() else place / "memory.events").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def moved_to(place: Path, pids: Iterable[int]) -> Iterator[None]:
    """Have these processes, and all that they start, in the cgroup; all that is left there is moved out at
    the end."""
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended by now
            (place / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for left in (place / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (place.parent / "cgroup.procs").write_text(left)
