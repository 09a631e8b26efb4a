"""What the supervisor makes of heartbeats: when it proposes another cadence, and what status tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from jurymast.core.checkpoints.agreement import HOLD_S, MARGIN_BEATS, SAMPLE_S, Agreement
from jurymast.core.judges.cadence import lately_s
from jurymast.core.judges.forecast import SLOWDOWN
from jurymast.core.run.machine import step as take
from jurymast.core.run.recording import copied
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.failure_rate import DAY_S, FailureRate, prior
from jurymast.core.state.images import PEER, StateId
from jurymast.core.state.incident import APPLICATION, INFRASTRUCTURE, PREEMPTION, Incident
from jurymast.core.state.messages import Beat, CadenceReport
from jurymast.core.state.run import Node, Phase, Role, RunState, expected_mtbf_s
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.report.status import cadence_json, cadence_lines
from support.reports import reported

STEP_S = 0.5


class Site:
    """Two nodes of one rank each, whose agents do at once what they are told."""

    def __init__(self, steps: int | None = None, seconds: float | None = None, **settings: Any) -> None:
        self.time = 1000.0
        self.state = RunState(Settings(**settings), active=2)
        self.state.failures = FailureRate(self.time, prior(self.state.settings.rate))
        self.state.nodes = {name: Node(name, i, Role.ACTIVE) for i, name in enumerate(("a", "b"))}
        self.state.placement, self.state.phase, self.state.attempt = ("a", "b"), Phase.RUNNING, 1
        self.state.first_step_at = self.time
        self.events: list[ev.Event] = []
        self.orders: list[msg.CadenceSet] = []
        self.pages: dict[str, dict[str, int]] = {name: {"number": 0, "decided": 0} for name in ("a", "b")}
        self.copying = False
        self.asked: dict[str, Any] = {"steps": steps, "seconds": seconds}
        self.done = 0
        self.attempt = 1  # of the ranks
        self.agreement = Agreement(self.state)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.tell(effect.node, effect.message)
            else:
                assert isinstance(effect, Record)
                self.feed(effect.event)

    def look(self) -> None:
        self.do(self.agreement.on_time(self.time, copying=self.copying))

    def tell(self, node: str, order: msg.ToAgent) -> None:
        assert isinstance(order, msg.CadenceSet)
        self.orders.append(order)
        page = self.pages[node]
        page["number"] = order.schedule.number
        page["decided"] = order.decided or page["decided"]

    def feed(self, event: ev.Event) -> None:
        self.events.append(event)
        self.agreement.on_event(event)
        take(self.state, event)

    def beat(self, node: str, at: int | None = None, settled: int | None = None) -> None:
        at = self.done if at is None else at
        page = self.pages[node]
        settled = abs(page["decided"]) if settled is None else settled
        rank = reported(step=at, beats=at, settled=settled)
        beat = Beat(self.attempt, [rank], CadenceReport(**page, **self.asked))
        self.do(self.agreement.on_heartbeat(node, beat, self.time))

    def go_on(self, seconds: float, step_s: float = STEP_S) -> None:
        for _ in range(round(seconds / step_s)):
            self.time += step_s
            self.done += 1
            self.beat("a")
            self.beat("b")
            self.look()

    def saved(self, stall_s: float, ok: bool = True, attempt: int = 0) -> None:
        self.feed(
            ev.Saved(
                t=self.time, attempt=attempt or self.attempt, step=self.done, tier="memory", ok=ok,
                stall_s=stall_s, size_bytes=1,
            )
        )  # fmt: skip

    def copied(self, seconds: float) -> None:
        self.feed(copied(PEER, StateId(self.done, self.attempt), self.time, seconds=seconds).event)

    def told(self) -> list[ev.CadenceSet]:
        return [event for event in self.events if isinstance(event, ev.CadenceSet)]


def test_the_first_save_comes_early_and_then_what_it_costs_counts() -> None:
    site = Site(rate=4000.0)  # of two nodes one every three hours
    site.go_on(3 * SAMPLE_S)
    (first,) = site.told()
    assert first.reason == "early, to learn what a save costs"
    assert first.every_steps == pytest.approx(300 / STEP_S, rel=0.05)
    assert first.first_step >= first.from_step
    site.saved(1.0)
    site.go_on(2 * HOLD_S)
    second = site.told()[-1]
    assert second.stall_s == 1.0
    assert second.mtbf_s == pytest.approx(10_800, rel=0.01)
    assert second.every_steps == pytest.approx((2 * 1.0 * 10_800) ** 0.5 / STEP_S, rel=0.05)
    assert second.from_step > site.told()[0].from_step


def test_when_ranks_save_next_is_known_once_they_have_agreed() -> None:
    site = Site(rate=4000.0)
    assert site.agreement.next_save() is None
    site.go_on(3 * SAMPLE_S)
    (agreed,) = site.told()
    site.go_on((agreed.first_step - site.done - 3) * STEP_S)
    before = site.agreement.next_save()
    assert before is not None
    assert before.in_s == pytest.approx(3 * STEP_S)
    assert before.every_s == pytest.approx(agreed.every_steps * STEP_S)
    site.go_on(5 * STEP_S)
    after = site.agreement.next_save()
    assert after is not None
    assert after.latest == agreed.first_step
    assert after.in_s == pytest.approx((agreed.every_steps - 2) * STEP_S)


def test_what_saves_cost_outlives_the_supervisor_and_the_allocation() -> None:
    site = Site(rate=4000.0)
    site.go_on(3 * SAMPLE_S)
    site.saved(1.0)
    later = Site(rate=4000.0)
    for event in site.events:
        take(later.state, event)
    later.state.cadence = None  # as after a requeue
    later.go_on(3 * SAMPLE_S)
    (told,) = later.told()
    assert told.reason == "what loses least at this failure rate"
    assert told.stall_s == 1.0


def test_nothing_changes_until_it_is_worth_it() -> None:
    site = Site(rate=4000.0)
    site.go_on(3 * SAMPLE_S)
    site.saved(1.0)
    site.go_on(60.0)
    before = len(site.told())
    for _ in range(9):
        site.saved(1.4)  # sqrt(1.4) = 1.18
    site.go_on(60.0)
    assert len(site.told()) == before
    for _ in range(9):
        site.saved(2.0)
    site.go_on(60.0)
    assert len(site.told()) == before + 1
    assert site.told()[-1].every_steps == pytest.approx(2**0.5 * site.told()[-2].every_steps, rel=0.05)


def test_failures_shorten_the_cadence_and_quiet_lengthens_it_again() -> None:
    site = Site(rate=96000.0)
    site.state.failures = FailureRate(site.time, prior(96000.0), 600.0 / DAY_S, 1.0)
    site.go_on(3 * SAMPLE_S)
    site.saved(0.5)
    site.go_on(2 * HOLD_S)
    usual = site.told()[-1]
    for _ in range(20):
        site.go_on(2.0)
        site.state.failures.watched(site.time, 2)
        site.state.failures.incident(site.time)
    site.go_on(2 * HOLD_S)
    hurried = site.told()[-1]
    fewer = hurried.mtbf_s / usual.mtbf_s
    assert fewer < 0.5
    assert hurried.every_steps == pytest.approx(fewer**0.5 * usual.every_steps, rel=0.1)
    site.go_on(1800.0)
    quiet = site.told()[-1]
    assert quiet.mtbf_s > 1.4 * hurried.mtbf_s
    assert quiet.every_steps > 1.15 * hurried.every_steps
    assert quiet.attempt == hurried.attempt


def failed(number: int, lived_s: float, charged: str = INFRASTRUCTURE, steps: int = 20) -> Incident:
    return Incident(number, 0.0, 0.0, number, steps, steps_done=steps, lived_s=lived_s, charged=charged)


@pytest.mark.parametrize("charged", [INFRASTRUCTURE, APPLICATION])
def test_attempts_that_live_for_seconds_are_saved_within_them(charged: str) -> None:
    """Bursts count as one failure in the nodes' rate, and failures of the script do not count at all: the
    first save after five minutes would never come."""
    site = Site()
    site.state.incidents = [failed(number, 9.0, charged) for number in range(1, 4)]
    site.state.up_at = site.time
    site.go_on(2 * SAMPLE_S)
    (first,) = site.told()
    assert first.every_steps * STEP_S <= 6.0
    assert first.mtbf_s <= 12.0
    site.saved(0.05)
    site.go_on(2 * HOLD_S)
    assert site.told()[-1].every_steps * STEP_S <= 6.0
    site.go_on(4 * 86_400.0, step_s=60.0)
    quiet = site.told()[-1]
    assert quiet.mtbf_s > 70_000.0, "what has lived for days is no burst"
    assert quiet.interval_s > 10 * first.interval_s


def test_saves_are_as_often_as_loses_least_where_attempts_live_for_hours() -> None:
    site = Site()
    site.state.incidents = [failed(number, 7200.0) for number in range(1, 4)]
    site.state.up_at = site.time
    site.go_on(2 * SAMPLE_S)
    site.saved(1.0)
    site.go_on(2 * HOLD_S)
    chosen = site.told()[-1]
    assert chosen.mtbf_s == pytest.approx(7200.0, rel=0.01)
    assert chosen.interval_s == pytest.approx((2 * 1.0 * 7200.0) ** 0.5, rel=0.1)


def test_failures_are_close_if_chance_does_not_explain_it() -> None:
    three = [failed(number, 9.0) for number in range(1, 4)]
    day_s = 86_400.0
    assert lately_s(three, 3.0, day_s) == 10.0
    assert lately_s(three[:2], 3.0, day_s) is None
    assert lately_s(three, 3.0, 70.0) is None, "as often as expected"
    assert lately_s([*three[:2], failed(3, day_s, steps=0)], 3.0, day_s) is None, "no rank has done a step"
    ended = failed(3, 7200.0, PREEMPTION)
    assert lately_s([*three, ended], 3.0, day_s) == (27.0 + 7200.0 + 3.0) / 3, "ranks lived for this long"
    assert lately_s([failed(1, 6 * day_s), *three[1:]], 3.0, day_s) is None
    assert lately_s([failed(number, 0.01) for number in range(3)], 0.0, day_s) == 1.0


def test_a_save_that_somebody_asks_for_is_told_with_the_failure_rate_too() -> None:
    """The pause between writes to storage follows from it."""
    site = Site(steps=100)
    site.go_on(10.0)
    site.agreement.ask("ann")
    site.go_on(2.0)
    assert site.told()[-1].mtbf_s == pytest.approx(expected_mtbf_s(site.state, site.time), rel=0.01)


def test_a_cadence_in_time_follows_the_length_of_steps() -> None:
    site = Site(seconds=30.0)
    site.go_on(30.0)
    assert [told.every_steps for told in site.told()] == [60]
    site.go_on(120.0, step_s=1.0)
    assert site.told()[-1].every_steps == 30
    assert site.told()[-1].reason == "as the script or the policy asks"


def test_max_loss_bounds_an_automatic_cadence() -> None:
    site = Site(max_loss_s=120.0)
    site.go_on(10.0)
    assert site.told()[-1].every_steps == 240
    site.saved(0.5)
    site.go_on(10.0)
    assert site.told()[-1].interval_s == 120.0


def test_a_script_with_its_own_steps_is_only_told_of_saves_that_somebody_wants() -> None:
    site = Site(steps=100)
    site.go_on(30.0)
    assert site.told() == []
    assert site.agreement.ask("ann")
    site.go_on(2.0)
    (told,) = site.told()
    assert (told.by, told.every_steps, told.first_step) == ("ann", 0, told.from_step)


def test_a_proposal_that_comes_too_late_is_withdrawn_and_made_again_with_more_time() -> None:
    site = Site(steps=100)
    site.go_on(10.0)
    site.agreement.ask("ann")
    site.time += 1.0
    site.look()
    at = site.orders[-1].schedule.at
    site.beat("a", at=at)
    assert site.orders[-1].decided == -site.orders[-1].schedule.number
    assert site.told() == []
    site.done = at
    site.go_on(3.0)
    (told,) = site.told()
    assert told.by == "ann"
    assert told.from_step - at > 2 * MARGIN_BEATS * site.state.settings.heartbeat_s / STEP_S


def test_no_proposal_follows_while_a_rank_has_not_settled_the_last_one() -> None:
    site = Site(steps=100)
    site.go_on(10.0)
    site.agreement.ask("ann")
    site.go_on(2.0)
    site.agreement.ask("bob")
    for _ in range(20):
        site.time += 1.0
        site.beat("a")
        site.beat("b", settled=0)
        site.look()
    assert [told.by for told in site.told()] == ["ann"]
    site.go_on(3.0)
    assert [told.by for told in site.told()] == ["ann", "bob"]


def test_an_asked_save_that_had_no_room_is_tried_again_but_not_for_ever() -> None:
    site = Site(steps=100)
    site.go_on(10.0)
    site.agreement.ask("ann")
    for _ in range(10):
        site.go_on(5.0)
        site.done = site.told()[-1].first_step
        site.saved(0.0, ok=False)
    assert [told.by for told in site.told()] == ["ann"] * 4


def test_without_a_checkpointer_there_is_nothing_to_ask() -> None:
    site = Site()
    site.do(site.agreement.on_heartbeat("a", Beat(1, []), site.time))
    assert not site.agreement.ask("ann")


def test_a_save_before_something_is_waited_for_until_it_is_complete() -> None:
    site = Site(steps=100)
    site.go_on(10.0)

    assert site.agreement.save_first("drain", 60.0, site.time)
    site.go_on(5.0)
    assert site.agreement.saved_first(site.time) == []
    site.saved(0.1)
    assert site.agreement.saved_first(site.time) == [("drain", True)]
    assert site.agreement.saved_first(site.time) == []


def moving() -> tuple[Site, int]:
    """Ranks are to be placed anew once they have saved; and at which step they wait for that."""
    site = Site(steps=100)
    site.go_on(10.0)
    assert site.agreement.save_to_move("drain", 60.0, site.time)
    site.go_on(0.5)
    (order,) = {order.schedule for order in site.orders}
    assert order.stays
    return site, order.first


def test_ranks_that_are_to_move_wait_at_the_step_that_was_saved() -> None:
    site, waits_at = moving()
    site.saved(0.1)  # as the script's own cadence has it: the ranks do more steps
    assert site.agreement.saved_first(site.time) == []
    site.go_on((waits_at - site.done) * STEP_S)
    site.saved(0.1)
    assert site.agreement.saved_first(site.time) == [("drain", True)]


def test_ranks_that_wait_to_be_moved_go_on_if_nothing_comes_of_it() -> None:
    site, waits_at = moving()
    site.go_on((waits_at - site.done) * STEP_S)
    site.saved(0.1)
    assert site.agreement.saved_first(site.time) == [("drain", True)]
    for _ in range(10):  # they stand still
        site.time += STEP_S
        site.beat("a")
        site.beat("b")
        site.look()
    assert not site.orders[-1].schedule.stays
    assert site.told()[-1].reason == "no rank is placed anew: all go on"
    site.go_on(20.0)
    assert len(site.told()) == 2, "and nothing more is proposed"


def test_ranks_that_wait_to_be_moved_go_on_after_another_supervisor_has_taken_over() -> None:
    """Which knows nothing of the move, and sees no steps by which it could learn how long one takes."""
    site, waits_at = moving()
    site.go_on((waits_at - site.done) * STEP_S)
    site.saved(0.1)
    assert site.told()[-1].stays
    site.agreement = Agreement(site.state)
    for _ in range(10):
        site.time += STEP_S
        site.beat("a")
        site.beat("b")
        site.look()
    assert not site.orders[-1].schedule.stays
    assert [one.reason for one in site.told()][1:] == ["no rank is placed anew: all go on"]


def test_ranks_are_moved_without_a_save_if_their_memory_never_has_room() -> None:
    site, _ = moving()
    site.go_on(1.0)
    for _ in range(4):
        assert site.agreement.saved_first(site.time) == []
        site.done = site.told()[-1].first_step
        site.saved(0.0, ok=False)
        site.go_on(5.0)
    assert site.agreement.saved_first(site.time) == [("drain", False)]


def test_what_was_said_of_an_earlier_attempt_is_not_this_one_s() -> None:
    site = Site(steps=100)
    site.go_on(10.0)
    site.state.attempt = 2
    assert not site.agreement.ask("ann"), "only ranks of the attempt before have been heard"
    for _ in range(2):
        site.beat("a")
        site.beat("b")
    assert not site.agreement.ask("ann"), "no rank of this attempt has a Checkpointer yet"
    site.attempt = 2
    site.go_on(10.0)
    assert site.agreement.save_first("drain", 60.0, site.time)
    site.saved(0.1, attempt=1)
    assert site.agreement.saved_first(site.time) == []
    site.saved(0.1)
    assert site.agreement.saved_first(site.time) == [("drain", True)]


def test_a_save_that_does_not_come_in_time_is_not_waited_for_longer() -> None:
    site = Site(steps=100)
    site.go_on(10.0)
    assert site.agreement.save_first("drain", 10.0, site.time)
    site.time += 9.0
    assert site.agreement.saved_first(site.time) == []
    site.time += 1.0
    assert site.agreement.saved_first(site.time) == [("drain", False)]
    assert site.agreement.save_first("drain", 10.0, site.time)
    site.state.phase = Phase.STOPPING
    assert site.agreement.saved_first(site.time) == [("drain", False)]
    assert not site.agreement.save_first("drain", 10.0, site.time)


def slowed(site: Site, saves: int) -> None:
    """Save so often; each time four steps take a fifth longer, until another node has the copy."""
    for _ in range(saves):
        site.saved(0.0)
        site.go_on(2.4, 0.6)
        site.copied(2.4)
        site.go_on(12.0)


def test_what_copies_take_from_steps_is_a_part_of_what_a_save_costs() -> None:
    site = Site(rate=4000.0)
    site.go_on(12.0)
    slowed(site, 2)
    assert site.agreement.slowdown == SLOWDOWN, "expected, as two saves say nothing"
    slowed(site, 4)
    saving = site.agreement.saving
    assert saving is not None
    assert saving.slowdown == pytest.approx(0.4 / 2.4, rel=0.01)
    assert saving.cost_s == pytest.approx(0.4, rel=0.01)
    told = site.told()[-1]
    assert told.slowdown == pytest.approx(saving.slowdown, rel=0.01)
    assert told.interval_s == pytest.approx((2 * 0.4 * told.mtbf_s) ** 0.5, rel=0.05)
    heir = Agreement(site.state, slowdown=0.5)
    assert heir.slowdown == told.slowdown, "a supervisor that takes over knows it from the journal"
    site.state.cadence = None
    assert heir.slowdown == 0.5


def test_what_was_measured_of_copies_holds_in_the_next_attempt() -> None:
    site = Site(rate=4000.0)
    site.go_on(12.0)
    slowed(site, 5)
    before = site.agreement.slowdown
    site.state.attempt = site.attempt = 2
    site.time += 30.0  # a restart, which is no step
    site.done -= 10
    site.go_on(12.0)
    assert site.agreement.slowdown == before
    slowed(site, 2)
    assert site.agreement.slowdown == pytest.approx(before, rel=0.01)


def test_status_tells_the_cadence_and_what_the_rate_rests_on() -> None:
    site = Site(rate=4000.0)
    plan = RunPlan(
        run="r", name="r", directory="r", cluster="slurm", active=2, spares=0, ranks_per_node=1, script="s",
        earlier_text="3 in 41 node-days of 2 earlier runs, no Slurm accounting",
    )  # fmt: skip
    site.go_on(3 * SAMPLE_S)
    site.saved(1.0)
    site.go_on(2 * HOLD_S)
    site.state.step = site.done
    found = cadence_json(site.state, plan, site.time)
    told = site.told()[-1]
    assert found["every_steps"] == told.every_steps
    assert found["cost_seconds"] == found["stall_seconds"] == 1.0
    assert found["next_save_step"] == told.first_step
    assert found["rate"]["mean"] == pytest.approx(4000.0, rel=0.01)
    assert found["rate"]["low"] < 2200 < 6000 < found["rate"]["high"]
    assert 0.0 < found["cost_if_rate_twice"] < 0.01
    saves, failures = cadence_lines({"cadence": found})
    assert saves.startswith(f"saves      every {told.every_steps} steps (")
    assert f"next at step {told.first_step}" in saves
    assert saves.endswith(
        "what loses least at this failure rate, a save costs 1.0 s, "
        "twice the failure rate would cost 0.1 points of goodput"
    )
    assert failures.endswith(
        "after 0 failures of the infrastructure here, "
        "3 in 41 node-days of 2 earlier runs, no Slurm accounting"
    )
    assert cadence_lines({"cadence": cadence_json(RunState(Settings()), plan, site.time)}) == []


def test_durable_copies_are_never_told_to_be_more_frequent_than_saves() -> None:
    site = Site(rate=4000.0)
    site.go_on(3 * SAMPLE_S)
    site.saved(1.0)
    site.go_on(2 * HOLD_S)
    site.feed(
        ev.Saved(
            t=site.time, attempt=1, step=site.done, tier="shared", ok=True, stall_s=0.0, size_bytes=1,
            copied=True, seconds=0.1,
        )
    )  # fmt: skip
    plan = RunPlan(
        run="r", name="r", directory="r", cluster="slurm", active=2, spares=0, ranks_per_node=1, script="s"
    )
    found = cadence_json(site.state, plan, site.time)
    assert found["durable_every_seconds"] == found["every_seconds"] > 100.0
