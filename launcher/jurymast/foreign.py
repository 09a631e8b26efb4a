"""Reads files that another user could have made: on shared storage, in /tmp, on a node's own disk.

Files that decide anything or are unpickled must be this user's own: unpickling another user's file would run
that user's code. Files of a colleague's run that are only shown must at least be ordinary files of bounded
size. No call waits for another process: a pipe opens at once, and is refused. Every call waits for storage
that hangs; code with a deadline (`cli/patience.py`) finds the path and the time in `unanswered`.
"""

from __future__ import annotations

import errno
import fnmatch
import grp
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

# Mode bits that let users other than the owner write.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Mode bits that let users other than the owner do anything.
OTHERS_ANYTHING = stat.S_IRWXG | stat.S_IRWXO
# Larger than any file of the kind, even for tens of thousands of nodes: the manifest of a checkpoint, or a
# summary of all runs; a plan, or a list of nodes; a note; a batch script, or the variables of a process. No
# limit is for all kinds, because JSON takes up to 30 times its size in memory.
MANIFEST_BYTES_MAX = 32 << 20
PLAN_BYTES_MAX = 8 << 20
NOTE_BYTES_MAX = 1 << 20
SCRIPT_BYTES_MAX = 16 << 20
# Always readable, whatever size the file shows: some files grow while they are read.
BYTES_MIN = 64 << 10
# The directory of the names that `own_directory` yields.
HELD = "/proc/self/fd/"
# Bytes read in one call, so that storage that is merely slow answers soon.
ASKED_AT_ONCE = 64 << 20


# What each thread waits for at the moment: (path, since when in seconds of the monotonic clock).
_asked: dict[int, tuple[str, float]] = {}


@contextmanager
def asking(path: os.PathLike[str] | str) -> Iterator[None]:
    """Mark that this thread waits for the storage of `path`, and does nothing else, inside this context."""
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
    """The path for which a thread has waited longest, and for how many seconds; ("", 0.0) if none waits."""
    path, since = min(list(_asked.values()), key=lambda asked: asked[1], default=("", 0.0))
    return name_of(path), time.monotonic() - since if path else 0.0


def name_of(path: os.PathLike[str] | str) -> str:
    """The path under the name that people know, found without asking its storage."""
    path = str(path)
    if not path.startswith(HELD):
        return path
    descriptor, _, rest = path.removeprefix(HELD).partition("/")
    try:
        return os.path.join(os.readlink(f"{HELD}{descriptor}"), rest).rstrip("/")
    except OSError:  # it was closed in the meantime
        return path


class NotOurs(OSError):
    """Another user owns the file, or can write it. The message, one line, names the path and what to do."""

    def __init__(self, path: os.PathLike[str] | str, status: os.stat_result) -> None:
        path = name_of(path)
        todo = "remove it, or choose another path"
        if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
            todo = f"if nobody else has changed anything in it, run: chmod go-w {path}"
        super().__init__(
            f"{path} is not private to this user (owner {user_name(status.st_uid)}, mode "
            f"{stat.filemode(status.st_mode)}): nothing is read or kept there; {todo}"
        )


class NotAFile(OSError):
    """Something has this name that is not an ordinary file of an allowed size."""


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_ours(status: os.stat_result, closed: int = OTHERS_WRITE) -> bool:
    """Whether this user owns the file, and no bit of `closed` is set in its mode."""
    return status.st_uid == os.geteuid() and not status.st_mode & closed


# Files of this user.


def make_private(place: Path) -> None:
    """Make a directory for this user alone if it is missing. Raises NotOurs, OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    check_private(place)


def check_private(place: Path) -> None:
    """Raise NotOurs if another user made this directory or can write into it. Raises OSError."""
    found = link_status(place)
    if not stat.S_ISDIR(found.st_mode) or not is_ours(found):
        raise NotOurs(place, found)


def owns(place: Path) -> bool:
    """Whether this user owns the directory with this name, and nobody else can write into it. A link is none:
    another user may have made it, to a directory of this user's."""
    try:
        found = link_status(place)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and is_ours(found)


def made(path: Path) -> bool:
    """Whether this user owns the file, whoever else may write it. Raises OSError."""
    return link_status(path).st_uid == os.geteuid()


def behind_made_link(path: Path) -> Path:
    """What a link leads to that this user has made. Raises NotOurs, OSError."""
    with asking(path):
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if (found := os.fstat(descriptor)).st_uid != os.geteuid():
                raise NotOurs(path, found)
            return Path(os.readlink("", dir_fd=descriptor))
        finally:
            os.close(descriptor)


def behind_own_link(place: Path) -> Path:
    """What a link of this user's leads to; `place` itself if it is anything else."""
    try:
        found = link_status(place)
        if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
            with asking(place):
                return Path(os.path.realpath(place))
    except OSError:
        pass
    return place


def who_may_change(place: Path) -> str:
    """Who, besides root, can replace this user's entries in this directory: "" for nobody. Its owner can, and
    whoever may write to it, unless it is sticky. Raises OSError."""
    found = status(place)
    if found.st_uid not in (0, os.geteuid()):
        return user_name(found.st_uid)
    if found.st_mode & stat.S_ISVTX:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "all users"
    if not found.st_mode & stat.S_IWGRP:
        return ""
    with asking(place):  # the bits of the group then stand for all that it names
        if "system.posix_acl_access" in os.listxattr(place):
            return "its access control list (getfacl)"
    return "" if _is_private(found.st_gid) else group_name(found.st_gid)


