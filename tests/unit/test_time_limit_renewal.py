"""A job that is requeued shortly before its time limit, so that its run goes on with all its time again."""

from __future__ import annotations

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Requeue, Send
from jurymast.core.state.run import Phase
from jurymast.core.state.settings import Settings
from jurymast.core.supervision.limit import RENEW_S, TimeLimit
from support.stories import Story
from support.successor import Successor

RENEWS = Settings(renews=True)


def near_its_limit(story: Story, ends_in_s: float = 1.0) -> Successor:
    """The run's supervisor is told that the job ends in so many seconds."""
    supervisor = Successor(story)
    for node in story.state.placement:
        supervisor.joins(node, attempt=story.state.attempt, ranks="running")
    supervisor.machine.on_time_limit(ends_in_s, story.t)
    supervisor.waits(1.0)
    return supervisor


def requeued(story: Story) -> bool:
    return any(isinstance(one, Requeue) for _, one in story.decisions) or story.state.phase is Phase.REQUEUED


def test_the_job_is_requeued_before_its_limit_and_nobody_is_charged() -> None:
    story = Story(active=2, spares=0, settings=RENEWS).running()
    story.feed(ev.Asked(t=story.t, what=ev.REQUEUE, by="the job's time limit"))
    story.stopped()
    assert requeued(story)
    incident = story.incident
    assert (incident.cause, incident.charged, incident.action) == ("requeue_asked", "nobody", "requeue")
    assert incident.reason.startswith("requeue requested by the job's time limit")
    assert story.state.excluded == {}
    story.allocated(restarts=1)
    assert story.state.restarts - story.state.ordered_restarts == 0, "no requeue of the policy's number"


def test_the_limit_is_up_as_long_before_it_as_the_last_checkpoint_takes() -> None:
    limit = TimeLimit(0.0)
    limit.answered(3600.0, 0.0)
    assert not limit.is_up(0.0, 0.0, 3600.0 - RENEW_S - 1.0)
    assert limit.is_up(0.0, 0.0, 3600.0 - RENEW_S)
    assert limit.is_up(0.0, 100.0, 3600.0 - RENEW_S - 200.0)


def test_a_short_job_has_most_of_its_time() -> None:
    limit = TimeLimit(0.0)
    limit.answered(60.0, 0.0)
    assert not limit.is_up(0.0, 0.0, 40.0)
    assert limit.is_up(0.0, 0.0, 45.0)


@pytest.mark.parametrize("told", [None, float("inf")])
def test_a_job_without_a_known_limit_is_never_requeued_for_it(told: float | None) -> None:
    limit = TimeLimit(0.0)
    limit.answered(told, 0.0)
    assert not limit.is_up(0.0, 100.0, 1e9)


def test_a_supervisor_asks_for_it_in_time() -> None:
    story = Story(active=2, spares=0, settings=RENEWS).running()
    near_its_limit(story)
    assert story.state.phase is Phase.STOPPING


@pytest.mark.parametrize(
    ("settings", "requeue", "done"),
    [(Settings(), True, True), (RENEWS, False, True), (RENEWS, True, False)],
    ids=["not in the policy", "requeueing is not allowed", "no new step in this life of the job"],
)
def test_a_run_is_ended_by_its_limit(settings: Settings, requeue: bool, done: bool) -> None:
    story = Story(active=2, spares=0, settings=settings, requeue=requeue).running()
    if not done:
        story.failed(0)
        story.stopped()
        story.backed_off().ranks_up()
    near_its_limit(story)
    assert story.state.phase is Phase.RUNNING
    assert not requeued(story)


def function(*, keeps_s: float = 120.0, timeouts: int = 2) -> Story:
    """A function that keeps its own state, which does no steps."""
    story = Story(active=2, spares=0)
    story.state.timeouts_most, story.state.keeps_s = timeouts, keeps_s
    return story.allocated().ranks_up()


def stop(supervisor: Successor) -> None:
    """All ranks are stopped."""
    state = supervisor.story.state
    for node in state.placement:
        supervisor.hears(node, msg.Stopped(attempt=state.attempt, store_port=1))


def test_a_function_is_requeued_as_often_as_it_may_be_without_a_step() -> None:
    story = function()
    for done in range(2):
        supervisor = near_its_limit(story)
        assert (story.state.phase, story.state.timeouts) == (Phase.STOPPING, done)
        stop(supervisor)
        assert requeued(story)
        assert (story.incident.cause, story.state.timeouts) == ("requeue_asked", done + 1)
        story.allocated(restarts=done + 1)
        story.ranks_up()
    near_its_limit(story)
    assert story.state.phase is Phase.RUNNING, "it is ended by the third limit"


def test_a_function_has_time_to_keep_its_state() -> None:
    """Also if another supervisor takes over meanwhile."""
    story = function(keeps_s=60.0)
    story.state.allocated_at -= 3600.0
    supervisor = near_its_limit(story, 60.0)
    asked = story.state.findings.asked
    assert asked is not None
    assert asked.timeout
    assert asked.grace_s > 10.0 * story.state.settings.stop_grace_s
    supervisor.waits(asked.grace_s - 1.0)
    assert story.state.phase is Phase.STOPPING, "nobody is given up before that"
    again = Successor(story)
    stops = [one.message for one in again.effects if isinstance(one, Send)]
    assert [stop.grace_s for stop in stops if isinstance(stop, msg.Stop)] == [asked.grace_s] * 2


@pytest.mark.parametrize(("what", "counted"), [("requeue", 0), ("timeout", 1)])
def test_a_requeue_that_somebody_requests(what: str, counted: int) -> None:
    story = function()
    supervisor = near_its_limit(story, 1e6)
    answer, _ = supervisor.machine.on_request(msg.Ask(what=what, by="ann"), story.t)
    assert isinstance(answer, msg.Accepted)
    stop(supervisor)
    assert requeued(story)
    assert (story.state.timeouts, story.incident.charged) == (counted, "nobody")
    assert "requested by ann" in story.incident.reason


def test_one_time_limit_too_many_ends_the_run() -> None:
    story = function(timeouts=0)
    near_its_limit(story, 1e6).machine.on_request(msg.Ask(what="timeout", by="ann"), story.t)
    assert (story.state.phase, story.state.ended) == (Phase.FAILED, True)


def test_what_cannot_be_requeued_says_so() -> None:
    story = Story(active=2, spares=0, requeue=False).running()
    answer, _ = near_its_limit(story, 1e6).machine.on_request(msg.Ask(what="requeue", by="ann"), story.t)
    assert isinstance(answer, msg.Declined)
    assert "--no-requeue" in answer.why
