"""Accounts sum exactly, whatever happens; and the categories are what they are called."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.goodput import CATEGORIES, PLACED, Account, Ledger, to_us
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import gamma_below, gamma_quantile, mtbf
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.journal import initial_state
from jurymast.report.goodput import mtbf_text
from support.random_events import Moment, moments, next_event
from support.stories import START, Story


def account(story: Story, now: float | None = None) -> Account:
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    found = ledger.account(now)
    check(found)
    return found


def seconds(found: Account, category: str) -> float:
    return found.totals[category] / 1e6


def check(found: Account) -> None:
    """Exact sum, no overlap, no gap, nothing negative."""
    assert sum(found.totals.values()) == found.allocated_us + found.queue_us
    assert all(us > 0 for us in found.totals.values())
    assert set(found.totals) <= {category.name for category in CATEGORIES}
    for intervals in (found.timeline, found.waits):
        assert all(interval.us > 0 for interval in intervals)
    both = sorted([*found.timeline, *found.waits], key=lambda interval: interval.start)
    for before, after in zip(both, both[1:], strict=False):
        assert before.end == after.start, "a gap or an overlap"
    for node, stays in found.stays.items():
        assert all(stay.until >= stay.start for stay in stays)
        for stay, later in zip(stays, stays[1:], strict=False):
            assert stay.until <= later.start
        booked = sum(interval.us for interval in found.intervals(node))
        assert booked == sum(stay.until - stay.start for stay in stays), "a placed node was not accounted for"
    for ratio in found.ratios().values():
        assert ratio is None or 0 <= ratio <= 1


def test_an_undisturbed_run() -> None:
    story = Story(active=2, spares=1).allocated(queue_s=10.0).ranks_up().restored(0)
    story.stepped(1, step_s=2.0).stepped(41, step_s=0.5).saved(41, stall_s=0.4).stepped(81, step_s=0.5)
    story.finished()
    found = account(story)
    assert found.final
    assert seconds(found, "queue_wait") == pytest.approx(3 * 10.0)
    assert seconds(found, "launch") == pytest.approx(3 * 3.0 + 2 * 0.7)
    assert seconds(found, "restore") == pytest.approx(2 * 0.5)
    assert seconds(found, "warm_up") == pytest.approx(2 * 2.0)
    # A step is over 50 ms before its report: this much of the next step belongs to it.
    assert seconds(found, "step") == pytest.approx(2 * (20.0 + 20.0 + 0.1))
    assert seconds(found, "checkpoint_stall") == pytest.approx(2 * 0.4)
    assert seconds(found, "shutdown") == pytest.approx(2 * 0.25)
    assert seconds(found, "spare_idle") == pytest.approx(0.7 + 0.5 + 2.0 + 40.1 + 0.4 + 0.25)
    ratios = found.ratios()
    wall = 10.0 + 3.0 + 0.7 + 0.5 + 2.0 + 40.1 + 0.4 + 0.25
    assert ratios["ettr"] == pytest.approx(40.1 / wall)
    assert ratios["runtime_goodput"] == pytest.approx(40.1 / (wall - 13.0))
    assert ratios["allocation_goodput"] == pytest.approx(2 * 40.1 / (3 * (wall - 10.0)))


def test_nodes_are_held_while_a_supervisor_waits_for_storage_before_it_can_begin() -> None:
    """Slurm has started the job: that is no time in the queue. At a requeue neither."""
    story = Story(active=2, spares=1).allocated(queue_s=10.0, late_s=40.0).ranks_up().restored(0)
    story.stepped(1, step_s=2.0).lost("n1")
    story.lost("n2")
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    story.feed(ev.AllocationEnded(t=story.t, slurm_job="17", why="requeued"))
    story.allocated("n3", "n4", "n5", restarts=1, queue_s=20.0, late_s=30.0)
    story.ranks_up().restored(1).stepped(2).stepped(30).finished()
    found = account(story)
    assert seconds(found, "queue_wait") == pytest.approx(3 * 10.0)
    assert seconds(found, "launch") == pytest.approx(3 * 43.0 + 2 * 0.7)
    assert seconds(found, "requeue_wait") == pytest.approx(3 * 20.0)
    assert seconds(found, "replacement") == pytest.approx(3 * 33.0)
    assert sum(found.totals.values()) == found.allocated_us + found.queue_us


def test_steps_that_are_heard_of_only_when_ranks_go_on_from_them_were_done() -> None:
    """In their processes, beyond the last report before the failure; and the next failure goes back."""
    story = Story(active=2, spares=1).running(41).saved(41).stepped(61, step_s=0.5)
    for step, tier in ((63, "live"), (66, "live"), (41, "memory")):
        story.failed(1, exit_code=-9)
        story.stopped()
        if story.state.phase is Phase.WAITING:
            story.backed_off()
        story.ranks_up().restored(step, tier=tier)
    story.stepped(70, step_s=0.5).finished()
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    assert (ledger.steps.done, ledger.steps.again) == (66 + 29, 25)


def test_steps_of_an_earlier_run_are_not_those_of_this_one() -> None:
    """Its ranks begin from a save of that run, and go on in their processes before a step is heard of."""
    story = Story(active=2, spares=1).allocated().ranks_up().restored(1000)
    story.failed(1, exit_code=-9)
    story.stopped()
    story.ranks_up().restored(1002, tier="live").stepped(1010).finished()
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    assert (ledger.steps.done, ledger.steps.again) == (10, 0)


def test_a_swap_and_its_rework() -> None:
    story = Story(active=2, spares=1).running(41).saved(41).stepped(61, step_s=0.5)
    story.lost("n3", silent_s=1.6)
    story.stopped()
    story.ranks_up().restored(41, seconds=0.5).stepped(42, step_s=1.0)
    story.stepped(82, step_s=0.5).finished()
    found = account(story)
    assert seconds(found, "detection") == pytest.approx(2 * 1.6)
    assert seconds(found, "diagnosis") == pytest.approx(0.3), "the lost node is not diagnosed any more"
    assert seconds(found, "relaunch") == pytest.approx(2 * 0.7)
    # 42 is the first step again; of 40 steps in 20 s (and 50 ms) 19 had been done before.
    again = (20.0 + 0.05) * 19 / 40
    assert seconds(found, "rework") == pytest.approx(2 * (again + 0.05))
    lost = next(interval for interval in found.intervals("n3") if interval.category == "failed_node")
    assert lost.end == found.end
    assert found.incident_us(1) / 1e6 == pytest.approx(1.6 + 0.3 + 0.7 + 0.5 + 1.0 + again)
    assert [i.category for i in found.intervals("n1")][:3] == ["launch", "spare_idle", "relaunch"]


@pytest.mark.parametrize("first", ["steps", "a save"])
def test_a_restore_that_is_told_after_the_first_steps_makes_no_more_rework(first: str) -> None:
    """The connection broke over which rank 0 told of it."""
    story = Story(active=2, spares=1).running(40).saved(40).stepped(50)
    story.lost("n2")
    story.stopped().backed_off()
    plan = ev.RestorePlanned(
        t=story.t, attempt=2, step=40, tier="memory", expected_s=0.5, tiers={"memory": 1}, reason=""
    )
    story.feed(plan)
    story.ranks_up()
    story.t += 1.0
    story.saved(45) if first == "a save" else story.stepped(45)
    story.restored(40)
    story.stepped(60)
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    assert (ledger.steps.again, ledger.steps.done) == (10, 50 + 20)


def test_steps_that_are_reported_after_the_failure_count_as_steps() -> None:
    story = Story().running(11)
    story.t += 1.0
    story.failed(0, exit_code=-9)
    late = ev.Progress(t=story.t, attempt=1, step=13, stepped_at=story.t - 0.3, absolute=True, step_s=0.5)
    story.feed(late)
    story.stopped()
    found = account(story, story.t)
    cut = [i for i in found.timeline if i.category == "rework"]
    assert [i.us / 1e6 for i in cut] == [pytest.approx(0.3)]


def test_a_hang_is_told_from_detection() -> None:
    story = Story().running(11)
    story.hung(silent_s=12.0)
    story.stopped()
    found = account(story)
    assert seconds(found, "hang") == pytest.approx(2 * 12.0)
    assert "detection" not in found.totals


def test_a_requeue_waits_with_all_the_nodes_that_were_asked_for() -> None:
    story = Story(active=2, spares=1).running(11)
    story.lost("n1")
    story.lost("n2")
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    story.t += 3.0
    story.feed(ev.AllocationEnded(t=story.t, slurm_job="17", why="requeued"))
    story.allocated("n3", "n4", "n5", restarts=1, queue_s=20.0)
    story.ranks_up().restored(10).stepped(11).stepped(30)
    found = account(story, story.t + 1.0)
    assert not found.final
    assert seconds(found, "requeue_wait") == pytest.approx(3 * 20.0)
    assert seconds(found, "shutdown") == pytest.approx(3 * 3.0)
    assert seconds(found, "replacement") == pytest.approx(3 * 3.0), "nodes joining after a requeue"
    assert found.ratios()["runtime_goodput"] is not None


def test_without_a_word_about_its_end_an_allocation_ends_with_its_last_event() -> None:
    story = Story(active=2, spares=0).running(11)
    story.t += 100.0
    story.allocated("n3", "n4", restarts=1, queue_s=50.0)
    found = account(story)
    assert seconds(found, "requeue_wait") == pytest.approx(2 * 150.0)


@pytest.mark.parametrize(("quiet_s", "category"), [(2.0, "step"), (60.0, "unknown")])
def test_a_running_run_is_accounted_until_now(quiet_s: float, category: str) -> None:
    story = Story().running(11)
    before = account(story)
    after = account(story, story.t + quiet_s)
    assert seconds(after, category) - seconds(before, category) >= 2 * quiet_s
    assert not after.final


def test_a_queued_run_and_one_that_was_cancelled_there() -> None:
    story = Story(active=3, spares=1).submitted()
    waiting = account(story, START + 30.0)
    assert dict(waiting.totals) == {"queue_wait": 4 * 30_000_000}
    assert waiting.ratios() == {"ettr": 0.0, "runtime_goodput": None, "allocation_goodput": None}
    story.t = START + 40.0
    story.asked("cancel")
    assert account(story).totals["queue_wait"] == to_us(4 * 40.1)


def test_steps_of_no_attempt_are_none() -> None:
    """No rank of this run has done them: it is the time that passed that launches the first attempt."""
    story = Story(active=1, spares=0)
    ledger, t = Ledger(initial_state(story.plan)), START + 2.0
    for event in (
        next_event(ledger.state, START, ("allocation", 0.0, "n1", 0, 0, False)),
        next_event(ledger.state, START, ("joined", 0.0, "n1", 0, 0, False)),
        ev.NodeReady(t=START, node="n1", store_port=1),
        ev.Progress(t=t, attempt=0, step=26, stepped_at=t - 0.5, absolute=False, step_s=0.1),
        ev.AllocationEnded(t=t, slurm_job="7", why="over"),
    ):
        ledger.feed(event)
    assert ledger.state.attempt == 1
    assert ledger.account().totals["step"] == 0


def test_a_script_without_step_numbers_has_no_rework() -> None:
    story = Story().allocated().ranks_up()
    story.stepped(1, absolute=False).stepped(50, absolute=False)
    story.failed(0, exit_code=-9)
    story.stopped()
    story.ranks_up().stepped(1, absolute=False).stepped(30, absolute=False)
    found = account(story)
    assert all(i.us <= to_us(0.3) for i in found.timeline if i.category == "rework"), "but the cut step"


def test_several_tiers_that_report_one_save_are_one_stall() -> None:
    story = Story().running(11).saved(11, stall_s=0.4)
    again = ev.Saved(t=story.t, attempt=1, step=11, tier="local", ok=True, stall_s=0.4, size_bytes=1)
    story.feed(again)
    assert seconds(account(story), "checkpoint_stall") == pytest.approx(2 * 0.4)


def expected_node_time(events: list[ev.Event], state: RunState) -> tuple[int, int]:
    """(allocated, queue) microseconds of a run, from allocations and joins only: the other way to count.

    Follows the definition in the plainest way, node by node, with a fresh run of the state machine.
    """
    from jurymast.core.run.machine import step

    allocated = queued = 0
    since: dict[str, int] = {}
    mark = to_us(state.submitted_at)
    heard = 0
    asked = state.active + state.spares
    held: set[str] = set()
    first = True
    for event in events:
        before = (state.phase, state.attempt)
        over = state.ended
        step(state, event)
        now = to_us(state.now)
        if isinstance(event, ev.AllocationStarted) and not over:
            allocated += sum(heard - start for start in since.values())
            mark = heard if since else mark
            if first:
                mark = min(now, max(mark, to_us(event.eligible_at)))
            queued += asked * max(0, now - mark)
            mark, first, held = now, False, set()
            since = dict.fromkeys(state.nodes, now)
            heard = now
        elif isinstance(event, ev.AllocationEnded):
            allocated += sum(now - start for start in since.values())
            allocated += len(held) * (now - mark)
            mark = now if since or held else mark
            since, held = {}, set()
        elif since and not over:
            for name in state.nodes:
                since.setdefault(name, now)
            if not isinstance(event, ev.SupervisorStarted) or before != (state.phase, state.attempt):
                heard = now
        if not since and state.ended and not over:
            queued += asked * max(0, now - mark)
            mark = max(mark, now)
        if since and (state.ended or state.phase is Phase.REQUEUED):
            allocated += sum(now - start for start in since.values())
            mark, held, since = now, set(since), {}
    if not state.ended and not since:
        queued += asked * max(0, to_us(state.now) - mark)
    allocated += sum(to_us(state.now) - start for start in since.values())
    return allocated, queued


@settings(max_examples=500)
@given(st.lists(moments, max_size=80), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_random_runs_sum_exactly(drawn: list[Moment], active: int, spares: int, requeue: bool) -> None:
    story = Story(active=active, spares=spares, requeue=requeue)
    ledger = Ledger(initial_state(story.plan))
    t, told = START, []
    for moment in drawn:
        t += moment[1]
        event = next_event(ledger.state, t, moment)
        told.append(event)
        ledger.feed(event)
    found = ledger.account()
    check(found)
    allocated, queued = expected_node_time(told, initial_state(story.plan))
    assert (found.allocated_us, found.queue_us) == (allocated, queued)
    check(ledger.account(t + 7.0))
    check(ledger.account(t + 700.0))
    assert ledger.account() == found, "looking at the accounts does not change them"


@settings(max_examples=100)
@given(st.data())
def test_stories_with_random_times_sum_exactly_and_lose_no_step_time(data: st.DataObject) -> None:
    """Runs as they really go: steps, saves, failures of all kinds, recoveries."""
    story = Story(active=2, spares=2).running(5)
    done = saved = 5
    story.saved(5)
    for _ in range(data.draw(st.integers(1, 5))):
        done += data.draw(st.integers(1, 30))
        story.stepped(done, data.draw(st.floats(0.001, 2.0)))
        if data.draw(st.booleans()):
            story.saved(done, stall_s=data.draw(st.floats(0.0, 3.0)))
            saved = done
        fault = data.draw(st.sampled_from(["none", "kill", "lose", "hang", "restart"]))
        if fault == "none":
            continue
        if fault == "lose":
            story.lost(story.state.placement[0], data.draw(st.floats(0.0, 4.0)))
        elif fault == "kill":
            story.failed(1, exit_code=-9)
        elif fault == "hang":
            story.hung(silent_s=data.draw(st.floats(0.0, 20.0)))
        else:
            story.asked("restart")
        story.stopped()
        if story.state.phase is Phase.REQUEUED:
            story.allocated("m1", "m2", "m3", "m4", restarts=1)
        done = max(done, saved + 1)
        story.recovered(saved, done + 1)
        done += 1
    found = account(story, story.t)
    assert found.totals["unknown"] == 0
    in_steps = sum(found.placed_us(name) for name in ("step", "rework", "warm_up"))
    assert in_steps > 0
    for node in story.state.nodes.values():
        *before, last = found.stays[node.name]
        assert (last.what == "failed_node") == (node.role is Role.FAILED), node
        assert (last.what == PLACED) == (node.name in story.state.placement), node
        assert all(stay.end is not None and stay.start <= stay.end for stay in before)
    assert all(before.end <= after.start for before, after in pairwise(found.timeline))


def test_quantiles_are_the_tables_in_the_books() -> None:
    # chi-square quantiles with 2k degrees of freedom
    assert 2 * gamma_quantile(1, 0.95) == pytest.approx(5.9915, abs=1e-4)
    assert 2 * gamma_quantile(1, 0.05) == pytest.approx(0.10259, abs=1e-5)
    assert 2 * gamma_quantile(6, 0.95) == pytest.approx(21.0261, abs=1e-4)
    assert 2 * gamma_quantile(5, 0.05) == pytest.approx(3.9403, abs=1e-4)
    assert 2 * gamma_quantile(500, 0.5) == pytest.approx(999.333, abs=1e-2)


def test_mtbf_with_its_interval() -> None:
    none = mtbf(0, 3600.0)
    assert (none.mean_s, none.high_s) == (None, None)
    assert none.low_s == pytest.approx(3600.0 / 2.9957, rel=1e-4)
    five = mtbf(5, 3600.0)
    assert five.mean_s == 720.0
    assert five.low_s == pytest.approx(3600.0 / 10.513, rel=1e-3)
    assert five.high_s == pytest.approx(3600.0 / 1.9701, rel=1e-3)
    assert mtbf(3, 0.0).mean_s is None


@given(st.integers(1, 300), st.floats(0.01, 0.99))
def test_the_quantile_inverts_the_distribution(k: int, probability: float) -> None:
    assert gamma_below(k, gamma_quantile(k, probability)) == pytest.approx(probability, abs=1e-6)


@pytest.mark.parametrize(
    ("failures", "told"), [(1, "4.0 s to 60.0 s (90 %), 1 "), (5, "20.0 s (90 %: 4.0 s to 60.0 s), 5 ")]
)
def test_few_failures_give_an_interval_and_no_mtbf(failures: int, told: str) -> None:
    times = {"seconds": 20.0, "low_seconds": 4.0, "high_seconds": 60.0, "predicted_seconds": 3600.0}
    found = {**times, "failures": failures, "observed_seconds": 99.0}
    text = mtbf_text({"mtbf": found, "nodes": {"active": 4}})
    assert text.startswith(told), text
