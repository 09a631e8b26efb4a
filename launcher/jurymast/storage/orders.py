"""Orders to the storage process and its answers, one JSON object per line; and an order while it is
carried out: its limits, and its progress reports."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from jurymast.core.checkpoints.copies import LOCAL, OBJECT, SHARED
from jurymast.core.message import Strange, kind_of, reader
from jurymast.core.texts import size
from jurymast.rundir import renew

LIMIT_S = 1800.0


class ImageAt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's image, in the agent's memory (`/proc/PID/fd/N`) or in a file; `common_path` begins with its
    common part, unless `path` does. `manifest`: its content."""

    rank: int
    path: str
    manifest: str
    common_path: str = ""


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of, omit_defaults=True):
    """`id` is its number; it fails when it takes longer than `limit_s`."""

    tier: ClassVar[str]
    id: int = 0
    limit_s: float = LIMIT_S


class WriteLocal(_Order, frozen=True, kw_only=True):
    """These images of a state to the local disk, in `root`."""

    tier: ClassVar[str] = LOCAL
    root: str
    step: int
    attempt: int
    images: tuple[ImageAt, ...]


class WriteShared(_Order, frozen=True, kw_only=True):
    """This node's images of a state, of `world` ranks, to the shared checkpoint in `root`. All nodes are told
    the same `nonce`; the one that leads brings their parts together, for the run `run` in its directory, and
    then leaves the newest `keep` checkpoints, if given."""

    tier: ClassVar[str] = SHARED
    root: str
    step: int
    attempt: int
    world: int
    images: tuple[ImageAt, ...]
    nonce: str
    lead: bool = False
    run: str = ""
    run_directory: str = ""
    keep: int = 0


class Warm(_Order, frozen=True, kw_only=True):
    """Load what a lead needs, before it has to be quick."""

    tier: ClassVar[str] = SHARED


class Upload(_Order, frozen=True, kw_only=True):
    """A complete step of the directory `root` to `url`/`run`, sealed with the key of that run."""

    tier: ClassVar[str] = OBJECT
    root: str
    step: int
    url: str
    run: str
    run_directory: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of):
    """The order with this number."""

    id: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="said", tag=kind_of, omit_defaults=True):
    """So many bytes were written. `existing`: all of it was there already. `published`: the checkpoint is
    there under its final name; only then its images may go."""

    id: int = 0
    bytes: int = 0
    seconds: float = 0.0
    existing: bool = False
    published: bool = False


class StorageFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="said", tag=kind_of, omit_defaults=True
):
    """Why, in one line that names the path and what to do."""

    id: int = 0
    why: str


AnyOrder = WriteLocal | WriteShared | Warm | Upload
Told = AnyOrder | Cancel
Answer = Done | StorageFailed

read_told: Callable[[bytes], Told | Strange] = reader(Told)
read_answer: Callable[[bytes], Answer | Strange] = reader(Answer)


Item = TypeVar("Item")
Result = TypeVar("Result")

# Files that are written or sent at the same time.
STREAMS = 4

PROGRESS_EVERY_S = 1.0
POLL_S = 0.05
POLL_S_MAX = 0.5
# Of the ranks of a run so many are looked for in a second, by the nodes together.
RANKS_A_SECOND = 20_000.0
# The directory in which something is waited for.
RENEW_EVERY_S = 2.0


class StorageFailure(Exception):
    """An order that cannot be carried out; one line that names the path and what to do."""


class Job:
    """An order, being carried out by one thread (and helpers that it waits for), in at most `limit_s`.
    `wrote` hears of all bytes so far, now and then."""

    def __init__(self, limit_s: float, wrote: Callable[[int], None] = lambda count: None) -> None:
        self.cancelled = threading.Event()
        self.bytes = 0
        self._stopped = False
        self._wrote = wrote
        self._limit_s = limit_s
        self._started = time.monotonic()
        self._told_at = self._started
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Its time counts from here: not while it waits for its turn."""
        self._started = self._told_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def check(self) -> None:
        """Raises StorageFailure when it was cancelled or takes too long."""
        if self.cancelled.is_set():
            raise StorageFailure("it was cancelled")
        if self._stopped:
            raise StorageFailure("another part of it failed")
        if self.seconds > self._limit_s:
            raise StorageFailure(f"it took longer than its limit of {self._limit_s:.0f} s")

    def stop(self) -> None:
        """Have helper threads give up."""
        self._stopped = True

    def wrote(self, count: int) -> None:
        """Count bytes, and say so now and then. Raises as `check` does."""
        self.check()
        with self._lock:
            self.bytes += count
            now = time.monotonic()
            if now - self._told_at < PROGRESS_EVERY_S:
                return
            self._told_at = now
        self._wrote(self.bytes)

    def each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """What `work` gives for each, a few at a time. The first failure ends the others."""
        with ThreadPoolExecutor(STREAMS) as pool:
            tasks = [pool.submit(work, item) for item in items]
            done, waiting = futures.wait(tasks, return_when=futures.FIRST_EXCEPTION)
            if failures := [error for task in done if (error := task.exception())]:
                self.stop()
                for task in waiting:
                    task.cancel()
                raise failures[0]
        return [task.result() for task in tasks]

    def wait(
        self, what: str, look: Callable[[], Result | None], place: Path | None = None, *, ranks: int = 1
    ) -> Result:
        """The first result of `look` that is not None; looked for at a pace that the storage bears from so
        many `ranks`. StorageFailure: `what` did not happen in time."""
        seldom = ranks / RANKS_A_SECOND
        pause = max(POLL_S, 0.1 * seldom)
        renewed = time.monotonic()
        while (result := look()) is None:
            if self.seconds > self._limit_s:
                raise StorageFailure(f"{what} did not come within {self._limit_s:.0f} s")
            self.check()
            self.cancelled.wait(pause)
            pause = min(max(POLL_S_MAX, seldom), pause * 1.2)
            if place is not None and time.monotonic() - renewed > max(RENEW_EVERY_S, seldom):
                renewed = time.monotonic()
                renew(place)
        return result


def explain(error: OSError, path: Path | str) -> str:
    """What went wrong at `path` and what to do about it, on one line."""
    place = error.filename if isinstance(error.filename, str) else str(path)
    if error.errno == errno.ENOSPC:
        return f"no space left at {place} ({_free(place)} free): make room there, or keep fewer checkpoints"
    if error.errno == errno.EDQUOT:
        return f"the disk quota is used up at {place}: make room there, or keep fewer checkpoints"
    if error.errno == errno.EROFS:
        return f"{place} is on a read-only file system: remount it, or choose another path"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {place}: check its owner and mode, or choose another path"
    if error.errno in (errno.EIO, errno.ESTALE):
        return f"{error.strerror} at {place}: the storage is failing, see the node's kernel log"
    return f"{error.strerror or error} at {place}"


def free_bytes(path: Path | str) -> int | None:
    """What a user may still write at `path`, or at its nearest parent that exists; None: unknown."""
    for place in (Path(path), *Path(path).parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def _free(path: str) -> str:
    free = free_bytes(path)
    return "?" if free is None else size(free)
