"""A slow cable: passes frames between two interfaces of the switch, late and no faster than a rate.

In user space, for many kernels (those of small virtual machines) come without netem. Run as a script with the
switch's network namespace, the two interfaces, the delay in seconds and the rate in bytes a second (0: none);
prints its process id once frames pass, and stays in the background.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testcluster import kernel

_ETH_P_ALL = 0x0003
_SOL_PACKET = 263
# Frames carry a header that says which offloads (segmentation, checksum) the kernel still owes them: without
# it, large TCP segments could not be sent on and their checksums would be wrong.
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 16 * 1024 * 1024
_FRAME_BYTES = 70_000
_QUEUE_BYTES = 64 * 1024 * 1024


class _Direction:
    """Frames on their way from one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, rate: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._rate = rate
        self._free_at = 0.0
        self._queued_bytes = 0
        self._queue: collections.deque[tuple[float, bytes]] = collections.deque()

    @property
    def due(self) -> float:
        """When the next frame must leave (monotonic seconds)."""
        return self._queue[0][0] if self._queue else float("inf")

    def receive(self, now: float) -> None:
        """Take in what has arrived."""
        while True:
            try:
                frame = self.source.recv(_FRAME_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # nothing more, or the cable is pulled
                return
            if self._queued_bytes + len(frame) > _QUEUE_BYTES:
                continue
            start = max(now, self._free_at)
            self._free_at = start + (len(frame) / self._rate if self._rate else 0.0)
            self._queue.append((self._free_at + self._delay_s, frame))
            self._queued_bytes += len(frame)

    def deliver(self, now: float) -> None:
        """Send what is due."""
        while self._queue and self._queue[0][0] <= now:
            _, frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            # A pulled cable loses frames.
            with contextlib.suppress(OSError):
                self._target.send(frame)


def _open(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
    opened.bind((interface, _ETH_P_ALL))
    return opened


def _relay(one: socket.socket, other: socket.socket, delay_s: float, rate: float) -> None:
    directions = [_Direction(one, other, delay_s, rate), _Direction(other, one, delay_s, rate)]
    while True:
        wait = min(direction.due for direction in directions) - time.monotonic()
        select.select([one, other], [], [], None if wait == float("inf") else max(0.0, wait))
        now = time.monotonic()
        for direction in directions:
            direction.receive(now)
            direction.deliver(now)


def main() -> int:
    """Open both interfaces, then go on in the background."""
    netns, first, second, delay_s, rate = sys.argv[1:]
    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(fd, kernel.CLONE_NEWNET)
    one, other = _open(first), _open(second)
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    _relay(one, other, float(delay_s), float(rate))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
