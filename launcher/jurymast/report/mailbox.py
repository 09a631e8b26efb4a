"""Deliveries to somebody who may fail or hang, beside everything else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

TRIES, TRY_AGAIN_S = 3, 5.0
# What more comes while this many wait is dropped: nobody has received anything for long.
WAITING_MOST = 1000
Item = TypeVar("Item")


class Mailbox(threading.Thread, Generic[Item]):
    """Delivers to one receiver, one thing after the other, in a thread that nobody waits for for ever.
    `deliver` returns what went wrong, or "". A problem is told when it begins or changes."""

    def __init__(
        self, name: str, deliver: Callable[[Item], str], log: logging.Logger, *, tries: int = TRIES
    ) -> None:
        super().__init__(daemon=True)
        self._receiver, self._deliver, self._log, self._tries = name, deliver, log, tries
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._open, self._problem = 0, ""
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        with self._changed:
            if self._open >= WAITING_MOST:
                return
            self._open += 1
        self._queue.put(item)

    def run(self) -> None:
        while True:
            item = self._queue.get()
            for trial in range(self._tries):
                problem = self._tried(item)
                if problem and problem != self._problem:
                    self._log.warning("%s: %s", self._receiver, problem)
                self._problem = problem
                if not problem:
                    break
                if trial + 1 < self._tries:
                    time.sleep(TRY_AGAIN_S)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _tried(self, item: Item) -> str:
        try:
            return self._deliver(item)
        except Exception as error:  # others' code: what it raises must not end this thread
            return f"{type(error).__name__}: {error}"

    def empty(self, until: float) -> bool:
        """Whether everything is delivered, or given up, by this time of the monotonic clock."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, max(0.0, until - time.monotonic()))
