"""How many spares: the negative binomial rule, its published table, and the price as its cap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.judges.forecast import Outages, auto_spares, by_risk, outages, size_spares

DAY_S = 86_400.0


@given(st.floats(0.001, 50.0), st.floats(0.5, 10.0))
@settings(max_examples=20)
def test_the_distribution_has_the_moments_it_is_named_for(mean: float, kappa: float) -> None:
    found = Outages(mean, kappa)
    terms = [(n, found.probability(n)) for n in range(4000)]
    assert math.fsum(p for _, p in terms) == pytest.approx(1.0, abs=1e-9)
    first = math.fsum(n * p for n, p in terms)
    second = math.fsum(n * n * p for n, p in terms)
    assert first == pytest.approx(mean, rel=1e-6)
    assert second - first**2 == pytest.approx(mean + mean**2 / kappa, rel=1e-6)


def test_two_by_hand() -> None:
    """kappa = 2, p = 2 / (2 + mu): P(0) = p^2, P(1) = 2 (1 - p) p^2, P(2) = 3 (1 - p)^2 p^2."""
    found, p = Outages(0.32), 2.0 / 2.32
    assert found.probability(0) == pytest.approx(p**2)
    assert found.probability(1) == pytest.approx(2 * (1 - p) * p**2)
    assert found.more_than(2) == pytest.approx(1 - p**2 * (1 + 2 * (1 - p) + 3 * (1 - p) ** 2))
    assert Outages(0.0).probability(0) == 1.0
    assert Outages(0.0).more_than(0) == 0.0


# At 5 failures per 1,000 node-days. Published for 512 nodes at a day: 10, which leave 1.02 %.
TABLE = [
    (16, 1.0, 1), (64, 1.0, 2), (128, 1.0, 4), (256, 1.0, 6), (512, 1.0, 11), (1024, 1.0, 19),
    (128, 0.25, 2), (512, 0.25, 4), (1024, 0.25, 6),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "days", "spares"), TABLE)
def test_the_table(nodes: int, days: float, spares: int) -> None:
    assert by_risk(outages(nodes, 5.0, days * DAY_S)) == spares
    assert size_spares(nodes, 5.0, days * DAY_S).count == spares


def test_the_one_row_that_differs_from_the_published_table() -> None:
    assert outages(512, 5.0, DAY_S).more_than(10) == pytest.approx(0.0102, abs=1e-4)


def test_the_production_trace() -> None:
    """Of 400 nodes 17 are out at the 99th percentile by a Poisson count, 33 by this one; 31 were seen."""
    assert by_risk(outages(400, 4.18, 5.5 * DAY_S)) == pytest.approx(33, abs=4)


@given(st.integers(1, 5000), st.floats(0.1, 40.0), st.floats(0.01, 5.0))
def test_every_spare_saves_more_than_it_costs(nodes: int, rate: float, days: float) -> None:
    found = size_spares(nodes, rate, days * DAY_S)
    assert 0 <= found.count <= found.rule
    if found.count:
        assert nodes * found.outages.probability(found.count) > 1.0
    if found.count < found.rule:
        assert nodes * found.outages.probability(found.count + 1) <= 1.0


def test_a_short_run_needs_fewer() -> None:
    assert auto_spares(512, 5.0) == 4
    assert auto_spares(512, 5.0, run_s=3600.0) == 1
    assert auto_spares(512, 5.0, run_s=30 * DAY_S) == 4


def test_auto() -> None:
    assert [auto_spares(nodes) for nodes in (1, 16, 32, 64, 128, 1024)] == [0, 0, 1, 1, 2, 6]
    assert auto_spares(16, 20.0) == 1
