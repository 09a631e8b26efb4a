"""Health probe: shared storage. The run's own directory and the training's data must respond in time.

Storage that hangs blocks every thread that looks at it. So each path has its own thread, which may wait
forever: the others continue, and the path is checked again once it responds. Shared storage is not a single
node's fault, so every finding has the kind storage.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jurymast.health.probe import STORAGE, Context, Finding, Probe, Verdict, threshold

INTERVAL_S = 60.0
# A file is written at the first look and then at every tenth, which differs among the nodes: thousands of
# nodes would otherwise load the server.
WRITE_EVERY = 10
CONTENT = b"jurymast tests this storage with this file, which may be removed\n" * 32
NAME = "storage"
FULL = (errno.ENOSPC, errno.EDQUOT)


def probe(context: Context) -> Probe | None:
    """Return the probe; None if there is no path to look at."""
    return StorageProbe(context) if context.paths or context.data_paths else None


@dataclass
class Place:
    """One path. `thread` exists while a look is running; `problem` is the result of the last finished look:
    (code, message)."""

    path: str
    write: bool
    thread: threading.Thread | None = None
    began: float = 0.0
    took_s: float = 0.0
    looks: int = 0
    problem: tuple[str, str] | None = field(default=None)


class StorageProbe:
    name = NAME
    interval_s = INTERVAL_S

    def __init__(self, context: Context) -> None:
        self._limit_s = threshold(context, "storage-slow-s")
        self._full = threshold(context, "storage-used")
        self._mark = context.node or socket.gethostname()
        self._offset = zlib.crc32(self._mark.encode())
        written = dict.fromkeys(context.paths, True)
        self._places = [
            Place(path, write)
            for path, write in {**dict.fromkeys(context.data_paths, False), **written}.items()
        ]

    def look(self, now: float) -> Sequence[Finding]:
        began = time.monotonic()
        for place in self._places:
            if place.thread is None:
                place.began = began
                place.thread = threading.Thread(target=self._try, args=(place,), daemon=True)
                place.thread.start()
        found = []
        for place in self._places:
            if place.thread is not None:
                place.thread.join(max(0.0, began + self._limit_s - time.monotonic()))
            problem = self._problem(place)
            if problem is not None:
                code, message = problem
                found.append(
                    Finding(
                        probe=NAME, code=code, verdict=Verdict.SUSPECT, kind=STORAGE, device=place.path,
                        message=f"{place.path}: {message}", at=now,
                    )
                )  # fmt: skip
        return found

    def remember(self) -> Any:
        """Nothing: each look judges by itself."""
        return {}

    def close(self) -> None:
        """Do nothing: threads that hang end with the process."""

    def _problem(self, place: Place) -> tuple[str, str] | None:
        if place.thread is not None and place.thread.is_alive():
            waiting = time.monotonic() - place.began
            return "storage-hangs", f"no answer for {waiting:.0f} s (limit {self._limit_s:g} s)"
        place.thread = None
        if place.problem is None and place.took_s > self._limit_s:
            return "storage-slow", f"a check took {place.took_s:.0f} s (limit {self._limit_s:g} s)"
        return place.problem

    def _try(self, place: Place) -> None:
        """One look, on the path's own thread."""
        began = time.monotonic()
        due = place.looks == 0 or (place.looks + self._offset) % WRITE_EVERY == 0
        writes, place.looks = place.write and due, place.looks + 1
        try:
            found = os.statvfs(place.path)
            used = 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0
            full = ("storage-full", f"{used:.1%} full (limit {self._full:.0%})")
            place.problem = full if used >= self._full else None
            if writes:
                _write_read_remove(Path(place.path, f".jurymast-health-{self._mark}"))
        except OSError as error:
            place.looks = 0  # try writing again at the next look
            code = "storage-full" if error.errno in FULL else "storage-error"
            place.problem = code, error.strerror or str(error)
        place.took_s = time.monotonic() - began


def _write_read_remove(path: Path) -> None:
    """Raises OSError, also if the content read is not the content written."""
    flags = os.O_RDWR | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags | os.O_CREAT, 0o600)
    try:
        if os.write(file, CONTENT) < len(CONTENT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
        if os.pread(file, len(CONTENT), 0) != CONTENT:
            raise OSError(errno.EIO, "a small file was read back with different contents")
    finally:
        os.close(file)
        path.unlink()
