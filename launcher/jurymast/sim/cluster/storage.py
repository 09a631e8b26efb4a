"""Shared storage: it is slow, hangs, is full or shows an old view, and has what was really written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jurymast.core.checkpoints.copies import Key
from jurymast.core.checkpoints.meeting import Announced
from jurymast.core.checkpoints.rollback import Rollback
from jurymast.core.endpoint import Endpoint
from jurymast.core.events import Event
from jurymast.core.run.instructions import Instruction
from jurymast.core.run.machine import step
from jurymast.core.run.state import RunState
from jurymast.core.settings import RunPlan
from jurymast.journal import Begin, begin_of, counting, initial_state, take, together
from jurymast.sim.cluster.world import Process, World

Item = Event | tuple[float, Instruction]
LATENCY_S = (0.001, 0.008)
SLOW_TIMES = 60.0
PULSES_KEPT = 80


@dataclass
class Token:
    """What training has come to: two states are the same only if their tokens are."""

    step: int
    history: tuple[Any, ...]


@dataclass
class Place:
    """Where nodes write a checkpoint together: what they have announced, who is done, and why some failed, by
    rank."""

    layouts: dict[str, list[Announced]] = field(default_factory=dict)
    shared_out: bool = False
    done: set[str] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass
class Storage:
    world: World
    hung_until: float = 0.0
    full_until: float = 0.0
    slow_until: float = 0.0
    old: dict[str, tuple[float, float]] = field(default_factory=dict)  # node: until when, how old a view
    hung_on: dict[str, float] = field(default_factory=dict)
    unmounted: dict[str, float] = field(default_factory=dict)

    def healthy(self) -> bool:
        return max(self.hung_until, self.full_until, self.slow_until) < self.world.now

    def hangs_until(self, node: str) -> float:
        return max(self.hung_until, self.hung_on.get(node, 0.0))

    def takes_s(self) -> float:
        slow = SLOW_TIMES if self.slow_until > self.world.now else 1.0
        return self.world.between(*LATENCY_S) * slow

    def view_at(self, node: str) -> float:
        until, age_s = self.old.get(node, (0.0, 0.0))
        return self.world.now - (age_s if until > self.world.now else 0.0)

    def sees_checkpoints(self, node: str) -> bool:
        return self.unmounted.get(node, 0.0) <= self.world.now

    def do(
        self, node: str, process: Process, work: Callable[[], Any], then: Callable[[Any], None],
        *, writes: bool = False,
    ) -> None:  # fmt: skip
        """`then` gets what `work` returned, or the OSError."""
        at = max(self.world.now, self.hangs_until(node)) + self.takes_s()
        self.world.at(at, process, self._done, node, process, work, then, writes)

    def _done(
        self, node: str, process: Process, work: Callable[[], Any], then: Callable[[Any], None], writes: bool
    ) -> None:
        if self.hangs_until(node) > self.world.now:
            self.do(node, process, work, then, writes=writes)
            return
        if writes and self.full_until > self.world.now:
            then(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return
        try:
            result = work()
        except OSError as error:
            result = error
        then(result)


@dataclass
class RunDisk:
    """The run directory. Times are when something came there."""

    storage: Storage
    plan: RunPlan
    claims: dict[int, tuple[float, str]] = field(default_factory=dict)  # epoch: when, by which node
    endpoints: dict[int, tuple[float, Endpoint]] = field(default_factory=dict)
    pulses: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    attempt: int = 0
    shared: dict[Key, tuple[float, Token]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # where nodes write a checkpoint together
    journal: dict[int, list[Item]] = field(default_factory=dict)
    rollbacks: list[Rollback] = field(default_factory=list)

    def publish(self, key: Key, token: Token) -> None:
        """Into the checkpoints, unless it was rolled back meanwhile."""
        if not self.is_void(key):
            self.shared[key] = self.storage.world.now, token

    def is_void(self, key: Key) -> bool:
        return any(back.voids(*key) for back in self.rollbacks)

    def roll_back(self, step: int) -> Rollback:
        """As `jurymast checkpoints RUN rollback` does, before it asks the supervisor."""
        back = Rollback(step, self.attempt, self.storage.world.now)
        self.rollbacks.append(back)
        self.shared = {key: what for key, what in self.shared.items() if key[0] <= step}
        return back

    def newest_epoch(self, node: str) -> int:
        seen_at = self.storage.view_at(node)
        return max((e for e, (t, by) in self.claims.items() if t <= seen_at or by == node), default=0)

    def claim(self, node: str) -> int:
        epoch = self.newest_epoch(node) + 1
        while epoch in self.claims:
            epoch += 1
        self.claims[epoch] = self.storage.world.now, node
        self.journal[epoch] = []
        return epoch

    def announce(self, place: Endpoint) -> None:
        self.endpoints[place.epoch] = self.storage.world.now, place

    def find(self, node: str) -> Endpoint | None:
        seen_at = self.storage.view_at(node)
        known = [(e, p) for e, (t, p) in self.endpoints.items() if t <= seen_at or p.node == node]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    def pulse(self, epoch: int, count: int) -> None:
        beats = self.pulses.setdefault(epoch, [])
        beats.append((self.storage.world.now, count))
        del beats[:-PULSES_KEPT]

    def read_pulse(self, node: str) -> str:
        epoch, seen_at = self.newest_epoch(node), self.storage.view_at(node)
        beats = [count for t, count in self.pulses.get(epoch, []) if t <= seen_at]
        return f"{epoch}:{beats[-1] if beats else ''}"

    def replay(self) -> RunState:
        """As `journal.replay` reads it, of what was really written."""
        files = [self._file(epoch) for epoch in sorted(self.journal)]
        state = initial_state(self.plan)
        for entry in counting([*files, []], [*map(begin_of, files), Begin()]):
            take(state, entry, lambda event: step(state, event))
        return state

    def _file(self, epoch: int) -> list[dict[str, Any]]:
        entries = together(self.journal[epoch])
        lines = [{**entry, "epoch": epoch, "n": number} for number, entry in enumerate(entries, 1)]
        return [json.loads(json.dumps(line)) for line in lines]
