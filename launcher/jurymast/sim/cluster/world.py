"""Time, network and shared storage of the simulated cluster: one queue of events, one source of randomness,
and processes that pause and end. Messages take time, and those of one connection arrive in order; links and
connections break. Storage is slow, hangs, is full or shows a stale view; it knows what was really written."""

from __future__ import annotations

import errno
import heapq
import inspect
import json
import math
import os
import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from jurymast.core.checkpoints.commit import Rollback, superfluous
from jurymast.core.run.machine import step
from jurymast.core.state.effects import Instruction
from jurymast.core.state.events import Event
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import RunState
from jurymast.core.state.settings import RunPlan
from jurymast.journal import EpochBegin, begin_of, counting, initial_state, take, together
from jurymast.sim.bounds import Bounds

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite

T = TypeVar("T")
Then = Callable[..., object]
# What takes time: a generator that yields when it goes on.
Steps = Generator[float, None, T]

# Between two beats of a pulse there is less than this, in seconds, if nothing holds it up.
PULSE_GAP_S = 1.0
# The time of all clocks when a simulation begins, in seconds since the epoch.
BEGINNING = 1_800_000_000.0


class Process:
    """A process. Nothing happens in it before `until`, and nothing any more once it is not `alive`. `inbox`:
    what has come meanwhile, in this order."""

    def __init__(self) -> None:
        self.alive = True
        self.until = 0.0
        self.inbox: list[tuple[bool, Then, tuple[Any, ...]]] = []

    def stop_until(self, until: float) -> None:
        self.until = max(self.until, until)


