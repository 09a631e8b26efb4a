"""Failures that come back without a new step: how long that goes on, and whose fault it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from jurymast.cluster.earlier import past_runs
from jurymast.core.judges.history import history
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Requeue
from jurymast.core.state.run import Phase, failure_rate
from jurymast.core.state.settings import Budget, Settings
from support.stories import Story

DAY_S = 86_400.0


def up_again(story: Story, restored: int | None = None) -> None:
    """From stopped ranks, or from a requeue, to ranks that are up on other nodes where need be."""
    story.stopped()
    story.backed_off()
    if story.state.phase is Phase.WAITING:
        story.wait(400.0)
    if story.state.phase is Phase.REQUEUED:
        life = story.state.restarts + 1
        story.allocated(*(f"m{3 * life + number}" for number in range(3)), restarts=life)
    if story.state.phase is Phase.LAUNCHING:
        story.ranks_up()
        if restored is not None:
            story.restored(restored)


def lose(story: Story, place: int, after_s: float) -> str:
    """The node with this group rank dies so long after its ranks are up."""
    story.t = max(story.t, story.state.up_at + after_s)
    victim = story.state.placement[place]
    story.feed(ev.NodeLost(t=story.t, node=victim, how="closed", silent_s=0.3))
    return victim


def strikes(story: Story, directory: Path) -> set[str]:
    """The nodes that the next run excludes, or counts a failure of, for this run's journal."""
    story.write(directory / "run")
    (past,) = past_runs(directory)
    records = history([past], story.t, DAY_S)
    return {name for name, one in records.items() if one.excluded or one.strikes or one.failures}


def in_turns(story: Story, number: int) -> None:
    if number % 2:
        story.hung()
    else:
        story.failed(0, error="DistNetworkError", message="Connection reset by peer")


def one_failure(story: Story, number: int) -> None:
    kinds: list[Callable[[], object]] = [
        lambda: story.hung(),
        lambda: story.failed(0, error="DistNetworkError", message="Connection reset by peer"),
        lambda: story.failed(number % 2, exit_code=-9),
        lambda: lose(story, number % 2, 10.0 * (number % 7)),
        lambda: story.failed(1, exit_code=-7),
    ]
    kinds[number % len(kinds)]()


@pytest.mark.parametrize("failure", [in_turns, one_failure])
def test_attempts_without_a_new_step_are_bounded_whatever_ends_them(
    failure: Callable[[Story, int], None],
) -> None:
    story = Story(active=2, spares=1).running(100)
    number = 0
    while not story.state.ended:
        number += 1
        assert number <= 20
        failure(story, number)
        up_again(story)
        if number == 7:  # another supervisor knows it from the journal
            story.feed(ev.SupervisorStarted(t=story.t, epoch=story.state.epoch + 1, node="n1"))
            for node in story.state.nodes.values():
                node.heard = True
    assert number == 20
    assert story.state.phase is Phase.FAILED
    reason = story.last(Finish).reason
    assert "20 attempts in a row without a new step: " in reason
    assert ("hang 10 times" if failure is in_turns else "node_crash 4 times") in reason


def test_lost_nodes_at_random_times_may_be_bad_luck_but_not_for_ever() -> None:
    """A large run that saves rarely has such luck now and then."""
    story, chance, number = Story(active=2, spares=1).running(100), Random(0), 0
    while not story.state.ended:
        number += 1
        assert number <= 40
        lose(story, number % 2, chance.expovariate(1 / 400.0))
        up_again(story)
    assert number > 22
    assert f"{number} attempts in a row without a new step: node_crash" in story.last(Finish).reason


def test_one_other_failure_among_the_lost_nodes_is_no_bad_luck() -> None:
    story, chance, number = Story(active=2, spares=1).running(100), Random(0), 0
    while not story.state.ended:
        number += 1
        assert number <= 20
        if number == 5:
            story.hung()
        else:
            lose(story, number % 2, chance.expovariate(1 / 400.0))
        up_again(story)
    assert number == 20


