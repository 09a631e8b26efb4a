"""The one door to files that another user could have made: on shared storage, in /tmp, on a node's own disk.

What is acted on, believed or unpickled must be this user's own: unpickling another's file would run his code.
Of a colleague's run that is only shown, a file must at least be an ordinary one of bounded size. Nothing here
waits for another process: a pipe that somebody has put there opens at once, and is refused. For storage that
hangs every call waits: who has a deadline (`cli/patience.py`) finds in `unanswered` for what, and how long.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import pwd
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
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
# What `own_directory` gives names in.
HELD = "/proc/self/fd/"
# Of a file; an answer of storage that is merely slow does not take long then.
ASKED_AT_ONCE = 64 << 20


# What each thread asks the storage for right now: (path, since when in seconds of the monotonic clock).
_asked: dict[int, tuple[str, float]] = {}


@contextmanager
def asking(path: os.PathLike[str] | str) -> Iterator[None]:
    """While this lasts, this thread waits for the storage of `path`, and does nothing else."""
    thread = threading.get_ident()
    around = _asked.get(thread)
    _asked[thread] = str(path), time.monotonic()
    try:
        yield
    finally:
        if around is None:
            del _asked[thread]
        else:
            _asked[thread] = around[0], time.monotonic()


def unanswered() -> tuple[str, float]:
    """The path that a thread has waited for longest, and how long in seconds; ("", 0.0) when none waits."""
    path, since = min(list(_asked.values()), key=lambda asked: asked[1], default=("", 0.0))
    return _name_of(path), time.monotonic() - since if path else 0.0


def _name_of(path: str) -> str:
    """As people know it, without asking its storage."""
    if not path.startswith(HELD):
        return path
    descriptor, _, rest = path.removeprefix(HELD).partition("/")
    try:
        return os.path.join(os.readlink(f"{HELD}{descriptor}"), rest).rstrip("/")
    except OSError:  # it was closed this moment
        return path


class NotOurs(OSError):
    """Another user owns it, or can write it; one line that names the path and what to do."""

    def __init__(self, path: os.PathLike[str] | str, status: os.stat_result) -> None:
        path = _name_of(str(path))
        todo = "remove it, or choose another path"
        if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
            todo = f"if nobody else has changed anything in it, run: chmod go-w {path}"
        super().__init__(
            f"{path} is not private to this user (owner {user_name(status.st_uid)}, mode "
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
    with asking(place):
        found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode) or not is_ours(found):
        raise NotOurs(place, found)


def owns(place: Path) -> bool:
    """Whether the directory that this name leads to is this user's, and nobody else can put anything in."""
    try:
        found = status(place)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and is_ours(found)


@contextmanager
def own_directory(place: Path) -> Iterator[Path]:
    """A name for this very directory while it is held: whoever may rename what lies around it can give its
    own name to another. Raises NotOurs, OSError."""
    with asking(place):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_ours(found := os.fstat(descriptor)):
            raise NotOurs(place, found)
        yield Path(f"{HELD}{descriptor}")
    finally:
        os.close(descriptor)


def open_own(path: os.PathLike[str] | str, closed: int = OTHERS_WRITE) -> int:
    """A descriptor, for reading, of a file that this user has written. Raises NotOurs, OSError."""
    descriptor = _open(path, os.O_NOFOLLOW)
    if not is_ours(found := os.fstat(descriptor), closed):
        os.close(descriptor)
        raise NotOurs(path, found)
    return descriptor


def reading_own(path: os.PathLike[str] | str) -> BufferedReader:
    """A file that this user has written. Raises NotOurs, OSError."""
    return _buffered(open_own(path), path)


def read_own(path: Path | str, most: int = BYTES_MAX, closed: int = OTHERS_WRITE) -> bytes:
    """Raises NotOurs, OSError."""
    with _buffered(open_own(path, closed), path) as file:
        return _all_of(file, path, most)


# Anybody's.


def status(path: Path | str) -> os.stat_result:
    """Raises OSError."""
    with asking(path):
        return os.stat(path)


def exists(path: Path | str) -> bool:
    """Whether there is anything that this user may see."""
    with asking(path):
        return os.path.exists(path)


def is_directory(path: Path | str) -> bool:
    with asking(path):
        return os.path.isdir(path)


def names(directory: Path | str, pattern: str = "*") -> list[str]:
    """What is in it, in no order. Raises OSError."""
    with asking(directory):
        return fnmatch.filter(os.listdir(directory), pattern)


def found(directory: Path, pattern: str) -> list[Path]:
    """As `Path.glob` with one name: [] for a directory that is not there, or cannot be read."""
    try:
        return [directory / name for name in names(directory, pattern)]
    except OSError:
        return []


def reading(path: Path | str) -> BufferedReader:
    """An ordinary file, whoever wrote it. Raises OSError."""
    return _buffered(_open(path), path)


def read(path: Path | str, most: int = BYTES_MAX) -> bytes:
    """What is in it. Raises OSError, also when that are more than `most` bytes."""
    with reading(path) as file:
        return _all_of(file, path, most)


def load(path: Path | str) -> Any:
    """The JSON in it. Raises OSError, ValueError."""
    return parse(read(path))


def load_own(path: Path | str) -> Any:
    """The JSON in a file that this user has written. Raises NotOurs, OSError, ValueError."""
    return parse(read_own(path))


def parse(data: bytes | str) -> Any:
    """JSON. Raises ValueError, for brackets without end, too."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _open(path: os.PathLike[str] | str, flags: int = 0) -> int:
    # O_NONBLOCK: opening a pipe must not wait for somebody at its other end.
    with asking(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    return descriptor


class _Waiting(FileIO):
    """A file that says when it waits for its storage."""

    def __init__(self, descriptor: int, path: os.PathLike[str] | str) -> None:
        super().__init__(descriptor, "rb")
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        with asking(self._path):
            return super().readinto(memoryview(buffer)[:ASKED_AT_ONCE])

    def readall(self) -> bytes:
        with asking(self._path):
            return super().readall() or b""


def _buffered(descriptor: int, path: os.PathLike[str] | str) -> BufferedReader:
    return BufferedReader(_Waiting(descriptor, path))


def _all_of(file: BufferedReader, path: Path | str, most: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, most is {most}", str(path))
    return file.read(max(size, BYTES_MIN))
