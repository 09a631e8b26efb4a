"""How much copies of saves slow the training, from what heartbeats show of steps, held against trainings of
which it is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.checkpoints.slowdown import (
    ENDS_MAX,
    LEAST_SAVES,
    QUIET_STEPS,
    RECENT_SAVES,
    SLOWDOWN_MAX,
    Copying,
    Slowdown,
    StepEnd,
    between,
    weighted_median,
)

STALL_S = 0.05
BEAT_S = 0.5


class Training:
    """Steps of about `step_s`, which take longer by `share` of the time for which copies are under way: for
    `copy_s` after each save. `load(now)`: how many times longer everything takes."""

    def __init__(self, seed: int, step_s: float, copy_s: float, share: float, jitter: float = 0.0) -> None:
        self.chance = random.Random(seed)
        self.step_s, self.copy_s, self.share, self.jitter = step_s, copy_s, share, jitter
        self.now, self.done = 100.0, 0
        self.meter = Slowdown()
        self.load: Callable[[float], float] = lambda now: 1.0
        self._told_at = self._beat_at = 0.0
        self._copies: list[tuple[float, float]] = []  # when they end, and how long they took
        self._ended_at = 0.0  # the newest step

    def _step(self) -> float:
        """The time that this step takes."""
        alone_s = self.step_s * self.load(self.now) * (1.0 + self.jitter * self.chance.uniform(-1.0, 1.0))
        copying_s = max([0.0, *(end - self.now for end, _ in self._copies)])
        slow_s = alone_s / (1.0 - self.share) if self.share < 1.0 else math.inf
        return slow_s if slow_s < copying_s else alone_s + self.share * copying_s

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            end = self.now + self._step()
            for at in self._beats(end):
                self.meter.on_step(self.done, at)
            self.now, self.done = end, self.done + 1
            self._ended_at = end

    def _beats(self, until: float) -> Iterator[float]:
        """What heartbeats show before `until`: when the newest step ended. Copies end as well."""
        while self._told_at + BEAT_S <= until:
            self._told_at += BEAT_S
            for end, took_s in [one for one in self._copies if one[0] <= self._told_at]:
                self._copies.remove((end, took_s))
                self.meter.on_copied(end, took_s)
            if self.done:
                yield self._ended_at

    def save(self, copy_s: float = 0.0, *, copying_since: float = math.inf) -> None:
        self.now += STALL_S
        copy_s = copy_s or self.copy_s
        self._copies.append((self.now + copy_s, copy_s))
        self.meter.on_saved(self.done, STALL_S, copying_since, self.now)


def trained(training: Training, saves: int, steps: int) -> float | None:
    training.go_on(steps)
    for _ in range(saves):
        training.save()
        training.go_on(steps)
    return training.meter.share


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.02, 0.2, 0.6]), step_s=st.floats(0.05, 3.0),
    copies=st.floats(0.3, 3.0), load=st.floats(1.0, 3.0),
)  # fmt: skip
def test_it_is_what_the_training_lost_and_not_what_other_load_took(
    seed: int, share: float, step_s: float, copies: float, load: float
) -> None:
    copy_s = max(copies, 2.0 * step_s)
    training = Training(seed, step_s, copy_s, share)
    training.load = lambda now: load
    found = trained(training, 8, round(8.0 * (copy_s + 2.0) / step_s))
    assert found is not None
    assert found == pytest.approx(share, abs=0.02)


def test_load_that_comes_and_goes_is_not_taken_for_what_copies_cost() -> None:
    """Each tenth second or so for a random time, as builds and other people's jobs do."""
    for share in (0.0, 0.3):
        found = []
        for seed in range(20):
            training = Training(seed, 0.1, 1.0, share, jitter=0.2)
            busy = random.Random(seed)
            loads = [busy.choice([1.0, 1.0, 1.0, 1.5]) for _ in range(1000)]
            training.load = lambda now, loads=loads: loads[int(now / 7.0) % len(loads)]  # type: ignore[misc]
            share_found = trained(training, RECENT_SAVES, 120)
            assert share_found is not None
            found.append(share_found)
        assert max(abs(one - share) for one in found) < 0.1, (share, found)


