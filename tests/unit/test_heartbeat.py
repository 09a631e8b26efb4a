"""When a silent node is a lost node: the maths, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.judges.silence import (
    BEATS,
    FACTOR,
    KNOWN_AFTER,
    LIMIT_MAX_S,
    MEMORY,
    UNKNOWN_BEATS,
    Arrivals,
    WatcherClock,
    answer_every_s,
    patience_s,
    rejoin_limit_s,
)


def test_a_regular_node_is_lost_after_three_beats() -> None:
    arrivals = Arrivals(heartbeat_s=0.5, last=0.0)
    for number in range(1, 20):
        arrivals.beat(number * 0.5)
    assert arrivals.limit_s() == BEATS * 0.5
    assert 11.0 - arrivals.last == pytest.approx(1.5)


def test_a_node_of_which_little_is_known_has_more_time() -> None:
    arrivals = Arrivals(heartbeat_s=0.5, last=0.0)
    for number in range(1, KNOWN_AFTER):
        arrivals.beat(number * 0.5)
        assert arrivals.limit_s() == UNKNOWN_BEATS * 0.5
    arrivals.beat(KNOWN_AFTER * 0.5)
    assert arrivals.limit_s() == BEATS * 0.5


def test_a_busy_node_raises_its_own_limit_and_earns_it_back() -> None:
    arrivals = Arrivals(heartbeat_s=0.5, last=0.0)
    arrivals.beat(2.0)
    assert arrivals.limit_s() == FACTOR * 2.0
    now = 2.0
    for _ in range(MEMORY):
        now += 0.5
        arrivals.beat(now)
    assert arrivals.limit_s() == BEATS * 0.5


def test_the_limit_has_an_upper_end_and_a_policy_overrules_it() -> None:
    arrivals = Arrivals(heartbeat_s=0.5, last=0.0)
    arrivals.beat(300.0)
    assert arrivals.limit_s() == LIMIT_MAX_S
    assert arrivals.limit_s(fixed_s=4.0) == 4.0


@given(st.lists(st.floats(0.0, 100.0), max_size=30), st.floats(0.05, 4.0))
def test_the_limit_stays_between_three_beats_and_its_end(gaps: list[float], heartbeat_s: float) -> None:
    arrivals, now = Arrivals(heartbeat_s=heartbeat_s, last=0.0), 0.0
    for gap in gaps:
        now += gap
        arrivals.beat(now)
    assert min(BEATS * heartbeat_s, LIMIT_MAX_S) <= arrivals.limit_s() <= LIMIT_MAX_S


def test_a_watcher_that_was_asleep_blames_nobody() -> None:
    clock = WatcherClock(interval_s=0.05, real_now=100.0)
    for number in range(1, 11):
        assert clock.tick(100.0 + number * 0.05) == 0.0
    before = clock.now
    overslept_s = clock.tick(100.5 + 20.0)
    assert overslept_s == pytest.approx(19.9)
    assert clock.now - before == pytest.approx(0.1)


@given(st.lists(st.floats(-10.0, 50.0), max_size=50))
def test_the_watchers_clock_never_runs_backwards_nor_faster_than_time(steps: list[float]) -> None:
    clock, real = WatcherClock(interval_s=0.05, real_now=0.0), 0.0
    forward = 0.0
    for passed in steps:
        real += passed
        before = clock.now
        clock.tick(real)
        assert before <= clock.now <= before + 0.1 + 1e-9
        forward += max(0.0, passed)
    assert clock.now <= forward + 1e-6


def test_agents_are_as_patient_as_answers_take() -> None:
    assert patience_s(0.5, 4) == pytest.approx(3.0, abs=0.1)
    assert patience_s(3.2, 4) > 2.5 * 3.2  # an answer comes to a heartbeat
    assert patience_s(0.5, 10_000) > patience_s(0.5, 100) + 3.0
    assert patience_s(0.5, 4, late_s=0.5) > patience_s(0.5, 4) + 1.5


def test_no_agent_clings_to_a_late_supervisor_for_longer_than_its_successor_waits() -> None:
    for nodes in (4, 100, 10_000):
        assert patience_s(0.5, nodes) < patience_s(0.5, nodes, late_s=5.0) <= rejoin_limit_s(nodes)


@given(st.floats(0.1, 5.0), st.integers(1, 20_000), st.integers(1, 20_000))
def test_more_nodes_are_answered_less_often_and_have_more_patience(
    heartbeat_s: float, few: int, more: int
) -> None:
    few, more = sorted((few, more))
    assert answer_every_s(heartbeat_s, few) <= answer_every_s(heartbeat_s, more)
    assert rejoin_limit_s(few) <= rejoin_limit_s(more)
    # Two answers may be late before a supervisor is given up.
    assert patience_s(heartbeat_s, more) >= 3 * answer_every_s(heartbeat_s, more)
    assert answer_every_s(heartbeat_s, more) >= heartbeat_s  # each is the answer to a heartbeat
