"""Processes that the rank server forks while nothing else is to be done, so that a rank need not wait for it.

A fork takes the server ten milliseconds, and the new process fifteen more, in which it gets memory of its own
in place of what it shares with the server: it writes to each module's memory just by looking at it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

from jurymast.processes import die_with_parent, name_process

# The server has had nothing to do for so long: ranks have begun, or the spare is up.
AFTER_S = 1.0


class Ready:
    """The server's side: up to `count` processes that wait to become ranks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pipes: dict[int, int] = {}  # by process id

    @property
    def lacks(self) -> bool:
        return len(self._pipes) < self._count

    def add(self, pid: int, pipe: int) -> None:
        """Note a process that waits for an order at the other end of this pipe."""
        self._pipes[pid] = pipe

    def take(self, order: dict[str, Any]) -> int:
        """Hand the order to one of them, and return its process id; 0 if none is there."""
        left = memoryview(json.dumps(order).encode() + b"\n")
        for pid in [*self._pipes]:
            pipe = self._pipes.pop(pid)
            with suppress(BrokenPipeError):  # it has ended
                while left:
                    left = left[os.write(pipe, left) :]
            os.close(pipe)
            if not left:
                return pid
        return 0

    def ended(self, pid: int) -> None:
        """A child of the server has ended, perhaps one of these."""
        if (pipe := self._pipes.pop(pid, None)) is not None:
            os.close(pipe)

    def leave(self) -> None:
        """Let go of them, in a new child of the server."""
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pipes = {}


def wait_for_order(pipe: int, server: int) -> dict[str, Any]:
    """In the process that has just been forked from `server`: return the order by which it becomes a rank."""
    die_with_parent()
    if os.getppid() != server:
        os._exit(0)
    name_process("jurymast-ready")
    for _ in sys.modules.values():
        pass
    with os.fdopen(pipe, "rb") as orders:
        line = orders.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    order: dict[str, Any] = json.loads(line)
    return order
