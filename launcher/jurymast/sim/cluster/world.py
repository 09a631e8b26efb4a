"""Time in the simulated cluster: one queue of events, one source of randomness, and processes that pause and
end."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Then = Callable[..., object]

# The time of all clocks when a simulation begins, in seconds since the epoch.
BEGINNING = 1_800_000_000.0


class Process:
    """A process. Nothing happens in it before `until`, and nothing any more once it is not `alive`."""

    def __init__(self) -> None:
        self.alive = True
        self.until = 0.0

    def stop_until(self, until: float) -> None:
        self.until = max(self.until, until)


class World:
    """`now` is the true time, in seconds from 0 on, which nothing in the cluster knows."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.over = False
        self.events = 0
        self._queue: list[tuple[float, int, int, Process | None, Then, tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, process: Process | None, then: Then, *args: Any, first: bool = False) -> None:
        """Schedule a call. `first`: before everything else that this process has to do by then."""
        self._order += 1
        heapq.heappush(
            self._queue, (max(when, self.now), 0 if first else 1, self._order, process, then, args)
        )

    def after(self, seconds: float, process: Process | None, then: Then, *args: Any) -> None:
        self.at(self.now + seconds, process, then, *args)

    def between(self, least: float, most: float) -> float:
        return least + (most - least) * self.chance.random()

    def run(self, until: float) -> None:
        queue, pop, push = self._queue, heapq.heappop, heapq.heappush
        while queue and not self.over:
            event = pop(queue)
            when, priority, order, process, then, args = event
            if when > until:
                push(queue, event)
                break
            if process is not None:
                if not process.alive:
                    continue
                if process.until > when:
                    push(queue, (process.until, priority, order, process, then, args))
                    continue
            self.now = when
            self.events += 1
            then(*args)
        if not self.over:
            self.now = max(self.now, until)
