"""The restart ladder: what is done about a cause, how often, and when it is enough."""

from __future__ import annotations

import pytest

from jurymast.core.run.machine import HANG_PATIENCE
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Dismiss, Finish, Instruction, Launch
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import Budget, Settings
from support.stories import Story


def phase(story: Story) -> Phase:
    return story.state.phase


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def test_the_same_exception_three_times_is_a_crash_loop() -> None:
    story = Story().running()
    for attempt in (1, 2, 3):
        assert story.state.attempt == attempt
        story.failed(0)
        story.stopped()
        if attempt < 3:
            story.backed_off().ranks_up().restored(0)
    assert phase(story) is Phase.FAILED
    finish = story.last(Finish)
    assert finish.exit_code == 1, "the application's own code"
    assert "crash loop: the same failure 3 times without a new step" in finish.reason
    assert "ValueError: bad" in finish.reason
    assert "ValueError" in story.incident.traceback


def with_a_doubtful_node(*, spare: bool, **settings: str) -> Story:
    """The last node with ranks failed its tests: n3, beside which n1 is a `spare`, or n2."""
    story = Story(active=2, spares=int(spare), settings=Settings(**settings)).running()  # type: ignore[arg-type]
    story.state.nodes[story.state.placement[-1]].tested = "suspect"
    return story


@pytest.mark.parametrize("role", [Role.ACTIVE, Role.SPARE], ids=["its-host", "a-new-host"])
def test_a_node_that_failed_its_tests_leaves_at_the_next_failure_if_a_spare_is_ready(role: Role) -> None:
    story = with_a_doubtful_node(spare=True)
    story.failed(0)
    story.state.nodes["n3"].role = role
    story.stopped()
    assert story.incident.reason.endswith("n3 (failed the tests before use): n3 out, a spare in")
    assert story.last(Launch).placement == ("n2", "n1")
    assert story.state.nodes["n3"].role is Role.SUSPECT


def test_a_node_that_failed_its_tests_stays_without_a_spare_or_where_nodes_are_only_reported() -> None:
    for story in (with_a_doubtful_node(spare=False), with_a_doubtful_node(spare=True, bad_nodes="report")):
        before = story.last(Launch).placement
        story.failed(0)
        story.stopped()
        assert (story.state.attempt, story.last(Launch).placement) == (2, before)


def test_a_node_that_failed_its_tests_leaves_if_a_spare_is_ready_when_the_pause_ends() -> None:
    story = with_a_doubtful_node(spare=True)
    story.state.nodes["n1"].ready = False
    for message in ("one", "two"):
        story.failed(0, message=message)
        story.stopped()
        if message == "one":
            assert story.last(Launch).placement == ("n2", "n3")
            story.ranks_up()
    assert phase(story) is Phase.WAITING
    story.feed(ev.NodeReady(t=story.t, node="n1", store_port=1))
    story.wait(1.0)
    assert story.last(Launch).placement == ("n2", "n1")


def test_ranks_that_lose_each_other_again_and_again_end_the_run_but_late() -> None:
    story = Story(settings=Settings(application=Budget(count=0, window_s=3600.0))).running()
    for port in range(19):
        story.failed(0, error="DistNetworkError", message=f"cannot listen. port: {40000 + port}")
        story.stopped()
        assert phase(story) is not Phase.FAILED, port
        story.backed_off().ranks_up().restored(0)
    story.failed(0, error="DistNetworkError", message="cannot listen. port: 1")
    story.stopped()
    assert phase(story) is Phase.FAILED
    assert "the same failure 20 times without a new step" in story.last(Finish).reason


def test_an_exception_after_new_steps_is_no_crash_loop_but_spends_the_budget() -> None:
    story = Story(settings=Settings(application=Budget(count=3, window_s=3600.0))).running()
    for number in range(3):
        story.failed(0)
        story.stopped()
        story.recovered(0, 20 * (number + 1))
    story.failed(0)
    story.stopped()
    assert phase(story) is Phase.FAILED
    assert "the application budget of 3 failures per 3600 s is spent" in story.last(Finish).reason


