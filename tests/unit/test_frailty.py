"""Nodes that are likely to fail: lemons and the day after a repair, in the estimate and in the placement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.cluster.earlier import past_runs, with_earlier
from jurymast.core.judges.history import (
    NodeDeparture,
    PastRun,
    Span,
    comebacks,
    first_days,
    frail_nodes,
    history,
    more_exposure,
)
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Launch
from jurymast.core.state.failure_rate import AFTER_REPAIR, DAY_S, FailureRate, FrailNode, counted, prior
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.journal import initial_state
from support.stories import START, Story

NOW = START


def a_run(name: str, from_days: float, to_days: float, *failed: str, spares: tuple[str, ...] = ()) -> PastRun:
    """On n1 to n3, so many days from now; those in `failed` leave it one after the other, at its end."""
    start, end = NOW + from_days * DAY_S, NOW + to_days * DAY_S
    left = [
        NodeDeparture(node=node, at=end - 600.0 * (len(failed) - i), cause="node_lost", evidence="silent")
        for i, node in enumerate(failed)
    ]
    span = Span(start=start, end=end, nodes=("n1", "n2", "n3"), spares=spares)
    return PastRun(run=name, active=2, spans=(span,), departures=tuple(left))


FIRST = a_run("a", -10.0, -8.0, "n1")
SECOND = a_run("b", -5.0, -3.5)


def test_a_node_is_back_when_it_serves_again() -> None:
    assert comebacks([FIRST], {}) == {"n1": [float("inf")]}
    assert comebacks([FIRST, SECOND], {}) == {"n1": [NOW - 5.0 * DAY_S]}
    mended = NOW - 7.0 * DAY_S
    assert comebacks([FIRST, SECOND], {"n1": mended, "n2": mended}) == {"n1": [mended]}, "somebody said so"
    assert comebacks([FIRST, SECOND], {"n1": NOW - 9.0 * DAY_S}) == {"n1": [NOW - 5.0 * DAY_S]}, "before that"
    switch = a_run("c", -10.0, -8.0)
    gone = [replace(FIRST.departures[0], node=node) for node in ("n1", "n2", "n3")]
    assert comebacks([replace(switch, departures=tuple(gone)), SECOND], {}) == {}, "none of them was mended"


@given(st.lists(st.floats(0.0, 10.0), max_size=6), st.floats(0.0, 5.0), st.floats(0.0, 10.0))
def test_first_days_do_not_overlap_and_stay_within_the_span(
    days: list[float], start_day: float, length_days: float
) -> None:
    span = Span(start=start_day * DAY_S, end=(start_day + length_days) * DAY_S, nodes=("n",))
    back = sorted({day * DAY_S for day in days})
    parts = first_days(span, back)
    for (_, until), (after, _) in zip(parts, parts[1:], strict=False):
        assert until <= after
    for start, until in parts:
        assert span.start <= start < until <= span.end
        assert any(at <= start and until <= at + DAY_S for at in back)
    inside = [at for at in back if span.start <= at < span.end]
    whole = min(DAY_S, span.end - inside[-1]) if inside else 0.0
    assert sum(until - start for start, until in parts) >= whole - 1e-3


def test_the_day_after_counts_as_more_exposure_where_the_node_ran_ranks() -> None:
    back = comebacks([FIRST, SECOND], {})
    (more,) = more_exposure([FIRST, SECOND], back)
    assert (more.start_s, more.end_s) == (NOW - 5.0 * DAY_S, NOW - 4.0 * DAY_S)
    assert more.nodes == AFTER_REPAIR - 1.0
    assert more_exposure([FIRST, a_run("b", -5.0, -3.5, spares=("n1",))], back) == []
    record = history([FIRST, SECOND], NOW, DAY_S)["n1"]
    assert (record.node_days, record.fresh_days) == pytest.approx((3.5, 1.0))
    assert record.exposure_days == pytest.approx(2.5 + AFTER_REPAIR)
    assert not record.fresh(NOW)
    assert record.fresh(NOW - 4.1 * DAY_S)


def test_a_run_s_own_estimate_counts_the_day_after_too() -> None:
    plain, fresh = FailureRate(0.0, half_life_days=1e9), FailureRate(0.0, half_life_days=1e9)
    ends = (0.5 * DAY_S, DAY_S)
    plain.watched(3 * DAY_S, 4)
    fresh.watched(3 * DAY_S, 4, ends)
    more_days = fresh.posterior.exposure_node_days - plain.posterior.exposure_node_days
    assert more_days == pytest.approx(1.5 * (AFTER_REPAIR - 1.0), rel=1e-6)
    assert counted(4, ends, 0.75 * DAY_S) == 4 + AFTER_REPAIR - 1.0
    assert counted(4, ends, 2.0 * DAY_S) == 4
    once = FailureRate(0.0).posterior_at(3 * DAY_S, 4, ends)
    pieces = FailureRate(0.0)
    for hours in range(1, 73):
        pieces.watched(hours * 3600.0, 4, ends)
    assert pieces.posterior.node_days == pytest.approx(once.node_days), "however it is cut"


def test_who_is_likely_to_fail_and_why() -> None:
    lemon = [a_run(f"r{days}", -days - 0.2, -days, "n1") for days in (24.0, 18.0, 12.0, 6.0)]
    fleet = prior().rate
    (found,) = frail_nodes(history(lemon, NOW, DAY_S).values(), fleet, NOW)
    assert (found.node, found.fresh_until) == ("n1", None)
    assert found.why == "failed 4 times in 0.8 node-days, and has not been used since"
    assert found.factor == pytest.approx(
        (1 / 3 + 4) / (1 / 3 + fleet / 1000 * (0.2 + 0.6 * AFTER_REPAIR)), abs=1e-3
    )
    back = a_run("z", -0.5, -0.1)
    (found,) = frail_nodes(history([*lemon, back], NOW, DAY_S).values(), fleet, NOW)
    assert found.fresh_until == NOW + 0.5 * DAY_S
    assert ", used again since 20" in found.why
    assert found.times(NOW) == pytest.approx(found.factor * AFTER_REPAIR)
    assert found.times(NOW + DAY_S) == found.factor
    mended = history([FIRST, a_run("b", -7.0, 0.0)], NOW, DAY_S)  # one failure, and long good since
    assert frail_nodes(mended.values(), 50.0, NOW) == []
    assert FrailNode(node="n", factor=1.9).times(NOW) == 1.0, "too little to matter"


def test_a_plan_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm accounting
    story = Story(active=2, spares=1)
    story.running(40).saved(40).lost("n3")
    story.stopped()
    story.recovered(40, 60).finished().write(tmp_path / "runs" / "run-1")
    (run,) = past_runs(tmp_path / "runs")
    assert run.spans[0].spares == ("n1",), "the batch host"
    now = story.t + 3600.0
    plan, _ = with_earlier(Story().plan, tmp_path / "runs", "", now)
    (frail,) = plan.frail
    assert (frail.node, frail.fresh_until) == ("n3", None)
    again = RunPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert initial_state(again).frail == {"n3": frail}


# Placement.


def placed(*frail: FrailNode, active: int = 2, spares: int = 2) -> tuple[Launch, Story]:
    story = Story(active=active, spares=spares)
    story.state.frail = {one.node: one for one in frail}
    return story.allocated().last(Launch), story


def test_who_is_likely_to_fail_becomes_a_spare_and_the_journal_says_why() -> None:
    launch, story = placed(FrailNode(node="n3", factor=8.0, why="failed 4 times in 20 node-days"))
    assert launch.placement == ("n2", "n4"), "n1 is the batch host"
    told = "2 of 4 ready nodes; spares: n3 fails 8 times as often as others: failed 4 times in 20 node-days"
    assert launch.reason == told
    assert [node.name for node in story.state.spare_nodes()] == ["n1", "n3"], "and it is the last to be used"


def test_the_worse_ones_come_last() -> None:
    two = FrailNode(node="n2", factor=3.0, why="x"), FrailNode(node="n3", fresh_until=None, why="y")
    launch, story = placed(*two)
    assert launch.placement == ("n1", "n4"), "rather the batch host than they"
    assert [node.name for node in story.state.spare_nodes()] == ["n2", "n3"]
    assert launch.reason.endswith(
        "n3 fails 25 times as often as others: y; n2 fails 3 times as often as others: x"
    )
    many = [FrailNode(node=f"n{i}", factor=3.0, why="x") for i in range(2, 8)]
    launch, _ = placed(*many, spares=6)
    assert launch.placement == ("n1", "n8")
    assert launch.reason.count("fails") == 3
    assert launch.reason.endswith("; and 3 more")


def test_without_a_choice_and_without_a_word_all_is_as_before() -> None:
    assert placed()[0].placement == placed(FrailNode(node="n3", factor=1.5))[0].placement == ("n2", "n3")
    assert placed()[0].reason == "2 of 4 ready nodes"
    launch, _ = placed(FrailNode(node="n1", factor=9.0), FrailNode(node="n2", factor=9.0), spares=0)
    assert launch.placement == ("n1", "n2")


def test_a_slow_node_is_the_later_choice() -> None:
    story = Story(active=2, spares=1, gpus=1)
    story.state.frail = {"n3": FrailNode(node="n3", factor=9.0, why="x")}
    story.allocated()
    for name, slowness in (("n1", 1.0), ("n2", 1.6), ("n3", 1.0)):
        story.feed(ev.NodeTested(t=story.t, node=name, verdict="ok", slowness=slowness, message="told so"))
    assert story.last(Launch).placement == ("n1", "n3"), "slow is slow all the time"
    assert story.last(Launch).reason == "2 of 3 ready nodes"


def test_a_node_that_left_this_run_is_likely_to_leave_it_again() -> None:
    """Lost, requeued without it, and in the allocation after that once more: for a day it is rather a spare,
    and counts as more than one."""
    story = Story(active=2, spares=1, settings=Settings(exclusion_s=10.0)).running(30)
    for name in ("n2", "n3"):
        story.lost(name)
    story.stopped()
    story.t += 60.0
    assert story.state.phase.value == "requeued"
    assert story.state.frail["n2"].fresh_until is None
    story.allocated("n1", "n2", "n4", "n5", restarts=1)
    since = story.state.allocated_at
    assert story.last(Launch).placement == ("n4", "n5")
    assert story.state.frail["n2"].fresh_until == since + DAY_S
    assert story.state.frail["n3"].fresh_until is None
    assert story.state.fresh_until() == (), "a spare is not watched"
    story.state.now = since + DAY_S
    assert [node.name for node in story.state.spare_nodes()] == ["n2", "n1"], "a day later it is as any other"


def test_who_was_drained_by_hand_did_not_fail() -> None:
    story = Story(active=2, spares=1).running(30)
    story.asked("drain", "n2")
    story.stopped()
    story.recovered(30, 40)
    for name in story.state.placement:
        story.lost(name)
    story.stopped()
    assert story.state.phase.value == "requeued"
    assert "n2" not in story.state.frail
    assert len(story.state.frail) == 2


def test_a_placed_one_shortens_the_expected_time_between_failures() -> None:
    from jurymast.core.state.run import expected_mtbf_s

    plain = Story(active=2, spares=0).allocated()
    story = Story(active=2, spares=0)
    story.state.frail = {"n2": FrailNode(node="n2", fresh_until=None, why="x")}
    story.allocated()
    ratio = expected_mtbf_s(plain.state, plain.t) / expected_mtbf_s(story.state, story.t)
    assert ratio == pytest.approx((2 + AFTER_REPAIR - 1) / 2, rel=0.01)
    later = story.t + 2 * DAY_S
    assert expected_mtbf_s(story.state, later) > expected_mtbf_s(plain.state, later), "it did not fail"
