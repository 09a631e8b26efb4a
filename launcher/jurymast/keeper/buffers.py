"""Memory that the agent owns and ranks map: one memfd a buffer.

A memfd is no file in /dev/shm, so neither the size of that mount nor RemoveIPC nor a job's own /dev/shm
concerns it; it survives the rank that writes into it and is gone with the agent, however that dies. Its
pages are charged to the cgroup of whoever touches them first, which must be the agent.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from jurymast.core.keeper.memory import round_up

_PIECE_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Buffer:
    """`capacity` bytes at most; only what was reserved takes memory. Raises OSError when made. `number`: the
    keeper's for it.

    The size is sealed: nobody can make the pages under a mapping go away, which would end its user by
    SIGBUS. `readers` and `when_idle` belong to `copies.Copies`.
    """

    def __init__(self, capacity: int, number: int = 0) -> None:
        self.capacity = round_up(capacity)
        self.number = number
        self.readers = 0
        self._reserved: list[tuple[int, int]] = []
        self.descriptor = os.memfd_create("jurymast-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.descriptor, self.capacity)
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def path(self) -> str:
        """Where other processes of this user open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def allocated(self) -> int:
        """Bytes of memory that it takes now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def view(self, start: int, end: int) -> memoryview:
        """The bytes themselves. While a view lives, `close` leaves the mapping to it."""
        return memoryview(self.map)[start:end]

    def reserve(self, start: int, end: int) -> None:
        """Take the memory for these bytes, and touch it, so that nobody's first write has to.

        Contents stay. Slow the first time: about 3 GB/s; releases the GIL. Raises OSError when there is no
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

    def prefault(self) -> None:
        """`reserve` all of it."""
        self.reserve(0, self.capacity)

    def _touch(self, at: int, length: int) -> None:
        # Not mmap.madvise: it would hold the GIL, and with it the agent's heartbeats. An older kernel
        # refuses, and the first writer has its pages cleared then; it cannot fail, they are allocated.
        first = ctypes.c_char.from_buffer(self.map, at)
        address = ctypes.c_void_p(ctypes.addressof(first))
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Give the memory back, as soon as nobody maps it any more."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        try:
            self.map.close()
        except BufferError:
            del self.map  # a view of it lives: the mapping goes with the last one
