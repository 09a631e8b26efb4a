"""Whatever agents do and in whatever order their words come: no state that is held is passed over, and none
is given up too early. Random walks over a few nodes; a failing test's name has the seed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from jurymast.core.checkpoints import replicas
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.checkpoints.copies import PAUSE_MAX_S
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Launch, Record, Send
from jurymast.core.state.images import MEMORY, PEER, StateId
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.settings import Settings
from jurymast.core.state.within import Skip
from support.holding import Agent, Nodes, report, without

ACTIVE = 3
EVENTS = 500
SKIPS = 0.05
SEEDS = range(200)


class Walk:
    """A run of three ranks on as many nodes, and up to two spares."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.time, self.done = 100.0, 0
        settings: dict[str, Any] = {
            "replicas": chance.choice((0, 1, 1, 1, 2)),
            "prefer_spares": chance.random() < 0.7, "local_path": chance.choice(("", "/nvme")),
            "object_url": chance.choice(("", "s3://bucket")),
        }  # fmt: skip
        self.state = RunState(Settings(**settings), active=ACTIVE)
        names = [f"n{number}" for number in range(ACTIVE + chance.randint(0, 2))]
        self.state.nodes = {name: Node(name, i, incarnation=name) for i, name in enumerate(names)}
        self.checkpoints = Checkpoints(self.state)
        self.nodes = Nodes(chance, ACTIVE)
        self.away: list[Agent] = []  # cut off, with all they hold
        self.committed: set[StateId] = set()
        self.spoilt: set[StateId] = set()  # of these an image was found corrupt
        self.place(names[:ACTIVE])
        for name in names:
            self.join(Agent(name))

    # ---- what drives the machine

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert effect.node in self.nodes.agents, f"{effect.node} is not here"
                self.nodes.agents[effect.node].orders.append(effect.message)
                if isinstance(effect.message, msg.Void):
                    self.committed.discard((effect.message.step, effect.message.attempt))
                continue
            assert isinstance(effect, Record)
            event = effect.event
            step(self.state, event)
            if isinstance(event, ev.Saved) and event.tier == MEMORY and event.ok:
                self.committed.add(StateId(event.step, event.attempt))
        self.checkpoints.check()
        self.check_size()

    def check_size(self) -> None:
        """What is remembered does not grow with the number of saves."""
        machine = self.checkpoints
        ordered = machine.replicas._ordered.values()
        assert sum(map(len, ordered)) <= 8 * ACTIVE * len(self.state.nodes)
        assert len(machine._commit._stalls) <= 8
        held = {(copy.step, copy.attempt) for one in self.nodes.agents.values() for copy in one.held}
        assert len(machine.copies.newest_first()) <= len(held) + 8

    def slice(self) -> None:
        under_way = self.checkpoints.replicas._pass
        effects = self.checkpoints.replicas.slice(self.time)
        self.checkpoints.replicas.took(self.chance.choice((0.0, 0.01)), self.time)
        told = [one.message for one in effects if isinstance(one, Send)]
        for committed in (one for one in told if isinstance(one, msg.Committed)):
            assert under_way is not None
            assert under_way.holders is not None
            self.check_safe(
                StateId(committed.step, committed.attempt), bare=not all(under_way.holders.values())
            )
        self.do(effects)

    def check_safe(self, key: StateId, *, bare: bool) -> None:
        """Older states may go: then this one outlives any node, where anybody has memory for that."""
        copies = self.checkpoints.copies
        assert copies.restorable(key)
        if self.state.settings.replicas and not bare and key not in self.spoilt:
            assert all(without(copies, name).restorable(key) for name in self.nodes.agents)

    def quiet(self) -> None:
        """All that is on its way arrives; nobody believes in a copy that is not there."""
        while any(one.orders or one.words for one in self.nodes.agents.values()):
            self.hear()
            self.obey()
        truth = set(self.nodes.truth().every())
        stale = [copy for copy in self.checkpoints.copies.every() if copy not in truth]
        assert not stale
        assert not self.checkpoints.writes.any_under_way, "what nobody writes is waited for"
        kept = [one.name for one in self.nodes.agents.values() if one.writes is not None]
        assert not kept, f"{kept} wait for a write that has ended"

    def settle(self) -> None:
        """Nothing fails any more: in the end every state that is committed outlives any node."""
        for agent in self.away:
            self.give_role(agent.name)
        self.nodes.refuses = self.nodes.fails = 0.0
        while self.state.phase is not Phase.RUNNING:
            self.come_back()
            self.launch()
        for _ in range(50):
            self.time += PAUSE_MAX_S
            self.do(self.checkpoints.on_time(self.time))
            while self.checkpoints.replicas.under_way:
                self.slice()
            self.quiet()
        key, made = self.checkpoints._commit.key, self.checkpoints.replicas
        if key is not None:  # where nobody had memory for replicas, that is asked again with the next state
            self.check_safe(key, bare=made._bare or not all(made.holders(self.time).values()))

    def place(self, names: list[str]) -> None:
        self.state.placement, self.state.phase = tuple(names), Phase.RUNNING
        self.state.attempt += 1
        for name in self.nodes.agents:
            self.give_role(name)

    def give_role(self, name: str) -> None:
        placed = name in self.state.placement
        here = name in self.nodes.agents
        self.state.nodes[name].role = Role.FAILED if not here else Role.ACTIVE if placed else Role.SPARE

    # ---- what happens

    def hear(self) -> None:
        """One word of one agent arrives."""
        speaking = [one for one in self.nodes.agents.values() if one.words]
        if speaking:
            agent = self.chance.choice(speaking)
            self.do(self.checkpoints.on_message(agent.name, agent.words.popleft(), self.time))

    def obey(self) -> None:
        """One order to one agent arrives."""
        told = [one for one in self.nodes.agents.values() if one.orders]
        if told:
            agent = self.chance.choice(told)
            self.nodes.obey(agent, agent.orders.popleft())

    def look(self) -> None:
        self.time += self.chance.choice((0.1, 1.0, 10.0, 400.0))
        self.do(self.checkpoints.on_time(self.time))

    def save(self) -> None:
        """All ranks save their next step, or one cannot."""
        room = all(self.nodes.agents[name].has_slot() for name in self.running())
        if not self.running() or not (room or self.chance.random() < SKIPS):
            return
        self.done += 1
        key = StateId(self.done, self.state.attempt)
        for rank, name in enumerate(self.state.placement):
            agent = self.nodes.agents[name]
            if not agent.has_slot():
                self.do(self.checkpoints.on_save_skipped(key[1], key[0], rank, Skip.BUSY, self.time))
                return
            agent.hold(report(MEMORY, key, rank, ACTIVE))

    def running(self) -> tuple[str, ...]:
        return self.state.placement if self.state.phase is Phase.RUNNING else ()

    def spoil(self) -> None:
        """A copy is found corrupt."""
        agent = self.chance.choice(list(self.nodes.agents.values()))
        if agent.held and self.chance.random() < 0.1:
            copy = self.chance.choice(sorted(agent.held, key=repr))
            agent.held.discard(copy)
            agent.words.append(msg.Dropped(copy=copy, why="its hash does not match"))
            self.spoilt.add(StateId(copy.step, copy.attempt))

    def join(self, agent: Agent) -> None:
        agent.say_again()
        self.nodes.agents[agent.name] = agent
        self.give_role(agent.name)
        self.do(self.checkpoints.on_agent_joined(agent.name, agent.hello(), self.time))

    def lose(self) -> None:
        if self.chance.random() < 0.3 and len(self.nodes.agents) > 1:
            agent = self.nodes.agents.pop(self.chance.choice(list(self.nodes.agents)))
            self.away.append(agent)
            if self.chance.random() < 0.7:  # else a supervisor is new, and has not heard of it yet
                self.give_role(agent.name)
            self.do(self.checkpoints.on_node_lost(agent.name, self.time))
            self.interrupt(agent.name)
            if agent.words:  # said before
                self.do(self.checkpoints.on_message(agent.name, agent.words.popleft(), self.time))

    def reconnect(self) -> None:
        """A connection broke, or an agent was started again, before anybody missed it."""
        agent = self.chance.choice(list(self.nodes.agents.values()))
        if self.chance.random() < 0.3:
            if self.chance.random() < 0.5:
                agent.start_again()
                self.interrupt(agent.name)
            self.join(agent)

    def interrupt(self, name: str) -> None:
        if name in self.state.placement and self.state.phase is Phase.RUNNING:
            self.state.phase = Phase.STOPPING

    def come_back(self) -> None:
        if self.away:
            agent = self.away.pop(self.chance.randrange(len(self.away)))
            if self.chance.random() < 0.6:
                agent.start_again()
            self.join(agent)

    def launch(self) -> None:
        """Once enough nodes are here the ranks go on, from the newest state that anybody still has."""
        if self.state.phase is Phase.RUNNING or len(self.nodes.agents) < ACTIVE:
            return
        self.quiet()
        kept = [name for name in self.state.placement if name in self.nodes.agents]
        spares = [name for name in self.nodes.agents if name not in kept]
        names = [name if name in self.nodes.agents else spares.pop(0) for name in self.state.placement]
        self.place(names)
        self.state.phase = Phase.LAUNCHING
        truth = self.nodes.truth()
        best = max((key[0] for key in self.committed if truth.restorable(key)), default=0)
        launch = Launch(
            attempt=self.state.attempt, placement=tuple(names), master_address="", master_port=0, reason=""
        )
        self.do(self.checkpoints.choose(launch, self.time))
        chosen = self.state.restore
        assert chosen is not None
        assert chosen.attempt == self.state.attempt
        assert chosen.step >= best, f"step {best} is held, and {chosen} was chosen"
        orders = [
            self.checkpoints.restore.message(name, range(rank, rank + 1)) for rank, name in enumerate(names)
        ]
        for rank, order in enumerate(orders):
            self.check_restore(order, rank, chosen)
        for rank, order in enumerate(orders):
            self.restore(self.nodes.agents[names[rank]], rank, order)
        self.done = max(chosen.step, 0)
        self.state.phase = Phase.RUNNING

    def check_restore(self, order: msg.Restore | None, rank: int, chosen: ev.RestorePlanned) -> None:
        """All ranks go on from the state that was chosen, and can have it."""
        assert (order is not None) == (chosen.tier == MEMORY)
        if order is not None:
            key = StateId(order.step, order.attempt)
            assert order.step == chosen.step
            sources = order.ranks[rank] or self.sources(self.state.placement[rank], key, rank)
            assert self.nodes.serves(key, rank, "own", sources), f"nobody has rank {rank}'s image"

    def sources(self, node: str, key: StateId, rank: int) -> tuple[msg.Source, ...]:
        """Of an image that is to be in the node's own memory: it, or those that the node is told of if it is
        not there any more."""
        image = report(MEMORY, key, rank, ACTIVE)
        if image in self.nodes.agents[node].held:
            here = msg.Source(tier=MEMORY, node=node, hosts=(), port=1, part="all", rank=rank)
            return (here,)
        ask = msg.AskSources(step=key[0], attempt=key[1], rank=rank)
        (answer,) = self.checkpoints.on_message(node, ask, self.time)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, msg.Sources)
        return answer.message.sources

    def restore(self, agent: Agent, rank: int, order: msg.Restore | None) -> None:
        image = None
        if order is None:
            agent.give_up([copy for copy in agent.held if copy.tier == PEER])
        else:
            image = report(MEMORY, StateId(order.step, order.attempt), rank, ACTIVE)
        for other in [copy for copy in agent.held if copy.tier == MEMORY and copy != image]:
            agent.held.discard(other)
            agent.words.append(msg.Dropped(copy=other))
        if image is not None:
            agent.hold(image)

    def go_back(self) -> None:
        if self.chance.random() < 0.05 and self.committed:
            to, _ = self.chance.choice(sorted(self.committed))
            self.do(self.checkpoints.go_back(to, self.time))
            self.committed = {key for key in self.committed if key[0] <= to}
            self.state.phase = Phase.STOPPING

    def secure(self) -> None:
        if self.chance.random() < 0.1:
            self.do(self.checkpoints.secure(self.time))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_held_is_restored_and_given_up_only_for_what_is_safe(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SLICE_NODES", 1)
    walk = Walk(seed)
    often = [walk.hear, walk.obey, walk.slice] * 8 + [walk.look, walk.launch] * 2 + [walk.save]
    seldom = [walk.lose, walk.come_back, walk.reconnect, walk.spoil, walk.go_back, walk.secure]
    for _ in range(EVENTS):
        walk.chance.choice([*often, *seldom])()
    walk.settle()
