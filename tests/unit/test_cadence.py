"""When to save, without a clock: the formula, and ranks that meet at the same steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.judges.cadence import (
    AUTO_INTERVAL_MAX_S,
    Cadence,
    first_interval_s,
    next_agreement,
    next_save_step,
    parse_cadence,
    young_interval_s,
)
from jurymast.core.state.failure_rate import default_mtbf_s

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("200 steps", Cadence(steps=200)),
        ("1 step", Cadence(steps=1)),
        ("200", Cadence(steps=200)),
        (200, Cadence(steps=200)),
        ("90s", Cadence(seconds=90.0)),
        ("10m", Cadence(seconds=600.0)),
        (" 1.5 H ", Cadence(seconds=5400.0)),
        ("0.5s", Cadence(seconds=0.5)),
        ("auto", Cadence()),
    ],
)
def test_parse(text: str | int, cadence: Cadence) -> None:
    assert parse_cadence(text) == cadence


@pytest.mark.parametrize(
    "text", ["", "ten steps", "10 parsecs", "-5 steps", "0 steps", 0, -3, "0s", "1.5 steps"]
)
def test_parse_refuses(text: str | int) -> None:
    with pytest.raises(ValueError, match="cadence"):
        parse_cadence(text)


def test_steps_and_time_contradict() -> None:
    with pytest.raises(ValueError, match="not both"):
        Cadence(steps=1, seconds=1.0)


def test_default_mtbf() -> None:
    # five failures in 1000 node-days: 1000 nodes fail every fifth of a day
    assert default_mtbf_s(1000) == pytest.approx(DAY_S / 5)
    assert default_mtbf_s(1) == pytest.approx(200 * DAY_S)


def test_young_within_bounds() -> None:
    # 2 s of stall, an hour between failures: sqrt(2 * 2 * 3600) = 120 s
    assert young_interval_s(2.0, 3600.0) == pytest.approx(120.0)
    assert young_interval_s(1.0, default_mtbf_s(1)) == AUTO_INTERVAL_MAX_S
    assert young_interval_s(30.0, 60.0) == 300.0
    assert young_interval_s(400.0, 1e9) == 4000.0
    assert first_interval_s(default_mtbf_s(1)) == 300.0
    assert first_interval_s(1000.0) == pytest.approx(math.sqrt(2 * 10 * 1000.0))


@given(st.floats(0.001, 1000.0), st.floats(1.0, 1e9))
def test_young_loses_least(stall_s: float, mtbf_s: float) -> None:
    """Nothing within the bounds beats it on stall / interval + interval / (2 * MTBF), to first order."""

    def lost(interval_s: float) -> float:
        return stall_s / interval_s + interval_s / (2.0 * mtbf_s)

    best_s = young_interval_s(stall_s, mtbf_s)
    assert stall_s / best_s <= 0.1 + 1e-9
    for factor in (0.5, 0.9, 1.1, 2.0):
        other_s = best_s * factor
        if 10.0 * stall_s <= other_s <= AUTO_INTERVAL_MAX_S:
            assert lost(best_s) <= lost(other_s) * (1 + 1e-9)


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_next_save_step(step: int, every: int) -> None:
    following = next_save_step(step, every)
    assert step < following <= step + every
    assert following % every == 0


def agreements(first: list[float], step_s: float, interval_s: float) -> tuple[int, float, int]:
    """Follow agreements until the save; returns its step, its time, and how many agreements that took.

    The first steps take `first`, all others `step_s`.
    """

    def time_at(step: int) -> float:
        return sum(first[:step]) + max(0, step - len(first)) * step_s

    before, step, count = 0, 1, 1
    while True:
        measured_s = (time_at(step) - time_at(before)) / (step - before)
        following = next_agreement(step, step - before, interval_s - time_at(step), measured_s)
        assert following >= step
        if following == step:
            return step, time_at(step), count
        before, step, count = step, following, count + 1


@given(st.floats(0.001, 100.0), st.floats(0.01, 3600.0))
def test_regular_steps_save_in_time_with_few_agreements(step_s: float, interval_s: float) -> None:
    step, saved_at, count = agreements([], step_s, interval_s)
    assert abs(saved_at - interval_s) <= max(0.51 * step_s, step_s - interval_s)
    assert count <= 2 * math.log2(step) + 3


@given(st.lists(st.floats(0.1, 60.0), max_size=5), st.floats(0.01, 1.0), st.floats(60.0, 1800.0))
def test_slow_first_steps_do_not_mislead(first: list[float], step_s: float, interval_s: float) -> None:
    _, saved_at, _ = agreements(first, step_s, interval_s)
    assert saved_at >= interval_s - 0.51 * max([step_s, *first])
    # a slow step after fast ones may come in the middle of a gap, which is four steps at most by then
    assert saved_at <= max(interval_s, sum(first)) + 5 * step_s


@given(st.integers(1, 400), st.floats(1.0, 2.0))
def test_steps_that_get_slower_are_noticed(change: int, factor: float) -> None:
    """Up to twice as slow costs no punctuality: agreements are half-way to the save."""
    _, saved_at, _ = agreements([0.1] * change, 0.1 * factor, 60.0)
    assert abs(saved_at - 60.0) <= 0.2


def test_a_save_that_is_due_happens_now() -> None:
    assert next_agreement(7, 1, 0.0, 1.0) == 7
    assert next_agreement(7, 1, -5.0, 1.0) == 7
    assert next_agreement(7, 2, 5.0, 0.0) == 11
    assert next_agreement(7, 2, 600.0, 60.0) == 11
    assert next_agreement(7, 8, 600.0, 60.0) == 12
