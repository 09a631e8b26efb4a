"""Reading what is stored: damage, absence and inability are three things, and only the first two say anything
about what is stored.

- Damage: bytes, or their number, differ from what was recorded. It is found for good: it may be marked, and
  older copies take the place of what is damaged. (`BadCheckpoint`, `BadImage`.)
- Absence: nothing has this name, on storage that is there. (`FileNotFoundError`.)
- Inability: whatever else a read ends with, such as a stale handle, a failing disk, no memory, too many open
  files, no permission, a file system that is not mounted. It is tried again for a while; then `Unable` is
  raised. Nothing is marked, removed or set aside for it, and no older copy is taken without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jurymast import foreign
from jurymast.errors import RunDirectoryError

log = logging.getLogger("jurymast.reading")

Result = TypeVar("Result")

# How long one read is tried, from its first failure on: longer than a fail-over of most file servers takes.
PATIENCE_S = 30.0
PAUSES_S = (0.1, 0.3, 1.0, 3.0)


class Unable(OSError):
    """Something stored cannot be read now, although that was tried for a while. The errno, the text and the
    file's name are those of the last failure."""


def conclusive(error: BaseException) -> bool:
    """Whether what a read raised says something about what is stored, rather than that it cannot be read."""
    found = isinstance(error, foreign.NotOurs | foreign.NotAFile | NotADirectoryError)
    return found or not isinstance(error, OSError | MemoryError)


def patiently(read: Callable[[], Result], root: Path, patience_s: float = PATIENCE_S) -> Result:
    """Return what `read` returns, which reads something that was seen in or below the directory `root`: while
    its storage is there, `root` is not empty.

    Raises FileNotFoundError for an absent file, `Unable` for a file that could not be read for `patience_s`
    seconds, and at once what is conclusive.
    """
    began, tries = 0.0, 0
    while True:
        try:
            return read()
        except (OSError, MemoryError) as error:
            if conclusive(error):
                raise
            failure = error
        if isinstance(failure, FileNotFoundError):
            if is_there(root):
                raise failure
            failure = OSError(
                failure.errno, f"{failure.strerror}, and {root} is missing or empty: is its storage mounted?"
            )
        began = began or time.monotonic()
        if time.monotonic() - began >= patience_s:
            raise unable(failure, root) from failure
        time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
        tries += 1


def to_begin(read: Callable[[], Result], patience_s: float = PATIENCE_S) -> Result:
    """Return what `read` returns, files of the run without which a process cannot begin. One that ended
    because storage cannot be read for a moment would be the end of its node for the run, or of the job.
    Raises what `read` raises: what is conclusive at once, and else after `patience_s` seconds."""
    began, tries = 0.0, 0
    while True:
        try:
            return read()
        except RunDirectoryError as error:
            if error.__cause__ is None or conclusive(error.__cause__):
                raise
            began = began or time.monotonic()
            if time.monotonic() - began >= patience_s:
                raise
            log.warning("%s; trying again", error)
        time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
        tries += 1


def is_there(root: Path) -> bool:
    """Whether the directory can be seen, with something in it."""
    try:
        return bool(foreign.names(root))
    except OSError:
        return False


def unable(error: BaseException, place: Path) -> Unable:
    """Say of this failed read that it is one."""
    if isinstance(error, OSError) and error.errno is not None:
        return Unable(error.errno, error.strerror or str(error), error.filename or str(place))
    return Unable(f"{place}: {str(error) or type(error).__name__}")
