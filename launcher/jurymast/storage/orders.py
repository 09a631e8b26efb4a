"""Orders to the storage process and its answers, one JSON object per line; and jobs, which carry an order out
within its limits and report progress."""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from jurymast import foreign
from jurymast.core.checkpoints.writes import STILL_LIMIT_S
from jurymast.core.state.images import LOCAL, OBJECT, SHARED
from jurymast.core.state.message import Unreadable, kind_of, reader
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.texts import size

LIMIT_S = STILL_LIMIT_S
# How often an order that makes progress says so.
PROGRESS_EVERY_S = 5.0


class ImageAt(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's image, in the agent's memory (`/proc/PID/fd/N`) or in a file. The file at `common_path` begins
    with its common part, unless the one at `path` does. `manifest` has the manifest's text."""

    rank: int
    path: str
    manifest: str
    common_path: str = ""


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of, omit_defaults=True):
    """An order. `id` is its number; it fails if it makes no progress for `limit_s`, however long it takes."""

    tier: ClassVar[str]
    id: int = 0
    limit_s: float = LIMIT_S


class WriteLocal(_Order, frozen=True, kw_only=True):
    """Write these images of a state to `root` on the local disk."""

    tier: ClassVar[str] = LOCAL
    root: str
    step: int
    attempt: int
    images: tuple[ImageAt, ...]


class WriteShared(_Order, frozen=True, kw_only=True):
    """Write this node's images of a state of `world` ranks to the shared checkpoint in `root`, phase by
    phase: each but the lead's first is begun by a Continue. All nodes get the same `nonce`. The lead
    completes the checkpoint, for the run `run` with its directory, and then keeps only the newest `keep`
    checkpoints, if given."""

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
    """Load in advance what the lead needs."""

    tier: ClassVar[str] = SHARED


class Upload(_Order, frozen=True, kw_only=True):
    """Upload a complete step of the directory `root` to `url`/`run`, sealed with the key of that run. Then
    keep only the newest `keep` there, if given."""

    tier: ClassVar[str] = OBJECT
    root: str
    step: int
    url: str
    run: str
    run_directory: str
    keep: int = 0


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of):
    """Go on with this phase of the order with this number. `parts`: see `messages.ContinueWrite`."""

    id: int
    phase: WritePhase
    parts: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of):
    """Cancel the order with this number."""

    id: int


class _Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="said", tag=kind_of, omit_defaults=True):
    """The answer to the order `id`."""

    id: int = 0


class Done(_Answer, frozen=True, kw_only=True):
    """The order is done, and this many bytes were written. `existing`: the step existed already. `published`:
    the checkpoint has its final name; only then may its images be dropped."""

    bytes: int = 0
    existing: bool = False
    published: bool = False


class StorageFailed(_Answer, frozen=True, kw_only=True):
    """The order failed; `why` names the path and what to do, on one line. `damaged`: the rank of whose lent
    image some bytes are not what was hashed; -1: none was found. `gone`: an image was there no longer."""

    why: str
    damaged: int = -1
    gone: bool = False


class Reached(_Answer, frozen=True, kw_only=True):
    """This phase of the order is done, and the next one is waited for. It is not the last answer."""

    phase: WritePhase


class Progress(_Answer, frozen=True, kw_only=True):
    """The order goes on: it has written this many bytes so far. It is not the last answer."""

    bytes: int


AnyOrder = WriteLocal | WriteShared | Warm | Upload
Told = AnyOrder | Continue | Cancel
Answer = Done | StorageFailed

read_told: Callable[[bytes], Told | Unreadable] = reader(Told)
read_answer: Callable[[bytes], Answer | Reached | Progress | Unreadable] = reader(Answer | Reached | Progress)


Item = TypeVar("Item")
Result = TypeVar("Result")

# The number of files written or sent at the same time.
STREAMS = 4


class StorageFailure(Exception):
    """An order cannot be carried out; the message names the path and what to do, on one line."""


class DamagedImage(StorageFailure):
    """Some bytes of the image of `rank`, as it was lent, are not what was hashed."""

    def __init__(self, why: str, rank: int) -> None:
        super().__init__(why)
        self.rank = rank


class Job:
    """An order while one thread (with helpers that it waits for) carries it out. It is given up once it has
    made no progress for `limit_s` seconds, and goes on as long as it makes some. `advance` gets the number of
    bytes of each write (0: progress of another kind), `reached` each phase that is done."""

    def __init__(
        self,
        limit_s: float,
        advance: Callable[[int], None] = lambda count: None,
        reached: Callable[[WritePhase], None] = lambda phase: None,
    ) -> None:
        self.cancelled = threading.Event()
        self.bytes = 0
        self._stopped = False
        self._advance, self._reached = advance, reached
        self._turns: queue.SimpleQueue[Continue | None] = queue.SimpleQueue()
        self._limit_s = limit_s
        self._moved_at = time.monotonic()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        self.cancelled.set()
        self._turns.put(None)

    def go_on(self, turn: Continue) -> None:
        self._turns.put(turn)

    def turn(self, reached: WritePhase, following: WritePhase) -> Continue:
        """Tell that this phase is done, and return the order to go on with the `following` one. Raises
        StorageFailure if the order was cancelled meanwhile. How long the other nodes may take depends on
        their storage; the supervisor, which hears of their progress, cancels the order if there is none."""
        self.check()
        self._reached(reached)
        turn = None
        while turn is None or turn.phase is not following:
            turn = self._turns.get()
            self.begin()
            self.check()
        return turn

    def begin(self) -> None:
        """Begin a phase: the time for which the order waited for its turn does not count."""
        self._moved_at = time.monotonic()

    def moved(self) -> None:
        """Note progress that is none in bytes, like a file that was read. Raises what `check` raises."""
        self.wrote(0)

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._moved_at > self._limit_s

    def check(self) -> None:
        """Raise StorageFailure if the order was cancelled or makes no progress."""
        if self.cancelled.is_set():
            raise StorageFailure("it was cancelled")
        if self._stopped:
            raise StorageFailure("another part of it failed")
        if self._late:
            raise StorageFailure(f"it made no progress for {self._limit_s:.0f} s")

    def wrote(self, count: int) -> None:
        """Count the bytes of a write that has come back. Raises StorageFailure if the order was cancelled."""
        self.begin()
        self.check()
        with self._lock:
            self.bytes += count
            self._advance(count)

    def each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of `work` for all items, a few at a time. The first failure ends the others."""
        with ThreadPoolExecutor(STREAMS) as pool:
            tasks = [pool.submit(work, item) for item in items]
            done, waiting = futures.wait(tasks, return_when=futures.FIRST_EXCEPTION)
            if failures := [error for task in done if (error := task.exception())]:
                self._stopped = True
                for task in waiting:
                    task.cancel()
                raise failures[0]
        return [task.result() for task in tasks]


def explain(error: OSError, path: Path | str) -> str:
    """Say what went wrong at `path` and what to do about it, on one line."""
    place = foreign.name_of(error.filename if isinstance(error.filename, str) else str(path))
    if error.errno == errno.ENOSPC:
        free = free_bytes(place)
        room = "?" if free is None else size(free)
        return f"no space left at {place} ({room} free): make room there, or keep fewer checkpoints"
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
    """Return the bytes that a user may still write at `path`, or at its nearest existing parent; None if
    unknown."""
    for place in (Path(path), *Path(path).parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
