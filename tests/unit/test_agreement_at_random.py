"""All ranks save at the same steps, whatever is late: the real ranks' pages, follower and supervisor, on a
simulated clock and over channels that deliver when chance has it."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.agent.ranks import RankMemory
from jurymast.core.checkpoints.agreement import Agreement
from jurymast.core.run.machine import step as take
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.messages import Beat, CadenceReport
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.schedule import NEVER, Schedule
from jurymast.core.state.settings import Settings
from jurymast.worker.link import EXPLICIT, Link, ScheduleFollower, open_page
from support.reports import reported
from support.waiting import wait_until

STEP_S = 0.1


class Rank:
    """A script's loop: a heartbeat each step, a save when the schedule says so."""

    def __init__(
        self, memory: RankMemory, local_rank: int, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self.link = Link(open_page(memory.page_path), "", local_rank)
        self.link.numbering = EXPLICIT
        schedule = self.link.schedule
        assert schedule is not None
        self.follower = ScheduleFollower(schedule, self.link.settled, wait=wait)
        self.at = 0
        self.blocked = False
        self.saved: list[int] = []

    def step(self) -> None:
        self.at += 1
        self.link.beat(self.at)
        self.blocked = True
        if self.follower.due(self.at):
            self.saved.append(self.at)
            self.follower.passed(self.at)
        self.blocked = False


class Agent:
    def __init__(self, count: int, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.memory = RankMemory(count)
        self.memory.wants_cadence(within.Cadence(seconds=10.0))
        self.ranks = [Rank(self.memory, number, wait) for number in range(count)]
        self.up: deque[Beat] = deque()
        self.down: deque[msg.CadenceSet] = deque()

    def beat(self) -> None:
        reports = [
            reported(step=beat.step, beats=beat.beats, explicit=beat.explicit, settled=beat.settled)
            for beat in self.memory.beats()
        ]
        self.up.append(Beat(1, reports, self.memory.cadence()))


class World:
    """Some agents with their ranks, and one supervisor after the other."""

    def __init__(self, seed: int, nodes: int, ranks: int) -> None:
        self.chance = random.Random(seed)
        self.time = 100.0
        self.agents = {f"n{i}": Agent(ranks, self.wait) for i in range(nodes)}
        self.state = RunState(Settings(), active=nodes)
        self.state.nodes = {name: Node(name, i, Role.ACTIVE) for i, name in enumerate(self.agents)}
        self.state.placement, self.state.phase, self.state.attempt = tuple(self.agents), Phase.RUNNING, 1
        self.events: list[ev.CadenceSet] = []
        self.agreement = self.supervise()

    def supervise(self) -> Agreement:
        agreement = Agreement(self.state)
        agreement.samples.append(STEP_S)
        return agreement

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.message, msg.CadenceSet)
                self.agents[effect.node].down.append(effect.message)
            else:
                assert isinstance(effect, Record)
                assert isinstance(effect.event, ev.CadenceSet)
                self.events.append(effect.event)
                take(self.state, effect.event)

    def take_over(self) -> None:
        """The supervisor dies, what was on its way is lost, and another one starts from the journal."""
        for agent in self.agents.values():
            agent.up.clear()
            agent.down.clear()
        self.agreement = self.supervise()

    def wait(self, known: Callable[[], bool]) -> None:
        """A rank in doubt waits; everything else goes on."""
        for _ in range(20_000):
            if known():
                return
            self.act()
        raise AssertionError("a rank waited for ever")

    def act(self) -> None:
        """One thing happens."""
        self.time += self.chance.uniform(0.0, 0.05)
        name, agent = self.chance.choice(list(self.agents.items()))
        what = self.chance.random()
        if what < 0.35:
            rank = self.chance.choice(agent.ranks)
            if not rank.blocked:
                rank.step()
        elif what < 0.55:
            agent.beat()
        elif what < 0.75 and agent.up:
            self.do(self.agreement.on_heartbeat(name, agent.up.popleft(), self.time))
        elif what < 0.9 and agent.down:
            agent.memory.set_cadence(agent.down.popleft())
        elif what < 0.95:
            self.do(self.agreement.on_time(self.time))
        elif what < 0.965:
            self.agreement.ask("a test")
        elif what < 0.975:  # steps change their length, and with it the number of them between saves
            self.agreement.samples.clear()
            self.agreement.samples.append(self.chance.choice([0.02, 0.1, 0.5]))
        elif what < 0.978:
            self.take_over()

    def agree(self) -> None:
        """What all ranks have done, they have saved alike, and as the journal tells."""
        ranks = [rank for agent in self.agents.values() for rank in agent.ranks]
        done = min(rank.at - rank.blocked for rank in ranks)
        saved = [[step for step in rank.saved if step <= done] for rank in ranks]
        assert all(one == saved[0] for one in saved), saved


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 4), ranks=st.integers(1, 2))
def test_ranks_save_alike_whatever_is_late_and_whoever_takes_over(seed: int, nodes: int, ranks: int) -> None:
    world = World(seed, nodes, ranks)
    for _ in range(3000):
        world.act()
    world.agree()