def test_restarts_that_a_supervisor_wants_by_itself_are_bounded_too() -> None:
    """After each take-over not all nodes had received the launch, say. What a user orders is not counted."""
    story, number = Story(active=2, spares=1).running(100), 0
    while not story.state.ended:
        number += 1
        assert number <= 20
        for what in ("restart", ev.RELAUNCH):
            story.feed(ev.Asked(t=story.t, what=what, by="the new supervisor"))
            up_again(story)
    assert number == 20
    assert "20 attempts in a row without a new step: relaunch_asked 20 times" in story.last(Finish).reason


@pytest.mark.parametrize(("budget", "phase"), [(1, Phase.REQUEUED), (0, Phase.FAILED)])
def test_an_allocation_that_never_has_enough_nodes_costs_the_budget_for_failures(
    budget: int, phase: Phase
) -> None:
    """A node is lost in its tests before the first attempt."""
    story = Story(
        active=2, spares=0, gpus=1, settings=Settings(infrastructure=Budget(count=budget))
    ).allocated()
    story.feed(ev.NodeLost(t=story.t, node="n2", how="closed", silent_s=0.3))
    assert story.state.deadline is not None
    story.wait(story.state.deadline - story.t + 1.0)
    assert (story.state.attempt, story.state.phase) == (0, phase)


def test_a_policy_says_how_many_attempts_without_a_new_step_there_may_be() -> None:
    few = Story(settings=Settings(attempts_without_step=4)).running(100)
    unbounded = Story(settings=Settings(attempts_without_step=None)).running(100)
    for number in range(30):
        for story in (few, unbounded):
            if not story.state.ended:
                in_turns(story, number)
                up_again(story)
        assert few.state.ended == (number >= 3)
    assert not unbounded.state.ended


def test_a_new_step_begins_the_count_anew_and_the_pauses_too() -> None:
    story = Story().running(100)
    for number in range(40):
        in_turns(story, number)
        up_again(story)
        if number % 8 == 7:
            assert story.state.not_before >= story.t - 60.0
            story.restored(90).stepped(101 + number)
            in_turns(story, number)
            story.stopped()
            assert story.state.phase is Phase.LAUNCHING, "a pause after the first failure"
            story.ranks_up()
    assert not story.state.ended


def test_pauses_grow_from_attempt_to_attempt_without_a_new_step() -> None:
    story = Story().running(100)
    pauses = []
    for number in range(9):
        in_turns(story, number)
        story.stopped()
        pauses.append(max(0.0, story.state.not_before - story.t))
        story.backed_off().ranks_up()
    assert pauses == pytest.approx([0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], abs=0.01)


def test_preemptions_are_no_attempts_without_a_step_and_begin_no_count_anew() -> None:
    story = Story(settings=Settings(attempts_without_step=6)).running(100)
    for number in range(5):
        in_turns(story, number)
        up_again(story)
        for _ in range(3):
            story.t += 60.0
            for signal in ("SIGTERM", "preempted"):
                story.feed(ev.Signalled(t=story.t, signal=signal))
            story.allocated(restarts=story.state.restarts + 1)
            story.ranks_up()
        assert not story.state.ended, number
    in_turns(story, 5)
    story.stopped()
    assert "6 attempts in a row without a new step" in story.last(Finish).reason


def test_a_crash_loop_between_preemptions_is_one() -> None:
    story = Story().running(100)
    for number in range(3):
        story.failed(0)
        story.stopped()
        assert story.state.ended == (number == 2)
        if number < 2:
            story.backed_off().ranks_up()
            story.t += 60.0
            for signal in ("SIGTERM", "preempted"):
                story.feed(ev.Signalled(t=story.t, signal=signal))
            story.allocated(restarts=story.state.restarts + 1)
            story.ranks_up()
    assert "crash loop: the same failure 3 times" in story.last(Finish).reason


