"""A job that is requeued shortly before its time limit, so that its run goes on with all its time again."""

from __future__ import annotations

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Requeue
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