def test_back_off_grows_while_nothing_new_is_done() -> None:
    story = Story().running()
    story.failed(0, message="one")
    story.stopped()
    assert phase(story) is Phase.LAUNCHING, "the first time there is no wait"
    story.ranks_up()
    story.failed(0, message="two")
    story.stopped()
    assert phase(story) is Phase.WAITING
    assert story.state.not_before == pytest.approx(story.t + 0.5)
    story.wait(0.4)
    assert phase(story) is Phase.WAITING
    story.wait(0.2)
    assert phase(story) is Phase.LAUNCHING


def test_the_second_time_on_the_same_node_it_goes_and_a_newcomer_with_the_same_clears_it() -> None:
    story = Story(active=2, spares=2).running()
    assert story.state.placement == ("n2", "n3")
    story.failed(1, exit_code=-9)
    story.stopped()
    story.recovered(0, 20)
    story.failed(1, exit_code=-9)
    story.stopped()
    assert story.incident.action == "swap"
    assert "second time in a row on n3" in story.incident.reason
    assert story.state.nodes["n3"].role is Role.SUSPECT
    assert Dismiss(node="n3", reason=story.incident.reason) in [i for _, i in story.decisions]
    newcomer = story.last(Launch).placement[1]
    assert newcomer == "n4"
    story.recovered(0, 40)
    story.failed(1, exit_code=-9)
    story.stopped()
    assert story.incident.action == "restart"
    assert "not blamed" in story.incident.reason
    assert story.last(Launch).placement == ("n2", "n4")


def test_a_blamed_node_that_lives_is_tried_again_when_nothing_can_take_its_place() -> None:
    story = Story(active=2, spares=0).running()
    for done in (20, 40):
        story.failed(1, exit_code=-9)
        story.stopped()
        story.recovered(0, done)
    assert story.incident.action == "restart"
    assert "no spare is left: restarted in place" in story.incident.reason


def returns(story: Story, name: str) -> None:
    """A node that was lost is back, and passes its tests."""
    story.feed(ev.NodeJoined(t=story.t, node=name, address="", incarnation="another"))
    story.feed(ev.NodeReady(t=story.t, node=name, store_port=29000))
    told = ev.NodeTested(t=story.t, node=name, verdict="ok", slowness=1.0, message="")
    story.feed(told)
    assert story.state.nodes[name].role is Role.SPARE


@pytest.mark.parametrize("finding", ["", "hardware", "network"])
def test_a_spare_that_passes_its_tests_in_the_pause_takes_the_place_of_who_stayed_for_want_of_one(
    finding: str,
) -> None:
    """Of one that showed the same cause twice, or of which something was found."""
    story = Story(active=2, spares=1, settings=Settings(workaround=False)).running()
    (spare,) = story.state.nodes.keys() - {*story.state.placement}
    good, bad = story.state.placement
    story.lost(spare)
    if finding:
        found = ev.HealthFound(
            t=story.t, node=bad, probe="p", code="c", verdict="suspect", kind=finding, message="m", at=story.t
        )
        story.feed(found)
    for number in (1, 2):
        story.failed(*((0,) if finding else (1, -9)))
        story.stopped()
        assert story.incident.action == "restart"
        if number == 1:
            story.ranks_up().restored(0)
    assert phase(story) is Phase.WAITING
    returns(story, spare)
    story.backed_off()
    assert set(story.last(Launch).placement) == {good, spare}
    assert (story.incident.action, story.state.nodes[bad].role) == ("swap", Role.SUSPECT)
    assert "as a spare was ready" in story.incident.reason


def test_a_hang_restarts_in_place_and_a_second_one_without_progress_is_waited_for_longer() -> None:
    story = Story().running(30)
    assert kinds(story.hung()) == ["StopWorkers"]
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("hang", "restart")
    assert story.incident.fault_at == pytest.approx(story.incident.detected_at - 12.0)
    assert story.state.hang_patience == 1.0
    story.ranks_up().restored(10).stepped(11)
    story.hung()
    assert story.state.hang_patience == HANG_PATIENCE
    story.stopped()
    story.backed_off().ranks_up().restored(10).stepped(40)
    assert not story.incident.open


