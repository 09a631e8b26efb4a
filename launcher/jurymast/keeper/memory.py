"""The memory that a node gives to checkpoints: how much it can still give, and the buffers that ranks map.

A buffer is a memfd, not a file in /dev/shm, so that the size of that mount, RemoveIPC and a job's own
/dev/shm do not matter. It survives the rank that writes into it and always ends with the agent. Its pages are
charged to the cgroup of the process that touches them first, which must be the agent: they count against the
agent's memory cgroups, up to the root, and against the machine. Beyond a cgroup's limit the kernel kills
processes of the job, so `room` is checked before memory is taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from jurymast.core.keeper.holding import round_up
from jurymast.core.state.messages import Room
from jurymast.health.readings import MOUNT, memory_cgroups, number, text
from jurymast.keeper.manifest import SlotRecord, SlotWord
from jurymast.processes import shared_memory

RESERVE_SHARE = 0.05
RESERVE_BYTES = 512 << 20


def room(proc: Path = Path("/proc"), mount: Path = MOUNT) -> Room:
    """Return how much memory the tightest limit on this process leaves. Limits that cannot be read are
    ignored."""
    rooms = [*_cgroups(proc, mount), *_machine(proc)]
    return min(rooms, key=lambda one: one.free, default=Room(0, f"{proc}/meminfo, which cannot be read"))


def _room(limit: int, used: int, file: Path) -> Room:
    reserve = max(int(limit * RESERVE_SHARE), RESERVE_BYTES)
    return Room(max(0, limit - used - reserve), str(file))


def _machine(proc: Path) -> Iterator[Room]:
    values = {name.rstrip(":"): value * 1024 for name, value in _table(proc / "meminfo").items()}
    if "MemAvailable" in values and "MemTotal" in values:
        total = values["MemTotal"]
        yield _room(total, total - values["MemAvailable"], proc / "meminfo")


def _cgroups(proc: Path, mount: Path) -> Iterator[Room]:
    """Yield the room under each limit at or above this process's cgroup, for cgroup versions 1 and 2."""
    for cgroup in memory_cgroups(proc / "self" / "cgroup", mount):
        for place in cgroup.upwards():
            if cgroup.version == 1:
                yield from _cgroup(place, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                for limit in ("memory.max", "memory.high"):
                    yield from _cgroup(place, limit, "memory.current", "")


def _cgroup(place: Path, limit_name: str, used_name: str, prefix: str) -> Iterator[Room]:
    limit, used = number(place / limit_name), number(place / used_name)
    if limit is not None and used is not None:  # otherwise "max", or missing
        table = _table(place / "memory.stat")
        # Cached pages of files can be reclaimed; half of them count, as in the kernel's MemAvailable.
        cache = table.get(f"{prefix}inactive_file", 0) + table.get(f"{prefix}active_file", 0)
        yield _room(limit, used - cache // 2, place / limit_name)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in (text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


class ImageBuffer(Protocol):
    """Memory that ranks map: see `MappedBuffer`."""

    number: int
    capacity: int
    readers: int
    descriptor: int

    @property
    def path(self) -> str: ...
    @property
    def allocated(self) -> int: ...
    def __getitem__(self, span: slice, /) -> memoryview: ...
    def write(self, at: int, data: bytes) -> None: ...
    def copy(self, source: Any, start: int, end: int) -> None: ...
    def reserve(self, start: int, end: int) -> None: ...
    def close(self) -> None: ...


_PIECE_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class MappedBuffer:
    """A buffer of up to `capacity` bytes; only reserved bytes take memory. `number` is the keeper's. Raises
    OSError.

    `copies.CopyTable` counts the `readers`.
    """

    def __init__(self, capacity: int, number: int = 0) -> None:
        self.capacity = round_up(capacity)
        self.number = number
        self.readers = 0
        self._reserved: list[tuple[int, int]] = []
        self.descriptor, self.map = shared_memory("jurymast-image", self.capacity)

    @property
    def path(self) -> str:
        """The path at which other processes of this user open the buffer."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def allocated(self) -> int:
        """Bytes of memory that the buffer takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def __getitem__(self, span: slice) -> memoryview:
        """Return a view of these bytes. The mapping outlives `close` for as long as the view exists."""
        return memoryview(self.map)[span]

    def write(self, at: int, data: bytes) -> None:
        self.map[at : at + len(data)] = data

    def copy(self, source: MappedBuffer, start: int, end: int) -> None:
        """Copy these bytes; not through slices, which would hold the GIL and delay the agent's heartbeats."""
        if start < end:
            first, last = (ctypes.c_char.from_buffer(buffer.map, start) for buffer in (source, self))
            ctypes.memmove(ctypes.addressof(last), ctypes.addressof(first), end - start)

    def reserve(self, start: int, end: int) -> None:
        """Take the memory for these bytes and touch its pages, so that no first write has to.

        Contents stay. Slow the first time (about 3 GB/s); releases the GIL. Raises OSError if there is no
        memory.
        """
        if any(first <= start and end <= last for first, last in self._reserved):
            return
        start -= start % mmap.PAGESIZE
        for at in range(start, end, _PIECE_BYTES):
            length = min(end - at, _PIECE_BYTES)
            os.posix_fallocate(self.descriptor, at, length)
            self._touch(at, length)
        self._reserved.append((start, end))

    def _touch(self, at: int, length: int) -> None:
        # Not mmap.madvise, which would hold the GIL and delay the agent's heartbeats. If an older kernel
        # refuses, the first write clears the pages; it cannot fail, because they are allocated.
        first = ctypes.c_char.from_buffer(self.map, at)
        address = ctypes.c_void_p(ctypes.addressof(first))
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Free the memory as soon as no process maps it any more."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        try:
            self.map.close()
        except BufferError:
            del self.map  # views still exist: the mapping ends with the last of them


def published(words: SlotRecord) -> bool:
    """Return whether the rank has written an image into this free slot."""
    seq = words[SlotWord.SEQ]
    return seq % 2 == 0 and seq != words[SlotWord.FREED]


def discard_unpublished(words: SlotRecord) -> None:
    """Discard what a dead rank began to write or published unseen. Only here does the agent write a word of
    the rank's."""
    words[SlotWord.SEQ] = words[SlotWord.FREED]


def offer(words: SlotRecord, buffer: ImageBuffer) -> None:
    """Give the rank this buffer to write into."""
    _show(words, buffer, words[SlotWord.SEQ])


def install(words: SlotRecord, buffer: ImageBuffer) -> None:
    """Give the rank an image that it did not write. It can read this slot, but not write into it."""
    _show(words, buffer, words[SlotWord.SEQ] - 2)


def free(words: SlotRecord) -> None:
    """Let the rank write into the slot again."""
    words[SlotWord.FREED] = words[SlotWord.SEQ]


def withdraw(words: SlotRecord) -> bool:
    """Take a free buffer from the rank; False if the rank is writing into it."""
    descriptor = words[SlotWord.FD]
    words[SlotWord.FD] = 0  # from now on the rank does not begin to write
    if words[SlotWord.SEQ] != words[SlotWord.FREED]:
        words[SlotWord.FD] = descriptor
        return False
    return True


def _show(words: SlotRecord, buffer: ImageBuffer, freed: int) -> None:
    words[SlotWord.FREED] = freed
    words[SlotWord.CAPACITY] = buffer.capacity
    words[SlotWord.GENERATION] = buffer.number
    words[SlotWord.FD] = buffer.descriptor