def temporary_place() -> str:
    """Where temporary files are made: TMPDIR, unless others can replace what is in it. Raises OSError."""
    import tempfile  # takes time, and few commands need it

    place = tempfile.gettempdir()
    return "/tmp" if who_may_change(Path(place)) else place


def group_name(gid: int) -> str:
    try:
        return f"group {grp.getgrgid(gid).gr_name}"
    except KeyError:
        return f"group {gid}"


def _is_private(gid: int) -> bool:
    """Whether this is the group that many systems make for each user alone, and with it a umask of 002."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and set(group.gr_mem) <= {user.pw_name}


@contextmanager
def own_directory(place: Path) -> Iterator[Path]:
    """A name that means this very directory as long as it is held: a user who may rename the directories
    around it could give its own name to another one. Raises NotOurs, OSError."""
    with asking(place):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_ours(found := os.fstat(descriptor)):
            raise NotOurs(place, found)
        yield Path(f"{HELD}{descriptor}")
    finally:
        os.close(descriptor)


def open_own(path: os.PathLike[str] | str, closed: int = OTHERS_WRITE) -> int:
    """Open a file that this user has written; returns a descriptor for reading. Raises NotOurs, OSError."""
    descriptor = _open(path, os.O_NOFOLLOW)
    if not is_ours(found := os.fstat(descriptor), closed):
        os.close(descriptor)
        raise NotOurs(path, found)
    return descriptor


def reading_own(path: os.PathLike[str] | str) -> BufferedReader:
    """Open a file that this user has written. Raises NotOurs, OSError."""
    return _buffered(open_own(path), path)


def read_own(path: Path | str, most: int, closed: int = OTHERS_WRITE) -> bytes:
    """Read a file that this user has written, of at most `most` bytes. Raises NotOurs, OSError."""
    with _buffered(open_own(path, closed), path) as file:
        return _all_of(file, path, most)


def writing(
    path: os.PathLike[str] | str, how: int = os.O_APPEND, mode: int = 0o600, closed: int = OTHERS_WRITE
) -> int:
    """Open a file of this user's to write, at its end; makes it if it is missing, with this mode. Returns a
    descriptor. Raises NotOurs, OSError: nothing is written through a link, and no pipe is waited for."""
    flags = os.O_WRONLY | os.O_CLOEXEC | how
    with asking(path):
        while True:
            try:
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError:
                pass
            try:
                descriptor = _open(path, os.O_NOFOLLOW, flags)
            except FileNotFoundError:  # removed in the meantime
                continue
            if is_ours(found := os.fstat(descriptor), closed):
                return descriptor
            os.close(descriptor)
            raise NotOurs(path, found)


# Files of any user.


def status(path: Path | str) -> os.stat_result:
    """The file's status. Raises OSError."""
    with asking(path):
        return os.stat(path)


def link_status(path: Path | str) -> os.stat_result:
    """The status of the file, or of the link with this name. Raises OSError."""
    with asking(path):
        return os.lstat(path)


def exists(path: Path | str) -> bool:
    """Whether there is a file of any kind that this user may see."""
    with asking(path):
        return os.path.exists(path)


def is_taken(path: Path | str) -> bool:
    """Whether something has this name, even a link that leads nowhere."""
    with asking(path):
        return os.path.lexists(path)


def is_directory(path: Path | str) -> bool:
    with asking(path):
        return os.path.isdir(path)


def names(directory: Path | str, pattern: str = "*") -> list[str]:
    """The names in the directory, in no particular order. Raises OSError."""
    with asking(directory):
        return fnmatch.filter(os.listdir(directory), pattern)


def found(directory: Path, pattern: str) -> list[Path]:
    """Like `Path.glob` with one name; [] for a directory that is missing or cannot be read."""
    try:
        return [directory / name for name in names(directory, pattern)]
    except OSError:
        return []


def reading(path: Path | str) -> BufferedReader:
    """Open an ordinary file, whoever wrote it. Raises OSError."""
    return _buffered(_open(path), path)


def read(path: Path | str, most: int) -> bytes:
    """The file's content. Raises OSError, also for more than `most` bytes."""
    with reading(path) as file:
        return _all_of(file, path, most)


def load(path: Path | str, most: int) -> Any:
    """The JSON value in the file, of at most `most` bytes. Raises OSError, ValueError."""
    return parse(read(path, most))


def load_own(path: Path | str, most: int) -> Any:
    """The JSON value in a file that this user has written, of at most `most` bytes. Raises NotOurs, OSError,
    ValueError."""
    return parse(read_own(path, most))


def parse(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError, also for brackets that are nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _open(path: os.PathLike[str] | str, flags: int = 0, how: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """Open an ordinary file. What it is, is known before it is opened: to open a device may do something."""
    with asking(path):
        found = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        try:
            mode = os.fstat(found).st_mode
            if stat.S_ISLNK(mode):
                raise NotAFile(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if stat.S_ISDIR(mode):
                raise NotAFile(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(mode):
                raise NotAFile(errno.EINVAL, "it is not an ordinary file", str(path))
            try:
                return os.open(f"{HELD}{found}", how)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(found)


class _Waiting(FileIO):
    """A file that marks when it waits for its storage; see `asking`."""

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
        raise NotAFile(errno.EFBIG, f"it has {size} bytes, at most {most} are allowed", str(path))
    return file.read(max(size, BYTES_MIN))
