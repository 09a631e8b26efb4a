"""Which saves of a simulated run are held where, and which of them outlives a failure.

As in a run: the copy in a node's own memory is there when its stall is over and outlives dead ranks; a while
later (`Durations.drain_s`) other nodes hold copies, too, and it outlives as many lost nodes as there are of
those; some saves are written to durable storage, one at a time. More nodes lost at once than there are
replicas are taken to have held all copies of something: chance would often spare a pair, but what strikes
several nodes at once does not choose at random. Before nodes are given back the newest save that memory still
has is written. What was written during a recovery is not counted.
"""

from __future__ import annotations

import math

from jurymast.core.cadence import durable_interval_s
from jurymast.core.copies import MEMORY, SHARED
from jurymast.core.durable import IDLE_SHARE
from jurymast.core.failure_rate import mtbf_s
from jurymast.core.forecast import DURABLE_SHARE
from jurymast.core.optimum import Saving
from jurymast.core.settings import Settings
from jurymast.sim.durations import Durations


def write_every_s(settings: Settings, durations: Durations, nodes: int, rate: float) -> float:
    """Least time between two writes, as a run has it: as the policy says, after each save where that says
    when to save, else so that storage idles nine tenths of the time, and no more often than failures at
    `rate` per 1,000 node-days ask for."""
    if settings.shared_every_s is not None:
        return settings.shared_every_s
    if durations.write_s is None or settings.cadence_s is not None or settings.cadence_steps is not None:
        return 0.0
    cheap = Saving(durations.stall_s, durations.drain_s, durations.slowdown)
    durable = Saving(0.0, durations.write_s, durations.slowdown)
    mean_s = mtbf_s(nodes, rate)
    wanted_s = durable_interval_s(cheap, durable, mean_s, DURABLE_SHARE, settings.max_loss_s, math.inf)
    return max(wanted_s, (1.0 + IDLE_SHARE) * durations.write_s)


class SimTiers:
    """`every_s` is the least time from one write's begin to the next. Times are the simulation's."""

    def __init__(self, durations: Durations, replicas: int, every_s: float) -> None:
        self._d, self._replicas = durations, replicas
        self._write_s = durations.write_s
        self._every_s = max(every_s, self._write_s or 0.0)
        # The two newest, as the newest may not be complete: step, and when that is or was.
        self._copies = [(0, 0.0)] * 2
        self._written = [(0, 0.0)] * 2
        self._next_write = 0.0
        self._losses: list[float] = []
        self._halted_at = 0.0
        self._own, self._replicated, self._durable = 0, 0, 0  # steps that a failure found
        self._in_memory = True

    def saved(self, at: float, step: int) -> None:
        """The stall of a save ended."""
        complete = at + self._d.drain_s
        self._copies = [self._copies[1], (step, complete)]
        if self._write_s is not None and complete >= self._next_write:
            self._written = [self._written[1], (step, complete + self._write_s)]
            self._next_write = complete + self._every_s

    def lost(self, now: float) -> None:
        """A node with copies of others, or of its own, is gone."""
        self._losses.append(now)

    def halted(self, now: float) -> None:
        """Ranks that trained stopped: what is not complete now never will be."""
        self._halted_at = now
        self._own = self._copies[1][0]
        self._replicated = _newest(self._copies, now)
        self._durable = self._replicated if self._write_s is None else _newest(self._written, now)
        self._written = [(self._durable, now)] * 2
        self._next_write = now

    def given_back(self) -> float:
        """The nodes go. Returns how long that takes longer, as something is to be written."""
        step, tier, _ = self.survivor()
        self._in_memory = False
        if tier != MEMORY or step <= self._durable:
            return 0.0
        self._durable = step
        self._written = [(step, 0.0)] * 2
        return self._write_s or 0.0

    def survivor(self) -> tuple[int, str, float]:
        """The newest step that can be restored (0: none), its tier, and how long that takes."""
        if self._write_s is None:
            return self._durable, SHARED, self._d.restore_s
        lost = sum(at >= self._halted_at - self._d.drain_s for at in self._losses)
        if not self._in_memory or lost > self._replicas:
            return self._durable, SHARED, self._d.read_s
        return self._replicated if lost else self._own, MEMORY, self._d.restore_s

    def restored(self, step: int) -> None:
        """All nodes have this state, and copies of it."""
        self._losses.clear()
        self._in_memory = True
        self._copies = [(step, 0.0)] * 2
        self._own = self._replicated = step


def _newest(copies: list[tuple[int, float]], now: float) -> int:
    """Of those that are complete; the older one always is."""
    return copies[1][0] if copies[1][1] <= now else copies[0][0]
