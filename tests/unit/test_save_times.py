"""When ranks save: all at the same steps, whatever their clocks say, and as often as was asked for."""

from __future__ import annotations

import random

import pytest

from jurymast.core.judges.cadence import (
    Cadence,
    Due,
    MemoryUse,
    SaveTimes,
    first_interval_s,
    memory_of,
    young_interval_s,
)

MTBF_S = 3600.0


class Ranks:
    """They go in step, as they train together; each has a clock of its own."""

    def __init__(
        self, cadence: Cadence, *, count: int = 3, follows: bool = False, stall_s: float = 1.0
    ) -> None:
        self.all = [SaveTimes(cadence, MTBF_S) for _ in range(count)]
        self.clocks = [1000.0 * number for number in range(count)]
        self.stall_s = stall_s
        self.saves: list[int] = []
        self.asked: list[int] = []
        for one, clock in zip(self.all, self.clocks, strict=True):
            one.follows = follows
            one.begin(0, clock)

    def step(self, step: int, seconds: float, *, told: bool = False, ok: bool = True) -> None:
        self.clocks = [clock + seconds for clock in self.clocks]
        while (due := self.all_due(step, told)) is not Due.NOTHING:
            if due is Due.MEASURE:
                for one in self.all:
                    one.measured(step)
            elif due is Due.AGREE:
                self.asked.append(step)
                following = self.all[0].proposal(step, self.clocks[0])
                for one, clock in zip(self.all, self.clocks, strict=True):
                    one.agreed(step, following, clock)
            else:
                self.saves.append(step)
                self.saved(step, ok)
                return

    def all_due(self, step: int, told: bool) -> Due:
        (due,) = {one.due(step, told=told) for one in self.all}
        return due

    def saved(self, step: int, ok: bool) -> None:
        stall_s = self.stall_s if ok else None
        for number, one in enumerate(self.all):
            self.clocks[number] += self.stall_s
            one.saved(step, self.clocks[number], stall_s=stall_s)


def test_steps_that_the_script_names() -> None:
    ranks = Ranks(Cadence(steps=5))
    for step in range(1, 21):
        ranks.step(step, 1.0)
    assert (ranks.saves, ranks.asked) == ([5, 10, 15, 20], [])


def test_steps_that_agents_say() -> None:
    ranks = Ranks(Cadence(), follows=True)
    for step in range(1, 21):
        ranks.step(step, 1.0, told=step in (3, 11))
    assert (ranks.saves, ranks.asked) == ([3, 11], [])
    both = Ranks(Cadence(steps=5), follows=True)
    for step in range(1, 11):
        both.step(step, 1.0, told=step == 3)
    assert both.saves == [3, 5, 10]


def test_by_the_clock_ranks_meet_seldom_and_save_when_it_is_time() -> None:
    ranks = Ranks(Cadence(seconds=100.0))
    for step in range(1, 1001):
        ranks.step(step, 1.0)
    apart = [after - before for before, after in zip(ranks.saves, ranks.saves[1:], strict=False)]
    assert set(apart) <= {99, 100, 101}
    assert len(ranks.asked) < 150  # two for every doubling of the steps between saves


def test_what_loses_least_follows_from_what_a_save_costs() -> None:
    for stall_s in (0.5, 20.0):
        ranks = Ranks(Cadence(), stall_s=stall_s)
        for step in range(1, 4001):
            ranks.step(step, 1.0)
        first, second, *_ = ranks.saves
        assert first == pytest.approx(first_interval_s(MTBF_S), abs=2)
        assert second - first == pytest.approx(young_interval_s(stall_s, MTBF_S), abs=2)


def test_where_memory_is_not_ready_the_next_step_is_tried() -> None:
    ranks = Ranks(Cadence(steps=5), count=1)
    (one,) = ranks.all
    one.saved(5, ranks.clocks[0], again=True)
    assert (one.due(5, told=False), one.due(6, told=False)) == (Due.NOTHING, Due.SAVE)
    one.saved(6, ranks.clocks[0])
    assert [step for step in range(6, 12) if one.due(step, told=False) is Due.SAVE] == [10, 11]


@pytest.mark.parametrize(("cadence", "saves"), [(Cadence(steps=5), [5, 10]), (Cadence(steps=1), [1, 2, 3])])
def test_after_the_first_step_the_state_is_measured_whether_or_not_it_is_saved(
    cadence: Cadence, saves: list[int]
) -> None:
    ranks = Ranks(cadence)
    for one in ranks.all:
        one.measure_after(0)
    assert ranks.all_due(1, told=False) is Due.MEASURE
    for step in range(1, saves[-1] + 1):
        ranks.step(step, 1.0)
    assert ranks.saves == saves


def test_ranks_agree_whatever_their_clocks_do() -> None:
    """`all_due` has one answer."""
    for seed in range(300):
        chance = random.Random(seed)
        cadence = chance.choice([Cadence(), Cadence(seconds=chance.uniform(1.0, 60.0)), Cadence(steps=7)])
        ranks = Ranks(cadence, count=2, follows=chance.random() < 0.3, stall_s=chance.uniform(0.01, 5.0))
        if chance.random() < 0.5:
            for one in ranks.all:
                one.measure_after(0)
        for step in range(1, 200):
            ranks.clocks[1] += chance.uniform(-50.0, 50.0)
            told = ranks.all[0].follows and chance.random() < 0.05
            ranks.step(step, chance.uniform(0.01, 3.0), told=told, ok=chance.random() < 0.8)


def test_an_attempt_saves_to_memory_if_all_its_ranks_can() -> None:
    assert memory_of([(False, True), (False, True)]) == MemoryUse(True)
    assert memory_of([(False, True), (False, False)]) == MemoryUse(None, (1,))
    assert memory_of([(False, False), (True, False)]) == MemoryUse(False, (1,))
