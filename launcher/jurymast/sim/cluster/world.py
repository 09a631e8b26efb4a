"""Time and network of the simulated cluster: one queue of events, one source of randomness, and processes
that pause and end. Messages take time, and those of one connection arrive in order; links and connections
break."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite

T = TypeVar("T")
Then = Callable[..., object]
# What takes time: a generator that yields when it goes on.
Steps = Generator[float, None, T]

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

    def go(self, process: Process | None, steps: Steps[None]) -> None:
        """Carry out these steps now, and on at each time that they yield."""
        when = next(steps, None)
        if when is not None:
            self.at(when, process, self.go, process, steps)

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


DELAY_S = (0.0002, 0.02)
# Now and then a message takes longer.
LATE_SHARE, LATE_S = 0.01, 0.6


class SimEnd(Protocol):
    """A process that has connections."""

    process: Process

    @property
    def site(self) -> SimSite: ...

    def hear(self, connection: SimConnection, message: Any) -> None: ...

    def closed(self, connection: SimConnection) -> None: ...


class SimNetwork:
    def __init__(self, world: World) -> None:
        self.world = world
        self._cut: dict[frozenset[str], float] = {}  # until when
        self.connections: list[SimConnection] = []

    def cut(self, one: str, other: str, until: float) -> None:
        pair = frozenset((one, other))
        self._cut[pair] = max(until, self._cut.get(pair, 0.0))

    def cut_until(self, one: str, other: str) -> float:
        return self._cut.get(frozenset((one, other)), 0.0)

    @property
    def any_cut(self) -> bool:
        return bool(self._cut)

    def joins(self, one: str, other: str) -> bool:
        return self.cut_until(one, other) <= self.world.now

    def delay_s(self, chance: Random | None = None) -> float:
        chance = chance or self.world.chance
        late_s = LATE_S * chance.random() if chance.random() < LATE_SHARE else 0.0
        return DELAY_S[0] + (DELAY_S[1] - DELAY_S[0]) * chance.random() ** 3 + late_s

    def connect(self, one: SimEnd, other: SimEnd) -> SimConnection:
        self.connections = [kept for kept in self.connections if any(kept.open)]
        connection = SimConnection(self, (one, other))
        self.connections.append(connection)
        return connection

    def ended(self, end: SimEnd) -> None:
        """The process is gone and its node lives: the kernel closes its connections."""
        for connection in self.connections:
            if end in connection.ends:
                connection.close(end)


class SimConnection:
    """A connection between two processes. `open`: for each end, whether it considers the connection open."""

    def __init__(self, network: SimNetwork, ends: tuple[SimEnd, SimEnd]) -> None:
        self.network, self.ends = network, ends
        self.open = [True, True]
        self.broken = False
        # A generator of its own: the order in which messages of one instant are sent must make no difference.
        self._chance = Random(network.world.chance.random())
        self._arrived = [0.0, 0.0]  # the last message that is on its way to this end

    def send(self, sender: SimEnd, message: Any) -> None:
        mine = self.ends.index(sender)
        if self.open[mine] and not self.broken:
            self._to(1 - mine, self._deliver, message)

    def _to(self, end: int, then: Any, *args: Any) -> None:
        network = self.network
        world = network.world
        one, other = self.ends[0].site.name, self.ends[1].site.name
        at = max(world.now, network.cut_until(one, other)) + network.delay_s(self._chance)
        self._arrived[end] = at = max(at, self._arrived[end])
        receiver = self.ends[end]
        world.at(at, receiver.process if receiver.process.alive else None, then, end, *args)

    def _deliver(self, end: int, message: Any) -> None:
        if self.broken or not self.open[end]:
            return
        receiver = self.ends[end]
        if receiver.process.alive:
            receiver.hear(self, message)
        elif receiver.site.up:  # its kernel knows no such connection
            self._to(1 - end, self._learn)

    def close(self, closer: SimEnd) -> None:
        mine = self.ends.index(closer)
        if self.open[mine]:
            self.open[mine] = False
            if not self.broken:
                self._to(1 - mine, self._learn)

    def _learn(self, end: int) -> None:
        if self.open[end]:
            self.open[end] = False
            if self.ends[end].process.alive:
                self.ends[end].closed(self)

    def snap(self, *, half: bool) -> None:
        """Break the connection: messages on their way are lost. Each end learns it at its own time; with
        `half` one of them never does."""
        self.broken = True
        deaf = self.network.world.chance.randrange(2) if half else -1
        for end in (0, 1):
            if end != deaf:
                at = self.network.world.now + self.network.world.between(0.0, 0.4)
                self.network.world.at(at, self.ends[end].process, self._learn, end)