def test_steps_of_any_length_alone_are_no_cost() -> None:
    found = [trained(Training(seed, 1.0, 0.3, 0.0, jitter=0.5), 40, 30) for seed in range(20)]
    costs = [0.3 * share for share in found if share is not None]
    assert len(costs) == len(found)
    assert sorted(costs)[len(costs) // 2] < 0.1, "of steps that are up to half a second longer or shorter"
    assert max(costs) <= 0.3 * SLOWDOWN_MAX


def test_it_is_not_known_from_few_saves_nor_without_copies() -> None:
    training = Training(0, 0.1, 1.0, 0.3)
    assert trained(training, LEAST_SAVES, 50) is None, "the last of them is not over yet"
    training.save()
    assert training.meter.share == pytest.approx(0.3, abs=0.02)
    alone = Training(0, 0.1, 1.0, 0.3)
    alone.meter.on_copied = lambda now, seconds: None  # type: ignore[method-assign]
    assert trained(alone, 10, 50) is None


def test_one_interval_that_is_unlike_the_others_changes_nothing() -> None:
    training = Training(0, 0.1, 1.0, 0.3)
    trained(training, 6, 50)
    before = training.meter.share
    training.save()
    training.now += 60.0  # a validation right after it
    training.go_on(50)
    training.save()
    assert before is not None
    assert training.meter.share == pytest.approx(before, abs=0.02)


def test_a_copy_that_outlasts_an_interval_is_under_way_in_both() -> None:
    """Else what a step takes by itself would be measured while it is slow."""
    training = Training(0, 0.1, 1.0, 0.3)
    training.go_on(100)
    for _ in range(10):
        training.save(30.0)
        begun = training.now
        training.go_on(50)  # seven seconds
        training.save(copying_since=begun)
        training.go_on(400)
    quiet_step_s = training.meter._quiet_step_s
    assert quiet_step_s == pytest.approx(0.1, rel=0.01)
    assert training.meter.share == pytest.approx(0.3, abs=0.1)


def test_a_new_attempt_measures_from_its_own_steps() -> None:
    training = Training(0, 0.1, 1.0, 0.3)
    trained(training, 6, 50)
    before = training.meter.share
    training.save()
    training.meter.begin()
    training.now, training.done = training.now + 100.0, training.done - 40
    training._ended_at = training.now
    trained(training, 6, 50)
    assert before is not None
    assert training.meter.share == pytest.approx(before, abs=0.02)


def test_weeks_without_a_save_take_no_memory() -> None:
    meter = Slowdown()
    for step in range(2 * ENDS_MAX):
        meter.on_step(step, float(step))
    assert len(meter._ends) == 1
    meter.on_saved(2 * ENDS_MAX, 0.0, math.inf, 2.0 * ENDS_MAX)
    for step in range(2 * ENDS_MAX, 5 * ENDS_MAX):
        meter.on_step(step, float(step))
    assert len(meter._ends) == ENDS_MAX
    assert meter._ends[-1].step == 5 * ENDS_MAX - 1


def test_what_is_no_step_end_is_passed_over() -> None:
    meter = Slowdown()
    meter.on_saved(1, 0.0, math.inf, 1.0)
    for step, at in ((2, 2.0), (2, 2.5), (1, 3.0), (3, 1.5), (4, 4.0)):
        meter.on_step(step, at)
    assert meter._ends == [StepEnd(2, 2.0), StepEnd(4, 4.0)]


def test_steps_during_copies_are_told_from_those_without() -> None:
    ends = [StepEnd(step, float(step)) for step in range(20)]
    found = between(ends, 4, 0.25, [Copying(8.5, 9.5), Copying(9.0, 11.0)])
    # Of step 5, which follows the save, and of steps 9 to 11.
    assert found.steps == 4
    assert found.seconds == pytest.approx(3.75)
    assert found.quiet_step_s == pytest.approx(1.0)
    few = between(ends[: QUIET_STEPS + 1], 0, 0.0, [])
    assert few.quiet_step_s is None, "one step less is quiet than there are"


def test_a_median_by_weight() -> None:
    assert weighted_median([(1.0, 1.0), (3.0, 1.0), (2.0, 1.0)]) == 2.0
    assert weighted_median([(1.0, 1.0), (3.0, 5.0), (2.0, 1.0)]) == 3.0