def test_that_is_not_because_nothing_is_ever_agreed() -> None:
    told = saved = withdrawn = 0
    for seed in range(10):
        world = World(seed, 3, 1)
        for _ in range(6000):
            world.act()
            withdrawn += world.agreement._decided < 0
        world.agree()
        told += len(world.events)
        saved += sum(len(rank.saved) for agent in world.agents.values() for rank in agent.ranks)
    assert told > 50
    assert saved > 100
    assert withdrawn > 0


def test_a_schedule_names_the_same_steps_from_wherever_it_is_asked() -> None:
    schedule = Schedule(1, 10, 12, 5)
    assert [schedule.due_after(step) for step in (0, 11, 12, 13, 16, 17, 22)] == [12, 12, 17, 17, 17, 22, 27]
    assert Schedule(1, 10, 12, 0).due_after(12) == NEVER


def follower(memory: RankMemory, **options: Any) -> tuple[ScheduleFollower, list[int]]:
    link = Link(open_page(memory.page_path), "", 0)
    assert link.schedule is not None
    settled: list[int] = []
    return ScheduleFollower(link.schedule, settled.append, **options), settled


def order(memory: RankMemory, schedule: Schedule, decided: int = 0) -> None:
    memory.set_cadence(msg.CadenceSet(attempt=1, schedule=schedule, decided=decided))


def test_at_its_step_a_rank_waits_until_a_proposal_is_decided() -> None:
    memory = RankMemory(1)
    ours, settled = follower(memory)
    order(memory, Schedule(1, 5, 6, 4))
    assert not ours.due(4)
    answers: list[bool] = []
    rank = threading.Thread(target=lambda: answers.append(ours.due(5)))
    rank.start()
    order(memory, Schedule(1, 5, 6, 4), decided=1)
    rank.join(10.0)
    assert (answers, settled) == ([False], [1])
    saved = []
    for step in range(6, 20):
        if ours.due(step):
            ours.passed(step)
            saved.append(step)
    assert saved == [6, 10, 14, 18]


def test_what_is_withdrawn_changes_nothing_and_holds_nobody_up() -> None:
    memory = RankMemory(1)
    ours, settled = follower(memory)
    order(memory, Schedule(1, 3, 3, 2), decided=1)
    assert ours.due(3)
    ours.passed(3)
    order(memory, Schedule(2, 100, 100, 50))
    assert not ours.due(4)
    order(memory, Schedule(2, 100, 100, 50), decided=-2)
    assert ours.due(5)
    assert settled == [1, 2]


def test_without_any_decision_a_rank_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jurymast.worker.link.DOUBT_LIMIT_S", 0.05)
    memory = RankMemory(1)
    ours, settled = follower(memory)
    order(memory, Schedule(1, 3, 3, 2))
    assert not ours.due(3)
    assert settled == [1]
    order(memory, Schedule(1, 3, 3, 2), decided=1)
    assert not ours.due(4)


def test_a_script_with_its_own_cadence_saves_once_when_told() -> None:
    memory = RankMemory(1)
    ours, _ = follower(memory, repeat=False)
    order(memory, Schedule(1, 3, 4, 2), decided=1)
    saved = []
    for step in range(1, 12):
        if ours.due(step):
            ours.passed(step)
            saved.append(step)
    assert saved == [4]


def test_ranks_that_are_to_move_wait_after_the_save_until_there_is_another_schedule() -> None:
    memory = RankMemory(1)
    ours, _ = follower(memory)
    order(memory, Schedule(1, 3, 4, 2, stays=True), decided=1)
    waits = []
    for step in range(1, 5):
        if ours.due(step):
            ours.passed(step)
        waits.append(ours.stays(step))
    assert waits == [False, False, False, True]
    rank = threading.Thread(target=ours.stay, args=(4,))
    rank.start()
    order(memory, Schedule(2, 9, 9, 2))
    rank.join(10.0)
    assert not rank.is_alive()
    assert not ours.stays(4)


def test_a_new_attempt_starts_with_a_blank_page() -> None:
    memory = RankMemory(1)
    memory.wants_cadence(within.Cadence(steps=5))
    order(memory, Schedule(7, 3, 4, 2), decided=7)
    assert memory.cadence() == CadenceReport(7, 7, steps=5)
    memory.clear()
    assert memory.cadence() is None
    ours, settled = follower(memory)
    assert not ours.due(10)
    assert settled == []


def test_a_look_costs_next_to_nothing() -> None:
    """Ranks do it at every step."""
    import timeit

    ours, _ = follower(RankMemory(1))
    wait_until("a quiet moment", lambda: timeit.timeit(lambda: ours.due(1), number=2000) / 2000 < 5e-6)
