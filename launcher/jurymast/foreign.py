"""The one door to files that another user could have made: on shared storage, in /tmp, on a node's own disk.

What is acted on, believed or unpickled must be this user's own: unpickling another's file would run his code.
Of a colleague's run that is only shown, a file must at least be an ordinary one of bounded size. Nothing here
waits: a pipe that somebody has put there opens at once, and is refused.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

# What anybody but the owner could write.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# What anybody but the owner could do.
OTHERS_ANYTHING = stat.S_IRWXG | stat.S_IRWXO
# More than any plan, manifest or note has, for tens of thousands of nodes too.
BYTES_MAX = 256 << 20
# Read in any case: some files grow while they are looked at.
BYTES_MIN = 64 << 10


class NotOurs(OSError):
    """Another user owns it, or can write it; one line that names the path and what to do."""

    def __init__(self, path: Path | str, status: os.stat_result) -> None:
        todo = "remove it, or choose another path"
        if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
            todo = f"if nobody else has put anything there: chmod go-w {path}"
        super().__init__(
            f"{path} is not this user's own alone (owner {user_name(status.st_uid)}, mode "
            f"{stat.filemode(status.st_mode)}): nothing is read or kept there; {todo}"
        )


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_ours(status: os.stat_result, closed: int = OTHERS_WRITE) -> bool:
    """`closed`: what of its mode must not be set."""
    return status.st_uid == os.geteuid() and not status.st_mode & closed


# This user's own.


def make_private(place: Path) -> None:
    """Make a directory for this user alone, where it is missing. Raises NotOurs, OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    check_private(place)


def check_private(place: Path) -> None:
    """Raises NotOurs for what others have put here, or may put something into; OSError."""
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or not is_ours(status):
        raise NotOurs(place, status)


def owns(place: Path) -> bool:
    """Whether the directory that this name leads to is this user's, and nobody else can put anything in."""
    try:
        status = os.stat(place)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_ours(status)


@contextmanager
def own_directory(place: Path) -> Iterator[Path]:
    """A name for this very directory while it is held: whoever may rename what lies around it can give its
    own name to another. Raises NotOurs, OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_ours(status := os.fstat(descriptor)):
            raise NotOurs(place, status)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def open_own(path: Path | str, closed: int = OTHERS_WRITE) -> int:
    """A descriptor, for reading, of a file that this user has written. Raises NotOurs, OSError."""
    descriptor = _open(path, os.O_NOFOLLOW)
    if not is_ours(status := os.fstat(descriptor), closed):
        os.close(descriptor)
        raise NotOurs(path, status)
    return descriptor


def read_own(path: Path | str, most: int = BYTES_MAX, closed: int = OTHERS_WRITE) -> bytes:
    """Raises NotOurs, OSError."""
    with open(open_own(path, closed), "rb") as file:
        return _all_of(file, path, most)


# Anybody's.


def reading(path: Path | str) -> BufferedReader:
    """An ordinary file, whoever wrote it. Raises OSError."""
    return open(_open(path), "rb")


def read(path: Path | str, most: int = BYTES_MAX) -> bytes:
    """What is in it. Raises OSError, also when that are more than `most` bytes."""
    with reading(path) as file:
        return _all_of(file, path, most)


def load(path: Path | str) -> Any:
    """The JSON in it. Raises OSError, ValueError."""
    return parse(read(path))


def parse(data: bytes | str) -> Any:
    """JSON. Raises ValueError, for brackets without end, too."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _open(path: Path | str, flags: int = 0) -> int:
    # O_NONBLOCK: opening a pipe must not wait for somebody at its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return descriptor


def _all_of(file: BufferedReader, path: Path | str, most: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, most is {most}", str(path))
    return file.read(max(size, BYTES_MIN))
