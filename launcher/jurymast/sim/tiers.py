"""Which saves of a simulated run are held where, and which of them outlives a failure.

As in a run: the copy in a node's own memory is there when its stall is over and outlives dead ranks; a while
later (`Durations.drain_s`) the nodes that `core.checkpoints.parity` names hold replicas, or the XOR of
groups; some saves are written to durable storage, one at a time. What a failure leaves of all that,
`core.checkpoints.copies.plan_restore` is asked, with the ranks of only those nodes in its books that matter:
the lost ones, the others of their XOR groups, and one that stands for the rest. Before nodes are given back
the newest save that memory still has is written. What was written during a recovery is not counted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from jurymast.core.checkpoints.cadence import durable_interval_s
from jurymast.core.checkpoints.copies import (
    ALL,
    MEMORY,
    PEER,
    SHARED,
    Copies,
    Copy,
    RestorePlan,
    plan_restore,
)
from jurymast.core.checkpoints.durable import IDLE_SHARE
from jurymast.core.checkpoints.parity import Keeping, keeping
from jurymast.core.planning.failure_rate import mtbf_s
from jurymast.core.planning.forecast import DURABLE_SHARE
from jurymast.core.planning.optimum import Saving
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
    """`every_s` is the least time from one write's begin to the next. Times are the simulation's.

    Replicas go by places: 0 .. nodes - 1 are the active ones, those after them the spares'. Who steps in for
    another takes its place, and what that one would hold.
    """

    def __init__(
        self, durations: Durations, settings: Settings, every_s: float, nodes: int, spares: int
    ) -> None:
        self._d = durations
        spares = spares if settings.prefer_spares else 0
        self._replication = (nodes, spares, settings.replicas, settings.parity)
        self._write_s = durations.write_s
        self._every_s = max(every_s, self._write_s or 0.0)
        # The two newest, as the newest may not be complete: step, and when that is or was.
        self._copies = [(0, 0.0)] * 2
        self._written = [(0, 0.0)] * 2
        self._next_write = 0.0
        self._places: dict[int, int] = {}  # of the nodes (numbers) that are not at their first ones
        self._losses: list[tuple[float, int]] = []
        self._halted_at = 0.0
        self._durable = 0  # step that a failure found
        self._in_memory = True

    def swapped(self, out: int, into: int) -> None:
        """The node `into` takes the place of the node `out`."""
        places = self._places
        places[into], places[out] = places.get(out, out), places.get(into, into)

    def allocated(self) -> None:
        """All nodes are others now."""
        self._places.clear()

    def saved(self, at: float, step: int) -> None:
        """The stall of a save ended."""
        complete = at + self._d.drain_s
        self._copies = [self._copies[1], (step, complete)]
        if self._write_s is not None and complete >= self._next_write:
            self._written = [self._written[1], (step, complete + self._write_s)]
            self._next_write = complete + self._every_s

    def lost(self, node: int, now: float) -> None:
        """A node with copies of others, or of its own, is gone."""
        self._losses.append((now, self._places.get(node, node)))

    def halted(self, now: float) -> None:
        """The ranks stopped: what is not complete now never will be."""
        self._halted_at = now
        self._durable = _newest(self._copies if self._write_s is None else self._written, now)
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
        # Before this the others have made the copies anew that were lost.
        lost = {place for at, place in self._losses if at >= self._halted_at - self._d.drain_s}
        world = _World(self._replication, lost)
        if self._in_memory:
            for step, complete_at in self._copies:
                if step:
                    world.hold(step, replicated=complete_at <= self._halted_at)
        plan = world.plan(self._durable)
        seconds = self._d.read_s if plan.tier == SHARED else self._d.restore_s
        return plan.step, plan.tier, seconds

    def restored(self, step: int) -> None:
        """All nodes have this state, and copies of it."""
        self._losses.clear()
        self._in_memory = True
        self._copies = [(step, 0.0)] * 2


class _World:
    """The books of the nodes at the places `lost`, the others of their XOR groups, and one that stands for
    the rest."""

    def __init__(self, replication: tuple[int, int, int, int], lost: set[int]) -> None:
        nodes = replication[0]
        self._kept = _keeping(*replication)
        self._lost = {f"n{place}" for place in lost}
        self._groups = [group for group in self._kept.parity if any(place in group for place in lost)]
        concerned = {place for place in lost if place < nodes}.union(*self._groups)
        if len(concerned) < nodes:
            concerned.add(next(place for place in range(nodes) if place not in concerned))
        self._ranks = {place: rank for rank, place in enumerate(sorted(concerned))}
        self._copies = Copies()

    def hold(self, step: int, *, replicated: bool) -> None:
        """All have a save of this step in their own memory, and if `replicated`, copies of each other's."""
        for place, rank in self._ranks.items():
            image = Copy(f"n{place}", MEMORY, step, 1, rank, len(self._ranks), ALL, size_bytes=1)
            self._hold(image)
            if not replicated:
                continue
            for holder in self._kept.whole[image.node]:
                self._hold(replace(image, node=holder, tier=PEER))
            for group in self._groups:
                if place in group:
                    ranks = tuple(self._ranks[one] for one in group)
                    self._hold(replace(image, node=self._kept.parity[group], tier=PEER, group=ranks))

    def _hold(self, copy: Copy) -> None:
        if copy.node not in self._lost:
            self._copies.hold(copy)

    def plan(self, durable: int) -> RestorePlan:
        """`durable`: the step in durable storage, 0 for none."""
        placement = [f"n{place}" for place in self._ranks]
        return plan_restore(self._copies, {durable: 1} if durable else {}, placement, 1)


@lru_cache(maxsize=4)
def _keeping(nodes: int, spares: int, copies: int, parity: int) -> Keeping:
    """Who keeps whose replicas, by places."""
    names = [f"n{place}" for place in range(nodes + spares)]
    return keeping(names[:nodes], 1, names[nodes:], {}, copies=copies, parity=parity)


def _newest(copies: list[tuple[int, float]], now: float) -> int:
    """Of those that are complete; the older one always is."""
    return copies[1][0] if copies[1][1] <= now else copies[0][0]
