"""The posterior of the failure rate: quantiles, bursts, forgetting, and what it rests on."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.state.failure_rate import (
    DAY_S,
    HALF_LIFE_DAYS,
    PRIOR_NODE_DAYS,
    PRIOR_SHAPE,
    FailureRate,
    Posterior,
    Watched,
    failure_times,
    gamma_below,
    gamma_quantile,
    learned_before,
    merged,
    mtbf,
    mtbf_s,
    prior,
)
from jurymast.core.state.incident import Incident


def test_gamma_at_shapes_that_are_no_whole_numbers() -> None:
    # chi-square tables with 1, 3, 5 and 7 degrees of freedom: twice Gamma(1/2, 3/2, 5/2, 7/2)
    for degrees, quantile in ((1, 3.841459), (3, 7.814728), (5, 11.070498), (7, 14.067140)):
        assert 2 * gamma_quantile(degrees / 2, 0.95) == pytest.approx(quantile, abs=1e-6)
    for degrees, quantile in ((1, 0.00393214), (3, 0.351846), (5, 1.145476)):
        assert 2 * gamma_quantile(degrees / 2, 0.05) == pytest.approx(quantile, rel=1e-5)


@given(st.floats(0.0, 60.0))
def test_gamma_of_one_half_is_the_error_function(x: float) -> None:
    assert gamma_below(0.5, x) == pytest.approx(math.erf(math.sqrt(x)), abs=1e-13)


@given(st.floats(0.05, 300.0), st.floats(0.001, 400.0))
def test_gamma_follows_its_recurrence(shape: float, x: float) -> None:
    """P(a + 1, x) = P(a, x) - x^a e^-x / Gamma(a + 1)."""
    step = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1.0))
    assert gamma_below(shape + 1.0, x) == pytest.approx(gamma_below(shape, x) - step, abs=1e-12)


def test_the_prior_is_what_fleets_report() -> None:
    assert prior().rate == pytest.approx(5.0)
    low, high = prior().interval()
    assert low == pytest.approx(1.15, abs=0.01)
    assert high == pytest.approx(11.07, abs=0.01)
    assert gamma_below(PRIOR_SHAPE, high / 1000.0 * PRIOR_NODE_DAYS) == pytest.approx(0.95)
    assert prior().evidence() == "nothing observed yet"


def test_a_rate_that_was_given() -> None:
    believed = prior(3.87)
    assert believed.rate == pytest.approx(3.87)
    low, high = believed.interval()
    assert 0.5 * 3.87 < low < 3.87 < high < 1.6 * 3.87
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not positive"):
            prior(wrong)


def test_mtbf_of_a_run() -> None:
    assert mtbf_s(3000, 3.87) / 60.0 == pytest.approx(124.0, abs=0.1)
    assert mtbf_s(10, 0.0) == math.inf
    assert prior().mtbf_s(1000) == pytest.approx(DAY_S / 5)


def test_incidents_and_node_days_add_up() -> None:
    rate = FailureRate(0.0, half_life_days=1e9)
    rate.watched(10 * DAY_S, 100)
    for at in (1, 3, 5, 9):
        assert rate.incident(at * DAY_S)
    found = rate.posterior
    assert found.incidents == pytest.approx(4.0)
    assert found.exposure_node_days == pytest.approx(1000.0, rel=1e-6)
    assert found.evidence() == "4 incidents in 1e+03 node-days"


def test_a_burst_is_one_incident() -> None:
    rate = FailureRate(0.0)
    assert [rate.incident(at) for at in (0.0, 60.0, 599.0, 601.0, 700.0)] == [True, False, False, True, False]
    assert merged([700.0, 0.0, 601.0, 60.0]) == [0.0, 601.0]
    assert merged([]) == []


def test_old_evidence_halves_in_its_half_life() -> None:
    rate = FailureRate(0.0)
    rate.incident(0.0)
    rate.watched(HALF_LIFE_DAYS * DAY_S, 0)
    assert rate.posterior.incidents == pytest.approx(0.5)
    late = FailureRate(0.0)
    late.watched(HALF_LIFE_DAYS * DAY_S, 0)
    late.incident(0.0)  # heard of late: as old as it is
    assert late.posterior.incidents == pytest.approx(0.5)


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30))
def test_exposure_does_not_depend_on_how_it_is_cut(cuts: list[float]) -> None:
    whole, pieces = FailureRate(0.0), FailureRate(0.0)
    whole.watched(5 * DAY_S, 64)
    for at in sorted(cuts):
        pieces.watched(at * DAY_S, 64)
    pieces.watched(5 * DAY_S, 64)
    assert pieces.posterior.exposure_node_days == pytest.approx(whole.posterior.exposure_node_days, rel=1e-9)
    whole.watched(1.0, 10**6)  # time does not run backwards
    assert pieces.posterior.exposure_node_days == pytest.approx(whole.posterior.exposure_node_days, rel=1e-9)


def test_forgetting_keeps_about_three_weeks_of_node_days() -> None:
    rate = FailureRate(0.0)
    rate.watched(1000 * DAY_S, 10)
    assert rate.posterior.exposure_node_days == pytest.approx(10 * HALF_LIFE_DAYS / math.log(2.0))


@pytest.mark.parametrize("truth", [1.0, 5.0, 40.0])
def test_it_finds_the_rate_and_follows_a_change(truth: float) -> None:
    """1,000 nodes for thirty days, then sixty days at twice the rate; also where many failures fall into the
    window after another one by chance."""
    chance = random.Random(7)
    rate, now, nodes = FailureRate(0.0), 0.0, 1000
    for until_day, times in ((30.0, 1.0), (90.0, 2.0)):
        while True:
            now += chance.expovariate(1.0 / mtbf_s(nodes, truth * times))
            if now > until_day * DAY_S:
                break
            rate.watched(now, nodes)
            rate.incident(now)
        now = until_day * DAY_S
        rate.watched(now, nodes)
        low, high = rate.posterior.interval(0.999)
        assert low < truth * times < high


# Failures per 1,000 node-days: fleets report 1 to 11.
RATES = (0.05, 0.2, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 200.0, 1000.0)


def poisson(chance: random.Random, mean: float) -> int:
    """A number of events, by the time that passes between them."""
    count, left = -1, mean
    while left > 0.0:
        left -= chance.expovariate(1.0)
        count += 1
    return count


@pytest.mark.parametrize("believed", [None, 5.0])
@pytest.mark.parametrize("node_days", [30.0, 100.0, 480.0, 3000.0])
@pytest.mark.parametrize("truth", RATES)
def test_nine_of_ten_intervals_contain_the_truth(
    truth: float, node_days: float, believed: float | None
) -> None:
    """However far the truth is from what is believed before anything was observed."""
    chance, draws, mean = random.Random(f"{truth} {node_days}"), 300, truth * node_days / 1000.0
    held = 0
    for incidents, times in Counter(poisson(chance, mean) for _ in range(draws)).items():
        found = prior(believed).learned(incidents, node_days)
        low, high = found.interval()
        assert low <= found.rate <= high
        held += times * (low <= truth <= high)
    assert held >= 0.85 * draws  # 0.9, less three standard deviations
    # With many incidents the interval has no reason to hold more often: one that always holds says nothing.
    assert mean < 20.0 or held <= 0.97 * draws


@pytest.mark.parametrize("truth", [0.2, 5.0, 50.0, 400.0])
def test_the_estimate_leaves_the_prior_as_incidents_come(truth: float) -> None:
    """After 25 incidents, it is off by no more than their own chance, on average."""
    chance, node_days = random.Random(1), 25.0 / truth * 1000.0
    rates = [prior().learned(poisson(chance, 25.0), node_days).rate for _ in range(300)]
    assert sum(rates) / len(rates) == pytest.approx(truth, rel=0.08)


def test_before_anything_was_observed_the_interval_is_what_fleets_report() -> None:
    young = prior().learned(1.0, 0.01)  # in the first minutes: more likely a fault at the start than the rate
    assert young.rate < 10.0
    assert young.interval()[1] < 25.0
    low, high = prior().learned(0.0, 100.0).interval()
    assert low == 0.0, "perhaps they never fail"
    assert high == pytest.approx(30.0, rel=0.01)


def test_the_interval_of_what_was_observed_is_garwood_s() -> None:
    """5 % on either side, by the published table of the Poisson distribution: 0 to 3.00 for no event, 0.82 to
    7.75 for three, 1.37 to 9.15 for four."""
    seen = mtbf(4, 1000.0)
    assert seen.low_s == pytest.approx(1000 / 9.154, rel=1e-3)
    assert seen.high_s == pytest.approx(1000 / 1.366, rel=1e-3)
    assert prior().learned(3.0, 10.0).interval()[1] == pytest.approx(775.4, rel=1e-3)
    assert prior().learned(2.0, 10.0).interval()[1] < 100.0, "two may be an accident"
    low, high = prior().learned(0.0, 30.0).interval()
    assert low == 0.0
    assert high == pytest.approx(99.9, rel=1e-3)
    assert prior().learned(0.0, 29.0).interval()[0] > 0.5, "a month of one node says little"


@pytest.mark.parametrize(("nodes", "truth"), [(12_500, 1.0), (12_500, 5.0), (12_500, 20.0), (1000, 50.0)])
def test_failures_that_count_as_one_because_they_are_close_make_the_rate_no_smaller(
    nodes: int, truth: float
) -> None:
    """Seen by the run itself, and by later ones; 12,500 nodes fail every few minutes."""
    chance, days, never = random.Random(3), 20.0, 1e9
    own, now, failures = FailureRate(0.0, half_life_days=never), 0.0, []
    while (now := now + chance.expovariate(1.0 / mtbf_s(nodes, truth))) < days * DAY_S:
        failures.append(now)
        own.watched(now, nodes)
        own.incident(now)
    own.watched(days * DAY_S, nodes)
    halves = [Watched(0.0, 9.1 * DAY_S, nodes), Watched(9.1 * DAY_S, days * DAY_S, nodes, tuple(failures))]
    later = prior().learned(*learned_before(halves, days * DAY_S, never))
    assert own.posterior.rate == pytest.approx(len(failures) / (nodes * days) * 1000.0, rel=0.05)
    assert later.rate == pytest.approx(own.posterior.rate, rel=1e-3)


def incident(at: float, charged: str) -> Incident:
    return Incident(1, at, at + 1.0, 1, 0, charged=charged)


def test_machines_and_scripts_apart() -> None:
    seen = [
        incident(0.0, "infrastructure"), incident(5.0, "application"), incident(60.0, "infrastructure"),
        incident(1000.0, "infrastructure"), incident(2000.0, "nobody"), incident(3000.0, ""),
    ]  # fmt: skip
    assert failure_times(seen) == [0.0, 1000.0]


def test_evidence_in_words() -> None:
    assert Posterior().learned(1.0, 812.0).evidence() == "1 incident in 812 node-days"
    assert Posterior().learned(0.0, 40.0).evidence() == "0 incidents in 40 node-days"
