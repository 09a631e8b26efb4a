"""What this user alone can have put on a node's own disk, where others may have been first.

Images are unpickled when ranks load them: one that another user has put there would run as this one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

# What anybody but the owner could write.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(OSError):
    """Another user owns it, or can write it; one line that names the path and what to do."""

    def __init__(self, path: Path | str, status: os.stat_result) -> None:
        super().__init__(
            f"{path} is not this user's own (owner {status.st_uid}, mode {stat.filemode(status.st_mode)}): "
            "nothing is read or kept there; remove it, or choose another path"
        )


def make_private(place: Path) -> None:
    """Make a directory for this user alone, where it is missing. Raises NotOurs, OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    check_private(place)


def check_private(place: Path) -> None:
    """Raises NotOurs for what others have put here, or may put something into; OSError."""
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or not _is_ours(status):
        raise NotOurs(place, status)


def open_own(path: Path | str) -> int:
    """A descriptor, for reading, of a file that this user has written. Raises NotOurs, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            raise NotOurs(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
