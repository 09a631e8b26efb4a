"""Storage that hangs: whoever opens a file sleeps in the kernel, where no signal but the last reaches it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# fanotify(7): asked whether an open is allowed, we leave the kernel without an answer until we are done.
CLASS_CONTENT, CLOEXEC, MARK_ADD = 0x04, 0x01, 0x01
OPEN_PERMISSION, ON_DIRECTORY = 0x10000, 0x40000000
AT_FDCWD = -100


@contextmanager
def hanging(*places: Path) -> Iterator[None]:
    """Opening these files, or listing these directories, does not return before the end of the block. Only of
    what a test has made itself: it is so for every process of this machine."""
    library = ctypes.CDLL(None, use_errno=True)
    if (group := library.fanotify_init(CLASS_CONTENT | CLOEXEC, os.O_RDONLY)) < 0:
        pytest.skip(f"storage can only be made to hang by root: {os.strerror(ctypes.get_errno())}")
    try:
        for place in places:
            mask = ctypes.c_uint64(OPEN_PERMISSION | (ON_DIRECTORY if place.is_dir() else 0))
            if library.fanotify_mark(group, MARK_ADD, mask, AT_FDCWD, os.fsencode(place)):
                pytest.skip(f"storage cannot be made to hang here: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        os.close(group)