def test_a_script_that_counts_from_0_is_stopped_if_it_always_ends_after_as_many_steps() -> None:
    story = Story().allocated().ranks_up()
    number = 0
    while not story.state.ended:
        number += 1
        assert number <= 20
        story.t += 1500.0
        story.stepped(500 + number % 2, absolute=False)
        in_turns(story, number)
        up_again(story)
    assert "20 attempts in a row without a new step" in story.last(Finish).reason


def test_allocations_that_are_lost_each_time_end_the_run() -> None:
    story = Story().running(100)
    while not story.state.ended:
        assert story.state.restarts < 25
        story.t += 60.0
        story.allocated(restarts=story.state.restarts + 1)
        if not story.state.ended:
            story.ranks_up()
    assert "20 attempts in a row without a new step: allocation_lost 20 times" in story.last(Finish).reason


# ---- a fault that follows the script


def test_the_node_with_the_same_ranks_dies_each_time_so_the_script_is_the_cause(tmp_path: Path) -> None:
    """Rank 0 fills the memory of its node, say. The run goes through requeues meanwhile."""
    story = Story(active=2, spares=1).running(100)
    victims: list[str] = []
    while not story.state.ended:
        assert len(victims) < 6
        victims.append(lose(story, 0, 60.0))
        up_again(story)
    assert len(set(victims)) == len(victims) >= 3, "each is another node"
    assert (story.incident.cause, story.incident.charged) == ("script_fault", "application")
    assert "no node is blamed" in story.incident.evidence
    assert story.state.excluded == {}
    found = failure_rate(story.state, story.t)
    assert found is not None
    assert found.incidents == 0.0
    assert strikes(story, tmp_path) == set()


def test_two_nodes_that_die_with_the_same_ranks_soon_after_the_start_may_do_so_for_a_reason_outside() -> None:
    """Two failures within seconds: a power outage does as much. A third one with the same ranks does not."""
    story = Story(active=3, spares=3).allocated().ranks_up()
    causes = []
    for _ in range(3):
        lose(story, 1, 2.0)
        up_again(story)
        causes.append(story.incident.cause)
    assert causes == ["node_crash", "node_crash", "script_fault"]


def test_acquitted_nodes_are_not_excluded_from_a_requeue() -> None:
    story = Story(active=2, spares=1).running(100)
    first, second = lose(story, 0, 60.0), ""
    up_again(story)
    second = lose(story, 0, 60.0)
    story.stopped()
    assert first != second
    assert story.state.phase is Phase.REQUEUED
    assert story.last(Requeue).exclude == ()


def test_an_acquitted_node_is_excluded_no_longer_although_the_job_has_other_nodes_by_now() -> None:
    story = Story(active=2, spares=0).running(100)
    first = lose(story, 0, 60.0)
    story.stopped()
    assert story.last(Requeue).exclude == (first,)
    up_again(story)
    assert set(story.state.excluded) == {first}
    lose(story, 0, 60.0)
    story.stopped()
    assert story.incident.cause == "script_fault"
    assert story.state.excluded == {}


@pytest.mark.parametrize("how", ["after the same time", "at the same step"])
def test_nodes_that_die_wherever_at_the_same_point_are_acquitted(how: str, tmp_path: Path) -> None:
    story = Story(active=3, spares=3).running(100)
    for number in range(3):
        if how == "at the same step":
            story.stepped(100)
        lose(story, number, 300.0 * (1 if how == "after the same time" else number + 1))
        up_again(story, 90)
        story.state.restores()  # as the supervisor asks now and then
    assert story.state.restores() == (0, 0), "no failure of the infrastructure"
    assert story.state.failures is not None
    assert story.state.failures.posterior.incidents == 0.0
    assert [incident.cause for incident in story.state.incidents] == ["script_fault"] * 3
    assert strikes(story, tmp_path) == set()


