"""What a node tells of itself: its clock beside the supervisor's, and what the next supervisor hears."""

from __future__ import annotations

import pytest

from jurymast.core.judges.own_health import KEPT_MAX, OFFSET_WORTH_S, OFFSETS, OwnHealth
from jurymast.core.state.findings import HOST, NOT_OBSERVABLE, Finding, Verdict

NOW, LIMIT_S = 1000.0, 2.0


def clocks(own: OwnHealth, ahead_s: float, late_s: float = 0.0) -> Finding | None:
    """The supervisor's clock, `ahead_s` behind this node's; all words but the first arrive `late_s` later."""
    offset = None
    for number in range(OFFSETS):
        offset = own.clock(NOW - ahead_s - (late_s if number else 0.0), NOW)
    found = None if offset is None else own.judge(offset, LIMIT_S, NOW)
    assert found is None or own.found(found)
    return found


@pytest.mark.parametrize(("ahead_s", "side"), [(60.0, "60.0 s ahead of"), (-60.0, "60.0 s behind")])
def test_a_clock_far_from_the_supervisor_s_is_a_finding_until_it_is_not(ahead_s: float, side: str) -> None:
    own = OwnHealth()
    wrong = clocks(own, ahead_s)
    assert wrong is not None
    assert side in wrong.message
    assert own.holding() == [wrong]
    assert clocks(own, ahead_s) is None, "that is known"
    own.new_supervisor()
    assert own.clock(NOW, NOW) is None, "its clock may be another"
    right = clocks(own, 0.0)
    assert right is not None
    assert right.verdict is Verdict.OK
    assert (own.holding(), own.known()) == ([], (right,))


def test_a_slow_network_is_not_a_wrong_clock() -> None:
    assert clocks(OwnHealth(), 0.0, late_s=30.0) is None


def test_a_little_offset_is_not_even_looked_at() -> None:
    own = OwnHealth()
    assert {own.clock(NOW - OFFSET_WORTH_S / 2, NOW) for _ in range(2 * OFFSETS)} == {None}


def test_the_newest_word_on_each_is_kept_events_are_not_and_there_is_an_end_to_it() -> None:
    own = OwnHealth()

    def said(code: str, verdict: Verdict = Verdict.BAD, *, once: bool = False) -> bool:
        return own.found(
            Finding(probe="acme", code=code, verdict=verdict, kind=HOST, message=code, once=once)
        )

    assert said("hot")
    assert said("hot", Verdict.OK)
    assert said("xid", once=True)
    assert not said(NOT_OBSERVABLE)
    assert [(one.code, one.verdict) for one in own.known()] == [("hot", Verdict.OK)]
    assert all(said(f"code {number}") for number in range(2 * KEPT_MAX))
    assert len(own.known()) == KEPT_MAX
