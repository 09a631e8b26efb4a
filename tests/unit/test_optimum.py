"""The formulas of cadence and goodput against independent numbers: searches, sums, published values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.judges.forecast import (
    Saving,
    async_goodput,
    goodput,
    optimal_interval_s,
    optimal_s,
    optimal_share,
    sensitivity,
    two_levels,
    young_s,
)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """tau by Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 37."""
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    half = save_s / (2.0 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - save_s


def best_goodput(save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Goodput at the best tau: e^(-R/M) (1 - tau/M), as there e^((tau + C)/M) = 1 / (1 - tau/M)."""
    return math.exp(-restart_s / mtbf_s) * (1.0 - optimal_share(save_s / mtbf_s))


def async_waste(interval_s: float, saving: Saving, mtbf_s: float) -> float:
    """(s + sigma d)/Delta + (Delta/2 + d + R)/M, to first order; R includes detection."""
    lost_s = interval_s / 2.0 + saving.copy_s + saving.restart_s
    return saving.cost_s / interval_s + lost_s / mtbf_s


def golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """The place of the highest value between `low` and `high`."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(200):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            low = left
        else:
            high = right
    return (low + high) / 2.0


@given(st.floats(1e-4, 3.0), st.floats(0.0, 0.5))
@settings(max_examples=50)
def test_the_optimum_is_where_a_search_finds_it(cost: float, restart: float) -> None:
    found = golden_section(lambda tau: goodput(tau, cost, 1.0, restart), 1e-9, 3.0)
    assert optimal_s(cost, 1.0) == pytest.approx(found, rel=2e-5)  # a search sees half of a float's digits
    assert best_goodput(cost, 1.0, restart) == pytest.approx(goodput(found, cost, 1.0, restart), rel=1e-9)


@given(st.floats(1e-300, 700.0))
def test_lambert_w_solves_its_equation(cost: float) -> None:
    """W e^W = -e^-(1 + cost), with W = x - 1; written so that no digits are lost near the branch point."""
    x = optimal_share(cost)
    assert 0.0 < x <= 1.0
    if x < 1e-5:
        assert x == pytest.approx(math.sqrt(2.0 * cost), rel=1e-5)
    elif x < 0.9999:
        assert x + math.log1p(-x) == pytest.approx(-cost, rel=1e-9)


def test_the_approximations_come_close_to_the_exact_optimum() -> None:
    mtbf = 86_400.0
    for save_s in (1.0, 10.0, 100.0):
        exact = optimal_s(save_s, mtbf)
        assert daly_s(save_s, mtbf) == pytest.approx(exact, rel=1e-3)
        assert young_s(save_s, mtbf) == pytest.approx(exact, rel=0.02)
    assert daly_s(50.0, 20.0) == 20.0
    assert optimal_s(0.0, mtbf) == 0.0
    assert optimal_s(1.0, math.inf) == math.inf


def test_goodput_agrees_with_played_out_failures() -> None:
    """20,000 segments, each until it and its save come through whole; after a failure the recovery, too, must
    come through before the segment is done again."""
    tau, save, mtbf, restart = 300.0, 20.0, 1000.0, 60.0
    chance = random.Random(1)
    spent = 0.0
    for _ in range(20_000):
        needed = tau + save
        while (lived := chance.expovariate(1.0 / mtbf)) < needed:
            spent += lived
            needed = restart + tau + save
        spent += needed
    assert 20_000 * tau / spent == pytest.approx(goodput(tau, save, mtbf, restart), rel=0.01)


def test_goodput_at_its_ends() -> None:
    assert goodput(10.0, 0.0, math.inf, 0.0) == 1.0
    assert goodput(0.0, 0.0, 100.0, 10.0) == pytest.approx(math.exp(-0.1))
    assert goodput(0.0, 1.0, 100.0, 10.0) == 0.0
    assert goodput(1e6, 1.0, 1.0, 0.0) == 0.0


def test_small_wastes_add_up_as_the_first_order_says() -> None:
    saving = Saving(stall_s=0.5, copy_s=20.0, slowdown=0.02, restart_s=30.0)
    mtbf = 100_000.0
    assert 1.0 - async_goodput(300.0, saving, mtbf) == pytest.approx(
        async_waste(300.0, saving, mtbf), rel=0.01
    )
    best_s = golden_section(lambda s: -async_waste(s, saving, mtbf), 1.0, 5000.0)
    assert best_s == pytest.approx(math.sqrt(2 * saving.cost_s * mtbf), rel=1e-4)
    assert optimal_interval_s(saving, mtbf) == pytest.approx(best_s, rel=0.01)


def test_a_save_waits_for_the_last_one_and_for_a_step() -> None:
    assert optimal_interval_s(Saving(0.001, copy_s=500.0), 10_000.0) == 500.0


def test_two_levels_against_a_search_over_both() -> None:
    """First-order waste of a cheap save every `interval` and a durable one every `every`-th."""
    cheap, durable, mtbf, share = Saving(1.0, restart_s=60.0), Saving(30.0, restart_s=60.0), 50_000.0, 0.05
    found = two_levels(cheap, durable, mtbf, share)

    def waste(interval_s: float, every: int) -> float:
        stalls = cheap.stall_s / interval_s + durable.stall_s / (every * interval_s)
        rework = (1 - share) * interval_s / 2 + share * every * interval_s / 2
        return stalls + (rework + 60.0) / mtbf

    best = min((waste(i, n), i, n) for i in range(50, 1500, 10) for n in range(1, 80))
    assert waste(found.interval_s, found.durable_every) == pytest.approx(best[0], rel=0.02)
    assert found.goodput == pytest.approx(1.0 - best[0], abs=0.001)


def test_two_levels_at_their_ends() -> None:
    cheap, durable = Saving(0.5, 2.0, restart_s=30.0), Saving(0.0, 600.0, 0.01, restart_s=90.0)
    alone = two_levels(cheap, durable, 10_000.0, 0.0)
    assert alone.durable_interval_s == pytest.approx(86_400.0, rel=0.01)  # one a day, though none is needed
    slow = two_levels(cheap, durable, 10_000.0, 0.1, interval_s=100.0)
    assert slow.durable_interval_s >= 600.0  # never before the last one is written
    assert slow.goodput < alone.goodput
    every_failure = two_levels(cheap, durable, 10_000.0, 1.0, interval_s=100.0)
    assert every_failure.goodput < slow.goodput


def test_a_rate_four_times_off_costs_few_points() -> None:
    """3.7 points at most in the cases of the published comparison (waste up to a tenth or so)."""
    assert sensitivity(Saving(30.0, restart_s=600.0), 3.1 * 3600.0) == pytest.approx(0.02, abs=0.01)
    for mtbf_h in (0.5, 3.0, 12.0):
        saving = Saving(10.0, restart_s=300.0)
        lost = sensitivity(saving, 3600.0 * mtbf_h)
        assert 0.0 < lost < 0.037