@pytest.mark.parametrize("why", ["at any time", "soon after each start", "new steps between"])
def test_nodes_that_fail_one_after_the_other_are_blamed_if_nothing_shows_the_script(why: str) -> None:
    story = Story(active=3, spares=4).running(100)
    after_s = {"at any time": (40.0, 400.0, 3000.0, 90.0)}.get(why, (5.0, 6.0, 5.0, 6.0))
    for number in range(4):
        lose(story, number % 3, 300.0 if why == "new steps between" else after_s[number])
        up_again(story, 90)
        if why == "new steps between":
            story.stepped(200 + 100 * number)
    assert {incident.cause for incident in story.state.incidents} == {"node_crash"}
    assert not story.state.acquitted


def test_nodes_of_many_that_die_at_the_same_point_may_do_so_by_chance() -> None:
    story = Story(active=3, spares=3).running(100)
    story.state.unnamed = 12_000  # a failure every 24 minutes
    for number in range(3):
        lose(story, number, 300.0)
        up_again(story, 90)
    assert {incident.cause for incident in story.state.incidents} == {"node_crash"}


def test_many_nodes_that_die_until_the_run_gives_up_are_not_blamed(tmp_path: Path) -> None:
    story = Story(active=3, spares=1).running(100)
    number = 0
    while not story.state.ended:
        number += 1
        lose(story, number % 3, (3.0, 400.0, 40.0, 4000.0)[number % 4])
        up_again(story)
    assert number == 40
    assert "40 attempts in a row without a new step: node_crash 40 times" in story.last(Finish).reason
    assert strikes(story, tmp_path) == set()


@pytest.mark.parametrize("exit_code", [-9, -7])
def test_a_rank_that_is_killed_on_its_next_node_too_acquits_the_first(exit_code: int) -> None:
    story = Story(active=2, spares=2).running(100)
    nodes: list[str] = []
    while not story.state.ended:
        assert len(nodes) < 6
        nodes.append(story.state.placement[1])
        story.failed(1, exit_code=exit_code)
        up_again(story, 90)
    assert len(set(nodes)) == 2
    assert (story.incident.cause, story.incident.charged) == ("script_fault", "application")
    assert story.state.exit_code == 128 - exit_code
    assert not story.state.frail


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("OSError", "[Errno 28] No space left on device: '/tmp/x'"),
        ("RuntimeError", "No CUDA-capable device is detected"),
    ],
)
def test_what_a_script_uses_up_on_node_after_node_acquits_them(error: str, message: str) -> None:
    story = Story(active=2, spares=2).running(100)
    nodes: list[str] = []
    while not story.state.ended:
        assert len(nodes) < 6
        nodes.append(story.state.placement[1])
        story.failed(1, exit_code=1, error=error, message=message)
        up_again(story, 90)
    assert len(set(nodes)) == 2
    assert story.incident.cause == "script_fault"
    assert not story.state.frail


def test_a_run_replayed_from_its_journal_knows_who_was_acquitted(tmp_path: Path) -> None:
    story = Story(active=2, spares=1).running(100)
    for _ in range(2):
        lose(story, 0, 60.0)
        up_again(story)
    assert story.state.acquitted
    again = Story(active=2, spares=1)
    for event in story.events:
        again.feed(ev.from_json(ev.to_json(event)))
    assert again.state.acquitted == story.state.acquitted


# ---- hangs that come back


def test_a_hang_that_comes_back_has_twice_the_time_and_never_more_until_a_new_step() -> None:
    """If each were given more time, one that comes back each time would be found later and later."""
    story = Story().running(100)
    patience = []
    for _ in range(4):
        story.hung()
        patience.append(story.state.hang_patience)
        up_again(story, 90)
    assert patience == [1.0, 2.0, 2.0, 2.0]
    story.stepped(95)
    assert story.state.hang_patience == 2.0, "these steps had been done before"
    story.stepped(101)
    assert story.state.hang_patience == 1.0
    story.hung()
    assert story.state.hang_patience == 1.0, "the first after new steps"


def test_other_failures_between_hangs_change_nothing() -> None:
    story = Story().running(100)
    for number in range(8):
        in_turns(story, number)
        up_again(story, 90)
    assert story.state.hang_patience == 2.0
