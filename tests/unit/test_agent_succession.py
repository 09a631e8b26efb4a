"""The machine that decides when an agent starts the next supervisor on its node."""

from __future__ import annotations

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent import succession as machine
from jurymast.core.agent.succession import Succession

NODES = ("n0", "n1", "n2", "n3")


def alone(node: str = "n0", since: float = 100.0) -> Succession:
    """That of an agent which just lost its supervisor, and has asked for the pulse."""
    made = Succession(node, NODES, enabled=True)
    assert made.answered(since - 50.0) == []
    assert made.unanswered(since) == [do.ReadPulse()]
    return made


def takes_over(made: Succession, now: float, until: float, pulse: str | None = "3:17") -> float | None:
    """When it starts a supervisor, if each reading is answered at once."""
    while now < until:
        if do.StartSupervisor() in made.pulse(pulse, now):
            return now
        made.check()
        now = made.wake_at
        assert made.tick(now) == [do.ReadPulse()]
    return None


@pytest.mark.parametrize("node", NODES)
def test_agents_try_one_after_the_other(node: str) -> None:
    patience_s = machine.PATIENCE_S + machine.STAGGER_S * NODES.index(node)
    at = takes_over(alone(node), 100.0, 200.0)
    assert at is not None
    assert patience_s < at - 100.0 <= patience_s + machine.STAGGER_S


def test_a_node_that_does_not_know_its_place_comes_late() -> None:
    at = takes_over(alone("elsewhere"), 100.0, 200.0)
    assert at is not None
    assert at > 100.0 + machine.STAGGER_S * machine.PLACE_UNKNOWN


def test_a_node_that_is_merely_cut_off_does_not_take_over() -> None:
    made, now = alone(), 100.0
    for count in range(500):
        assert made.pulse(f"3:{count}", now) == []
        now = made.wake_at
        assert made.tick(now) == [do.ReadPulse()]


def test_a_new_epoch_is_a_pulse() -> None:
    made = alone()
    made.pulse("3:17", 100.0)
    made.tick(101.9)
    made.pulse("4:", 101.9)
    made.tick(103.8)
    assert made.pulse("4:", 103.8) == []


def test_storage_that_is_silent_says_nothing_of_the_supervisor() -> None:
    assert takes_over(alone(), 100.0, 200.0, pulse=None) is None


def test_an_answer_that_comes_late_may_have_been_read_early() -> None:
    made = alone()
    made.pulse("3:17", 100.0)
    asked_at = made.wake_at
    assert made.tick(asked_at) == [do.ReadPulse()]
    assert made.tick(asked_at + 5.0) == [], "one reading at a time"
    assert made.pulse("3:17", asked_at + 60.0) == []
    assert made.tick(asked_at + 61.0) == [do.ReadPulse()]
    assert made.pulse("3:17", asked_at + 61.0) == [do.StartSupervisor()]


def test_who_never_met_a_supervisor_starts_none() -> None:
    made = Succession("n0", NODES, enabled=True)
    assert made.unanswered(100.0) == []
    assert made.wake_at == do.NEVER


def test_where_the_batch_process_cannot_die_alone_nobody_looks() -> None:
    made = Succession("n0", NODES, enabled=False)
    made.answered(50.0)
    assert made.unanswered(100.0) == []
    assert made.wake_at == do.NEVER


def test_a_supervisor_that_answers_in_time_is_no_reason() -> None:
    made = alone()
    made.pulse("3:17", 100.0)
    made.answered(101.0)
    assert made.wake_at == do.NEVER
    assert made.unanswered(150.0) == [do.ReadPulse()]
    assert made.pulse("3:17", 150.0) == [], "from the beginning"


def test_a_reading_that_was_asked_for_before_the_supervisor_answered_starts_nothing() -> None:
    made = alone()
    made.pulse("3:17", 100.0)
    made.tick(105.0)
    made.answered(105.0)
    assert made.pulse("3:17", 105.1) == []
    made.check()
    assert made.unanswered(110.0) == [do.ReadPulse()]
    assert made.pulse("3:17", 110.0) == [], "the time before does not count"


def test_while_its_own_supervisor_lives_it_starts_no_other() -> None:
    made = alone()
    at = takes_over(made, 100.0, 200.0)
    assert at is not None
    assert made.wake_at == do.NEVER
    assert made.supervisor_ended(at + 30.0) == [do.ReadPulse()]
    assert takes_over(made, at + 30.0, at + 60.0) is not None, "it was not up to it, and nobody else came"