@pytest.mark.parametrize("steps", [[1000] * 9, [1000, 900, 1100, 1000, 950, 1050]])
def test_the_same_error_after_as_many_steps_ends_a_run_that_counts_from_0(steps: list[int]) -> None:
    """A script without a Checkpointer: each attempt makes new steps, as far as can be seen."""
    story = Story().allocated().ranks_up()
    for count, done in enumerate(steps):
        story.t += 1500.0
        story.stepped(done, absolute=False).failed(0)
        story.stopped()
        if story.state.ended:
            assert (count, steps[0], set(steps)) == (2, 1000, {1000})
            assert "the same failure 3 times, each after 1000 steps" in str(story.state.end_reason)
            return
        story.backed_off().ranks_up()
    assert len(set(steps)) > 1


def test_a_frozen_rank_names_its_node() -> None:
    story = Story().running()
    story.hung(ranks=(1,), node="n3", silent_s=1.2)
    story.stopped()
    assert (story.incident.cause, story.incident.node, story.incident.rank) == ("rank_frozen", "n3", 1)


def test_requests_by_hand_spend_no_budget() -> None:
    story = Story(settings=Settings(infrastructure=Budget(count=0), application=Budget(count=0))).running()
    for number in range(4):
        story.asked("restart")
        story.stopped()
        story.recovered(0, 20 + number)
    assert phase(story) is Phase.RUNNING


def test_an_allocation_that_is_lost_counts_for_the_budget_of_machines() -> None:
    story = Story(settings=Settings(infrastructure=Budget(count=1))).running()
    story.allocated(restarts=1).ranks_up().restored(0).stepped(20)
    assert phase(story) is Phase.RUNNING
    story.allocated(restarts=2)
    assert phase(story) is Phase.FAILED
    assert "infrastructure budget of 1 failures" in story.last(Finish).reason


def test_an_allocation_whose_nodes_never_come_counts_for_the_budget_of_machines() -> None:
    story = Story(active=2, spares=0, settings=Settings(infrastructure=Budget(count=0))).submitted()
    began = ev.AllocationStarted(
        t=story.t, slurm_job="17", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=story.t
    )
    story.feed(began)
    story.wait(400.0)
    assert phase(story) is Phase.FAILED
    assert "infrastructure budget of 0 failures" in story.last(Finish).reason


def test_a_full_disk_is_waited_for_longer_each_time_though_steps_are_done_between() -> None:
    story = Story().allocated().ranks_up()
    waits = []
    for _ in range(4):
        story.stepped(30, absolute=False)
        story.failed(0, error="OSError", message="[Errno 28] No space left on device")
        story.stopped()
        assert story.incident.cause == "storage_full"
        waits.append(max(0.0, story.state.not_before - story.t))
        story.wait(waits[-1] + 1.0)
        story.ranks_up()
    assert waits == pytest.approx([0.0, 15.0, 30.0, 60.0])


def test_a_lost_node_that_is_back_already_is_better_than_a_requeue() -> None:
    """It was cut off for a moment; while its ranks were being stopped the other was lost for good."""
    story = Story(active=2, spares=1).running()
    away, gone = story.state.placement
    story.lost(away)
    joined = ev.NodeJoined(t=story.t, node=away, address="10.0.0.9", incarnation="as before")
    story.feed(joined)
    story.feed(ev.WorkersStopped(t=story.t, node=away, attempt=1, store_port=29001))
    story.lost(gone)
    launch = story.last(Launch)
    assert launch.attempt == 2
    assert away in launch.placement
    assert gone not in launch.placement


def test_an_ill_node_leaves_for_good_also_where_another_is_about_to_be_ready_again() -> None:
    story = Story(active=2, spares=1).running()
    assert story.state.placement == ("n2", "n3")
    story.feed(
        ev.HealthFound(
            t=story.t, node="n3", probe="p", code="c", verdict="bad", kind="hardware", message="m", at=story.t
        )
    )
    story.feed(ev.WorkersStopped(t=story.t, node="n2", attempt=1, store_port=0))
    assert story.state.nodes["n2"].role is not Role.ACTIVE
    story.feed(ev.WorkersStopped(t=story.t, node="n3", attempt=1, store_port=29500))
    assert "unless ready again soon" in story.incident.reason
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29500))
    story.backed_off()
    assert story.last(Launch).placement == ("n2", "n1")
    assert [blame.node for blame in story.state.blames] == ["n3"]
