"""Random fleets: agents over a network that delays and breaks connections, a supervisor that stands still for
seconds, and nodes that really die. No healthy node may be lost, and every dead one must be, in time.

What is taken for granted: a heartbeat is at most `SPIKE_S` late; when a single connection breaks, both ends
learn it at once (after a reset the agent with its next heartbeat), and nothing holds the agent up that comes
back. To play a seed again: `-k 'fleet and [17]'`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from jurymast.core.judges.silence import LIMIT_MAX_S, UNKNOWN_BEATS, patience_s, rejoin_limit_s
from jurymast.core.nodes.watch import (
    MANY_LIMIT_S,
    RECONNECT_GRACE_S,
    RECONNECT_LIMIT_S,
    STEADY_INTERVAL_S,
    Watch,
)
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Answer, Disconnect, Effect, Record
from jurymast.core.state.messages import beat_of
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.settings import Settings

SEEDS = range(40)
START, HEARTBEAT_S = 1000.0, 0.5
# Things go wrong for so long; then healthy nodes are to stay for a while, and all who died to be found.
WRONG_S, CALM_S, LASTS_S = 90.0, 15.0, 300.0
DELAY_S, SPIKE_S, SPIKES = 0.02, 0.88, 0.001
STILL_MAX_S = 6.0
# As agents look for a supervisor: one try, and then a look at storage, which may be slow.
TRY_S, STORAGE_S = 1.5, 1.0
# What is lost of a try to connect in a storm TCP sends again.
STORM_S, AGAIN_S = 0.8, 1.0
# A look comes a little later than a limit is over, and the last word may come after its node's death.
SLACK_S = {"closed": 4 * STEADY_INTERVAL_S, "silent": 2 * STEADY_INTERVAL_S + SPIKE_S + HEARTBEAT_S}
Act = Callable[[], object]


@dataclass
class Line:
    """One connection: what is sent one way arrives in its order, unless it broke before."""

    number: int = 0  # once the supervisor knows whose it is
    broken: bool = False  # nothing arrives any more
    closed: bool = False  # by the supervisor
    arrived: float = 0.0


@dataclass
class Agent:
    name: str
    patience_s: float
    line: Line | None = None
    tries: int = 0
    heard_at: float = 0.0
    died_at: float | None = None


@dataclass
class Fleet:
    """`run` plays it to its end. `still_s`: seconds that the supervisor stood still, by when it woke up."""

    seed: int
    now: float = START
    lost: dict[str, tuple[float, ev.NodeLost]] = field(default_factory=dict)
    still: list[tuple[float, float]] = field(default_factory=list)
    asleep_until: float = 0.0
    inbox: list[Act] = field(default_factory=list)
    storm_until: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.due: list[tuple[float, int, Act]] = []
        self.order = itertools.count()
        self.numbers = itertools.count(1)
        names = [f"n{i}" for i in range(self.random.randint(22, 60))]
        self.state = RunState(settings=Settings(heartbeat_s=HEARTBEAT_S), supervised_on=names[0])
        self.state.phase, self.state.placement = Phase.RUNNING, tuple(names)
        patience = patience_s(HEARTBEAT_S, len(names))
        self.agents = {name: Agent(name, patience) for name in names}
        for order, name in enumerate(names):
            self.state.nodes[name] = Node(name, order, Role.ACTIVE, incarnation="i")
        self.watch = Watch(self.state, self.now)
        self.watch.take_over(self.now)

    # Time, the network, and the supervisor's loop.

    def after(self, seconds: float, act: Act) -> None:
        heapq.heappush(self.due, (self.now + seconds, next(self.order), act))

    def hears(self, act: Act) -> None:
        """The supervisor does, once it is awake."""
        if self.now < self.asleep_until:
            self.inbox.append(act)
        else:
            act()
            self.watch.check()

    def says(self, line: Line, act: Act) -> None:
        """An agent, over its connection."""
        delay_s = self.random.uniform(0.0, DELAY_S)
        if line.number and self.random.random() < SPIKES:
            delay_s = SPIKE_S * self.random.uniform(0.9, 1.0)
            self.maybe_stands_still(delay_s, 0.5)
        line.arrived = max(line.arrived, self.now + delay_s)

        def arrive() -> None:
            if not line.broken:
                self.hears(lambda: None if line.closed else act())

        self.after(line.arrived - self.now, arrive)

    def tick(self) -> None:
        if self.now < self.asleep_until:
            self.after(self.asleep_until - self.now, self.tick)
            return
        self.do(self.watch.on_time(self.now))  # what waits in sockets is heard after it
        self.watch.check()
        waiting, self.inbox = self.inbox, []
        for act in waiting:
            self.hears(act)
        self.after(STEADY_INTERVAL_S, self.tick)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer():
                    self.answer(self.agents[effect.node], effect.patience_s)
                case Disconnect():
                    self.close(self.agents[effect.node])
                case Record(event=ev.NodeLost() as event):
                    agent = self.agents[event.node]
                    assert agent.died_at is not None, f"seed {self.seed}: {event} at {self.now} is healthy"
                    self.lost[event.node] = self.now, event
                case _:
                    pass

    def answer(self, agent: Agent, patience_s: float) -> None:
        line = agent.line

        def arrive() -> None:
            if line is not None and agent.line is line and not line.broken:
                agent.heard_at, agent.patience_s = self.now, patience_s

        self.after(self.random.uniform(0.0, DELAY_S), arrive)

    def close(self, agent: Agent) -> None:
        """The supervisor does, and the agent learns it."""
        if agent.line is not None:
            line, agent.line.closed = agent.line, True
            self.after(self.random.uniform(0.0, DELAY_S), lambda: self.broke(agent, line))

    # What agents do.

    def connect(self, agent: Agent, after: int | None = None) -> None:
        """Unless there was another try than this meanwhile."""
        if agent.died_at is not None or agent.line is not None or after not in (None, agent.tries):
            return
        agent.tries += 1
        this, began = agent.tries, self.now
        line = Line()

        def taken() -> None:
            self.after(self.random.uniform(0.0, DELAY_S), proven)

        def proven() -> None:
            in_time = agent.tries == this and self.now < began + TRY_S
            if in_time and agent.died_at is None and agent.line is None:
                agent.line, agent.heard_at = line, self.now
                self.says(line, lambda: self.joined(agent, line))
                self.beat(agent, line)
                self.wait(agent, line)

        lost = self.now < self.storm_until and self.random.random() < 0.5
        delay_s = self.random.uniform(0.0, DELAY_S) + (AGAIN_S if lost else 0.0)
        self.after(delay_s, lambda: self.hears(taken))
        again_s = TRY_S + self.random.uniform(0.0, STORAGE_S)
        self.after(again_s, lambda: self.connect(agent, this))

    def joined(self, agent: Agent, line: Line) -> None:
        line.number = next(self.numbers)
        self.watch.on_agent_joined(agent.name, line.number)

    def beat(self, agent: Agent, line: Line) -> None:
        if agent.line is line and agent.died_at is None:
            self.says(line, lambda: self.do(self.watch.on_heartbeat(agent.name, beat_of(1, []), self.now)))
            if line.broken:  # what it has said is answered by another reset
                self.after(self.random.uniform(0.0, DELAY_S), lambda: self.broke(agent, line))
            self.after(HEARTBEAT_S, lambda: self.beat(agent, line))

    def wait(self, agent: Agent, line: Line) -> None:
        """Until it has heard nothing for too long, and looks for a supervisor."""
        if agent.line is not line or agent.died_at is not None:
            return
        left_s = agent.heard_at + agent.patience_s - self.now
        if left_s > 1e-9:
            self.after(left_s, lambda: self.wait(agent, line))
            return
        if self.random.random() < 0.5:  # else its last word is lost with the connection
            self.says(line, lambda: self.do(self.watch.on_hangs_up(agent.name, line.number)))
        self.says(line, lambda: self.do(self.watch.on_connection_closed(agent.name, line.number, self.now)))
        self.broke(agent, line)

    def broke(self, agent: Agent, line: Line) -> None:
        if agent.line is line:
            agent.line = None
            self.after(self.random.uniform(0.0, DELAY_S), lambda: self.connect(agent))

    # What goes wrong.

    def breaks(self, agent: Agent) -> None:
        """A connection; what is under way is lost, and both ends learn it."""
        line = agent.line
        if line is None or agent.died_at is not None:
            return
        line.broken = True

        self.maybe_stands_still(self.random.uniform(0.0, 2 * RECONNECT_GRACE_S))

        def closed() -> None:
            if line.number:
                self.do(self.watch.on_connection_closed(agent.name, line.number, self.now, reset=reset))

        reset = self.random.random() < 0.5  # then it learns it when it speaks next
        self.after(self.random.uniform(0.0, DELAY_S), lambda: self.hears(closed))
        if not reset or line.arrived > self.now:  # what is under way meets the reset, too
            self.after(self.random.uniform(0.0, DELAY_S), lambda: self.broke(agent, line))

    def storms(self) -> None:
        """Many connections break, and some tries to come back are lost for a while."""
        chosen = [agent for agent in self.agents.values() if self.random.random() < 0.8]
        self.storm_until = self.now + STORM_S
        for agent in chosen:
            self.after(self.random.uniform(0.0, 0.1), partial(self.breaks, agent))

    def dies(self, agent: Agent) -> None:
        """By its power, without a word, or as a process."""
        if self.random.random() < 0.5:
            self.breaks(agent)
        elif agent.line is not None:
            agent.line.broken = True
        agent.died_at = self.now

    def stands_still(self) -> None:
        seconds = self.random.choice((0.3, 0.6, 1.0, STILL_MAX_S)) * self.random.random()
        began = max(self.now, self.asleep_until)
        self.asleep_until = began + seconds
        self.still.append((self.asleep_until, seconds))

    def maybe_stands_still(self, about_s: float, chance: float = 0.2) -> None:
        """Just then, where it is worst; or not."""
        if self.random.random() < chance and self.now < START + WRONG_S:
            self.after(max(0.0, about_s - self.random.uniform(0.0, STEADY_INTERVAL_S)), self.stands_still)

    def run(self) -> None:
        for agent in self.agents.values():
            self.after(self.random.uniform(0.0, 3.0), partial(self.connect, agent))
        self.after(STEADY_INTERVAL_S, self.tick)
        spread = partial(self.random.uniform, 5.0, WRONG_S)
        for _ in range(self.random.randint(4, 20)):
            self.after(spread(), self.stands_still)
        for _ in range(self.random.randint(0, 3)):
            self.after(spread(), self.storms)
        for _ in range(self.random.randint(10, 60)):
            agent = self.random.choice(list(self.agents.values()))
            self.after(spread(), partial(self.breaks, agent))
        self.doomed = self.random.sample(sorted(self.agents), self.random.randint(1, 20))
        together = spread()
        for name in self.doomed:
            at = together if self.random.random() < 0.3 else spread()
            self.after(at, partial(self.dies, self.agents[name]))
        calm = START + WRONG_S + CALM_S
        while self.now < calm or (len(self.lost) < len(self.doomed) and self.now < START + LASTS_S):
            self.now, _, act = heapq.heappop(self.due)
            act()


@pytest.mark.parametrize("seed", SEEDS)
def test_in_no_fleet_a_healthy_node_is_lost_and_every_dead_one_is_in_time(seed: int) -> None:
    print(f"seed {seed}")
    fleet = Fleet(seed)
    fleet.run()
    nodes = len(fleet.agents)
    away_s = rejoin_limit_s(nodes) + UNKNOWN_BEATS * HEARTBEAT_S
    closed_s = RECONNECT_LIMIT_S + rejoin_limit_s(nodes, MANY_LIMIT_S)
    for name in fleet.doomed:
        died_at = fleet.agents[name].died_at
        assert died_at is not None
        assert name in fleet.lost, f"seed {seed}: {name} died at {died_at} and is not found"
        found_at, event = fleet.lost[name]
        assert event.limit_s <= {"closed": closed_s, "silent": max(away_s, LIMIT_MAX_S)}[event.how]
        still_s = sum(seconds for woke_at, seconds in fleet.still if woke_at >= died_at)
        took_s = found_at - died_at
        assert took_s <= event.limit_s + still_s + SLACK_S[event.how], (
            f"seed {seed}: {event} of {name}, dead for {took_s}"
        )