class World:
    """`now` is the true time, in seconds from 0 on, which nothing in the cluster knows."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.over = False
        self.events = 0
        self._bounds, self._second = Bounds(seed), 0
        self._queue: list[tuple[float, int, int, Process | None, Then, tuple[Any, ...]]] = []
        self._order = 0
        self.work: list[Coroutine[Any, Any, Any]] = []  # of all processes, whether it has begun or not

    def close(self) -> None:
        """Drop the work that has not begun when the simulation ends; Python would complain of it."""
        for one in self.work:
            if inspect.getcoroutinestate(one) == inspect.CORO_CREATED:
                one.close()

    def at(self, when: float, process: Process | None, then: Then, *args: Any, first: bool = False) -> None:
        """Schedule a call. `first`: before everything else that this process has to do by then."""
        self._order += 1
        heapq.heappush(
            self._queue, (max(when, self.now), 0 if first else 1, self._order, process, then, args)
        )

    def after(self, seconds: float, process: Process | None, then: Then, *args: Any) -> None:
        self.at(self.now + seconds, process, then, *args)

    def wake(self, process: Process) -> None:
        """Let a process go on at its `until` with what has come while it stood still."""
        self.at(process.until, None, self._carry_on, process)

    def _put_off(self, process: Process, first: bool, then: Then, args: tuple[Any, ...]) -> None:
        place = sum(before for before, *_ in process.inbox) if first else len(process.inbox)
        process.inbox.insert(place, (first, then, args))
        if process.until <= self.now:
            self._carry_on(process)
        elif len(process.inbox) == 1:
            self.wake(process)

    def _carry_on(self, process: Process) -> None:
        while process.inbox and process.alive:
            if process.until > self.now:
                self.wake(process)
                return
            _, then, args = process.inbox.pop(0)
            self._do(then, args)

    def _do(self, then: Then, args: tuple[Any, ...]) -> None:
        self.events += 1
        self.happens(then)
        then(*args)

    def go(self, process: Process | None, steps: Steps[None]) -> None:
        """Carry out these steps now, and on at each time that they yield."""
        when = next(steps, None)
        if when is not None:
            self.at(when, process, self.go, process, steps)

    def between(self, least: float, most: float) -> float:
        return least + (most - least) * self.chance.random()

    def happens(self, what: object) -> None:
        """Note an event, or one of the effects that are carried out within one. Raises StandsStill."""
        if self.now >= self._second + 1:
            self._second = int(self.now)
            self._bounds.goes_on()
        self._bounds.event(self.now, what)

    def run(self, until: float) -> None:
        """Carry out what happens until then. Raises StandsStill."""
        queue, pop, push = self._queue, heapq.heappop, heapq.heappush
        while queue and not self.over:
            event = pop(queue)
            when, priority, _, process, then, args = event
            if when > until:
                push(queue, event)
                break
            if process is not None:
                if not process.alive:
                    continue
                if process.until > when or process.inbox:
                    self.now = when
                    self._put_off(process, priority == 0, then, args)
                    continue
            self.now = when
            self._do(then, args)
        if not self.over:
            self.now = max(self.now, until)


DELAY_S = (0.0002, 0.02)
# Now and then a message takes longer.
LATE_SHARE, LATE_S = 0.01, 0.6


class SimEnd(Protocol):
    """A process that has connections."""

    process: Process
    site: SimSite

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


Item = Event | tuple[float, Instruction]
LATENCY_S = (0.001, 0.008)
SLOW_TIMES = 60.0
KEEP = 3  # checkpoints on storage


@dataclass(frozen=True)
class Token:
    """The result of the training so far: two states are the same only if their tokens are equal."""

    step: int
    history: tuple[Any, ...]


@dataclass
class WritePlace:
    """Where nodes write a checkpoint together: the images that they have announced, and who has written its
    share, by the first rank of each node."""

    announced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shared_out: bool = False
    written: set[int] = field(default_factory=set)
    token: Token | None = None  # what was written


@dataclass
class Storage:
    """`faults`: until when each kind of fault lasts, by node, or "" for all; `old_s`: how old a node's view
    is."""

    world: World
    faults: dict[tuple[str, str], float] = field(default_factory=dict)
    old_s: dict[str, float] = field(default_factory=dict)

    def _is(self, fault: str, node: str = "") -> bool:
        return self.faults.get((fault, node), 0.0) > self.world.now

    def hangs_until(self, node: str) -> float:
        hangs = ("storage hangs", ""), ("storage hangs here", node)
        return max(self.faults.get(one, 0.0) for one in hangs)

    def takes_s(self) -> float:
        return self.world.between(*LATENCY_S) * (SLOW_TIMES if self._is("storage slow") else 1.0)

    def view_at(self, node: str) -> float:
        return self.world.now - (self.old_s[node] if self._is("old view", node) else 0.0)

    def sees_all(self, node: str) -> bool:
        """Whether this node sees everything that is there now."""
        return self.view_at(node) >= self.world.now

    def sees_checkpoints(self, node: str) -> bool:
        return not self._is("unmounted", node)

    def check_room(self) -> None:
        """Raise OSError if there is no room for anything."""
        if self._is("storage full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(self, node: str, work: Callable[[], T], *, writes: bool = False) -> Steps[T | OSError]:
        """Do `work`; returns its result, or the OSError."""
        while True:
            yield max(self.world.now, self.hangs_until(node)) + self.takes_s()
            if self.hangs_until(node) <= self.world.now:
                break
        if self._is("stale handles", node):
            return OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        try:
            if writes:
                self.check_room()
            return work()
        except OSError as error:
            return error

    def do(
        self, node: str, process: Process, work: Callable[[], T], then: Callable[[T | OSError], None],
        *, writes: bool = False,
    ) -> None:  # fmt: skip
        """Do `work`; `then` gets its result, or the OSError."""

        def steps() -> Steps[None]:
            then((yield from self.work(node, work, writes=writes)))

        self.world.go(process, steps())


@dataclass
class RunDisk:
    """The run directory. Times are when something was written: a stale view is one of a directory's list, not
    of the content of a file with a known name."""

    storage: Storage
    plan: RunPlan
    claims: dict[int, tuple[float, str]] = field(default_factory=dict)  # epoch: when, by which node
    endpoints: dict[int, tuple[float, Endpoint]] = field(default_factory=dict)
    beat: tuple[int, int] = (0, 0)  # content of the pulse file: an epoch, and its count
    pulses_since: float = 0.0  # without a gap
    beat_at: float = -math.inf
    newest: Endpoint | None = None  # content of the newest address file
    attempt: int = 0
    reading_s: float = 0.0  # the journal
    shared: dict[StateId, tuple[float, Token]] = field(default_factory=dict)
    places: dict[str, WritePlace] = field(default_factory=dict)  # where nodes write a checkpoint together
    journal: dict[int, list[Item]] = field(default_factory=dict)
    rollbacks: list[Rollback] = field(default_factory=list)

    def publish(self, key: StateId, token: Token) -> None:
        """Add a checkpoint, unless it was rolled back meanwhile; as many older ones go as may."""
        if self.is_void(key):
            return
        self.shared[key] = self.storage.world.now, token
        saved = [one.step for one in reversed(self.shared)]
        gone = superfluous(sorted(saved, reverse=True), KEEP, set(), set(), saved)
        self.shared = {one: what for one, what in self.shared.items() if one.step not in gone}

    def is_void(self, key: StateId) -> bool:
        return any(back.voids(*key) for back in self.rollbacks)

    def roll_back(self, step: int) -> Rollback:
        """Roll back as `jurymast checkpoints RUN rollback` does before it asks the supervisor."""
        back = Rollback(step, self.attempt, self.storage.world.now)
        self.rollbacks.append(back)
        self.shared = {key: what for key, what in self.shared.items() if key.step <= step}
        return back

    def newest_epoch(self, node: str) -> int:
        seen_at = self.storage.view_at(node)
        listed = (e for e, (t, by) in self.claims.items() if t <= seen_at or by == node)
        return max([*listed, self.beat[0]])

    def claim(self, node: str) -> int:
        epoch = self.newest_epoch(node) + 1
        while epoch in self.claims:
            epoch += 1
        self.claims[epoch] = self.storage.world.now, node
        self.journal[epoch] = []
        return epoch

    def announce(self, place: Endpoint) -> None:
        self.endpoints[place.epoch] = self.storage.world.now, place
        self.newest = place

    def find(self, node: str) -> Endpoint | None:
        seen_at = self.storage.view_at(node)
        known = [place for t, place in self.endpoints.values() if t <= seen_at or place.node == node]
        known += [self.newest] if self.newest is not None else []
        return max(known, key=lambda place: place.epoch, default=None)

    def pulse(self, epoch: int, count: int) -> None:
        now = self.storage.world.now
        self.pulses_since = self.pulses_since if self.is_pulsing else now
        self.beat, self.beat_at = (epoch, count), now

    @property
    def is_pulsing(self) -> bool:
        return self.beat_at > self.storage.world.now - PULSE_GAP_S

    def read_pulse(self, node: str) -> str:
        return f"{self.newest_epoch(node)}:{self.beat}"

    def replay(self) -> RunState:
        """Replay what was really written, as `journal.replay` does."""
        state = initial_state(self.plan)
        for entry in self.entries():
            take(state, entry, lambda event: step(state, event))
        return state

    def entries(self) -> Iterator[dict[str, Any]]:
        """Return what was really written, as far as it counts."""
        files = [self.written(epoch) for epoch in sorted(self.journal)]
        return counting([*files, []], [*map(begin_of, files), EpochBegin()])

    def written(self, epoch: int) -> list[dict[str, Any]]:
        entries = together(self.journal[epoch])
        lines = [{**entry, "epoch": epoch, "n": number} for number, entry in enumerate(entries, 1)]
        return [json.loads(json.dumps(line)) for line in lines]
