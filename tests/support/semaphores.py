"""Files of semaphores in /dev/shm, and who still has them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def semaphores() -> set[Path]:
    return set(SHARED_MEMORY.glob("sem.*"))


def abandoned(files: Iterable[Path]) -> set[Path]:
    """Those that no process has mapped: what lives is a test's that runs beside this one. The process that
    made a semaphore has it under another name (see sem_open in glibc), so it is found by its inode."""
    left: dict[tuple[str, str], Path] = {}
    for file in files:
        with suppress(OSError):  # it has just been removed
            found = file.stat()
            device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
            left[device, str(found.st_ino)] = file
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is another user's
            continue
        for line in lines:
            device, inode = line.split(maxsplit=5)[3:5]
            left.pop((device, inode), None)
    return set(left.values())
