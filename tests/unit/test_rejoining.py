"""What an agent is told that was away for a while, and how long a new supervisor waits for what it asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jurymast.core.run.recovery import SPARE_GRACE_S
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.run import Node, Phase, Role
from jurymast.core.state.settings import Settings
from support.site import Site
from support.stories import Story
from support.successor import Successor


def test_a_node_that_was_away_is_told_what_is_safe_and_what_is_void_and_has_room_again() -> None:
    site = Site()
    site.save()
    site.replicas_made()
    site.ordered(msg.Committed)
    site.joined("n2", copies=(site.report(1, 10),))
    assert [(node, order.step) for node, order in site.ordered(msg.Committed)] == [("n2", 10)]
    site.skip(20, rank=0)
    site.ordered(msg.Void)
    site.hold(1, at=20)
    assert [(node, order.step) for node, order in site.ordered(msg.Void)] == [("n2", 20)]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STOPPING, Phase.WAITING])
def test_nobody_is_out_of_time_because_no_supervisor_was_there(phase: Phase) -> None:
    story = Story(active=2, spares=1)
    if phase is Phase.WAITING:  # for a node whose torchrun host warms up again
        story.running().lost(story.state.spare_nodes()[0].name)
        first, second = story.state.placement
        died = ev.WorkerFailed(
            t=story.t, node=first, attempt=1, rank=-1, exit_code=-9, error="TorchrunHostDied"
        )
        story.feed(died)
        for name, port in ((first, 0), (second, 29001)):
            story.feed(ev.WorkersStopped(t=story.t, node=name, attempt=1, store_port=port))
    elif phase is Phase.STOPPING:
        story.running()
        failed = ev.WorkerFailed(t=story.t, node=story.state.placement[0], attempt=1, rank=0, exit_code=1)
        story.feed(failed)
    else:
        names = ("n1", "n2", "n3")
        allocated = ev.AllocationStarted(
            t=story.t, slurm_job="7", restarts=0, nodes=names, host="n1", eligible_at=story.t
        )
        story.feed(allocated)
    assert story.state.phase is phase
    story.t += 1000.0
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n2"))
    story.feed(ev.Tick(t=story.t + 1.0))
    assert story.state.phase is phase
    assert not [name for name in story.state.places if story.state.nodes[name].role is Role.FAILED]


def test_only_who_is_back_after_a_takeover_can_be_late_to_stop() -> None:
    story = Story(active=2, spares=1).running()
    story.failed(0)
    back, away = story.state.placement
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n3"))
    story.wait(100.0)
    assert story.state.phase is Phase.STOPPING
    incarnation = story.state.nodes[back].incarnation
    story.feed(ev.NodeJoined(t=story.t, node=back, address="10.0.0.1", incarnation=incarnation))
    story.wait(100.0)
    assert [story.state.nodes[name].role for name in (back, away)] == [Role.FAILED, Role.ACTIVE]


def test_what_will_never_be_complete_makes_room_when_ranks_cannot_save() -> None:
    """A supervisor has taken over: an image was dropped as damaged while there was none."""
    site = Site()
    site.hold(1, at=10)
    site.hold(2, at=10)
    site.skip(20, rank=1)
    assert {order.step for _, order in site.ordered(msg.Void)} == {20}, "it may be on its way"
    site.lost("n1")
    site.skip(30, rank=1)
    assert {order.step for _, order in site.ordered(msg.Void)} == {30}, "n1 may bring it"
    site.joined("n1")
    site.skip(40, rank=1)
    assert {order.step for _, order in site.ordered(msg.Void)} == {40}, "what n1 says is late"
    site.skip(40, rank=0)
    site.skip(50, rank=1)
    assert {order.step for _, order in site.ordered(msg.Void)} == {10, 50}


def test_an_image_that_a_node_no_longer_has_when_it_is_back_is_not_waited_for() -> None:
    """It was found corrupt, and dropped, when nobody heard of that: no other node had it."""
    site = Site()
    site.save()
    site.joined("n2", copies=())
    site.look()
    assert {(node, order.step) for node, order in site.ordered(msg.Void)} == {
        (node, 10) for node in ("n1", "n2", "n3", "s1")
    }


@pytest.mark.parametrize("back", [True, False])
def test_a_damaged_image_is_given_up_only_once_all_nodes_that_may_have_another_were_heard(back: bool) -> None:
    """A supervisor has taken over, and the spare that has the replicas is not yet back."""
    site = Site()
    site.lost("s1")
    site.save()
    site.hear("n2", msg.Dropped(copy=site.report(1, 10), why="its hash does not match"))
    site.look()
    assert site.ordered(msg.Void) == []
    if back:
        site.joined("s1", copies=tuple(site.report(rank, 10, "peer", "own") for rank in range(3)))
    else:
        site.state.nodes["s1"].role = Role.FAILED
    site.look()
    assert {order.step for _, order in site.ordered(msg.Void)} == (set() if back else {10})


def test_a_spare_that_never_came_keeps_no_damaged_state_in_the_way() -> None:
    site = Site()
    site.state.nodes["s2"] = Node("s2", 4)
    site.save()
    site.hear("n2", msg.Dropped(copy=site.report(1, 10), why="its hash does not match"))
    site.look()
    assert {order.step for _, order in site.ordered(msg.Void)} == {10}


# ---- nodes that an earlier supervisor had lost


def joined_again(story: Story, name: str) -> None:
    """The agent of a node that counted as lost, and lived, finds the next supervisor and is ready."""
    story.t += 0.1
    incarnation = story.state.nodes[name].incarnation
    story.feed(ev.NodeJoined(t=story.t, node=name, address="10.0.0.9", incarnation=incarnation))
    story.feed(ev.NodeReady(t=story.t, node=name, store_port=29002))


def taken_over(*, how: str, before_s: float = 0.0) -> Story:
    """A node was lost and replaced, its replacement died, and another supervisor takes over. Only the first
    one of them may fill its place."""
    story = Story(active=3, spares=1).running()
    first = story.state.placement[1]
    lost = ev.NodeLost(t=story.t, node=first, how=how, silent_s=1.6, evidence="it was told to")
    story.feed(lost)
    story.stopped().backed_off().ranks_up()
    story.t += before_s
    second = story.state.placement[1]
    story.feed(ev.NodeLost(t=story.t, node=second, how="left", silent_s=0.0))
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node=story.state.placement[0]))
    for name in story.state.placement:
        if name != second:
            incarnation = story.state.nodes[name].incarnation
            story.feed(ev.NodeJoined(t=story.t, node=name, address="", incarnation=incarnation))
            story.feed(ev.WorkersStopped(t=story.t, node=name, attempt=2, store_port=29003))
    return story


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_who_an_earlier_supervisor_did_not_hear_may_return_to_the_next(how: str) -> None:
    story = taken_over(how=how)
    first = next(name for name, node in story.state.nodes.items() if node.may_return)
    assert story.state.phase is Phase.WAITING
    story.wait(5.0)
    assert story.state.phase is Phase.WAITING
    joined_again(story, first)
    assert (story.state.phase, story.state.placement[1]) == (Phase.LAUNCHING, first)
    assert story.incident.action == "swap"


def test_who_does_not_return_to_the_next_supervisor_either_is_lost() -> None:
    story = taken_over(how="silent")
    first = next(name for name, node in story.state.nodes.items() if node.may_return)
    story.t += 9.0
    story.feed(ev.NodeLost(t=story.t, node=first, how="silent", silent_s=9.0))
    assert story.state.phase is Phase.REQUEUED
    assert first in story.state.excluded


@pytest.mark.parametrize(("how", "before_s"), [("left", 0.0), ("taken", 0.0), ("silent", 3600.0)])
def test_whoever_said_that_it_leaves_or_is_lost_for_long_is_not_waited_for(how: str, before_s: float) -> None:
    assert taken_over(how=how, before_s=before_s).state.phase is Phase.REQUEUED


def test_a_run_that_starts_waits_for_whom_an_earlier_supervisor_did_not_hear() -> None:
    story = Story(active=3, spares=0).submitted()
    names = ("n1", "n2", "n3")
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="7", restarts=0, nodes=names, host="n1", eligible_at=story.t
        )
    )  # fmt: skip
    for name in names[1:]:
        story.feed(ev.NodeJoined(t=story.t, node=name, address="", incarnation="i"))
    story.state.nodes["n2"].role, story.state.nodes["n2"].lost_how = Role.FAILED, "silent"
    story.state.nodes["n2"].since = story.t
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n3"))
    story.wait(1.0)
    waited = story.state.phase
    story.feed(ev.NodeLost(t=story.t + 9.0, node="n2", how="silent", silent_s=9.0))
    assert (waited, story.state.phase) == (Phase.STARTING, Phase.REQUEUED)


def test_a_suspect_that_is_back_first_does_not_take_the_place_of_a_spare() -> None:
    story = Story(active=2, spares=2, settings=Settings(preflight_s=0.0)).running()
    (bad, stays), spares = story.state.placement, [node.name for node in story.state.spare_nodes()]
    suspect, spare = spares
    story.state.nodes[suspect].become(Role.SUSPECT, "it flapped", story.t)
    story.lost(bad)
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node=stays))
    incarnation = story.state.nodes[stays].incarnation
    story.feed(ev.NodeJoined(t=story.t, node=stays, address="", incarnation=incarnation))
    story.feed(ev.WorkersStopped(t=story.t, node=stays, attempt=1, store_port=29003))
    joined_again(story, suspect)
    waited = story.state.phase
    joined_again(story, spare)
    assert (waited, story.state.phase) == (Phase.WAITING, Phase.LAUNCHING)
    assert spare in story.state.placement


# ---- nodes that cannot look up the next supervisor, as storage hangs


def starts() -> tuple[Successor, str]:
    """All nodes of a run that starts were heard, and then their supervisor was lost."""
    story = Story(active=2, spares=0, settings=Settings(join_limit_s=30.0)).submitted()
    started = ev.AllocationStarted(
        t=story.t, slurm_job="7", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=story.t
    )
    story.feed(started)
    for name in ("n1", "n2"):
        story.feed(ev.NodeJoined(t=story.t, node=name, address="", incarnation="i"))
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n1"))
    after = Successor(story)
    after.joins("n1")
    return after, "n2"


def waits_for_its_spare() -> tuple[Successor, str]:
    story = Story(active=2, spares=1, settings=Settings(join_limit_s=30.0)).running()
    stays, lost = story.state.placement
    (spare,) = story.state.nodes.keys() - {stays, lost}
    story.lost(lost)
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node=stays))
    after = Successor(story)
    after.joins(stays, attempt=1)
    return after, spare


def launches() -> tuple[Successor, str]:
    story = Story(active=2, spares=0).allocated().told()
    one, other = story.state.placement
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node=one))
    after = Successor(story)
    after.joins(one, attempt=1, ranks="running", pids=(1,))
    return after, other


@pytest.mark.parametrize(
    ("begin", "phase", "back", "then"),
    [
        (starts, Phase.STARTING, {}, Phase.LAUNCHING),
        (waits_for_its_spare, Phase.WAITING, {}, Phase.LAUNCHING),
        (launches, Phase.LAUNCHING, {"attempt": 1, "ranks": "running", "pids": (1,)}, Phase.RUNNING),
    ],
)
def test_a_run_waits_for_nodes_that_cannot_look_up_its_supervisor(
    begin: Callable[[], tuple[Successor, str]], phase: Phase, back: dict[str, Any], then: Phase
) -> None:
    """Much longer than for nodes that can; and when storage answers, these have all their time again."""
    after, late = begin()
    state, incidents = after.story.state, len(after.story.state.incidents)
    after.waits(200.0, hangs=True)
    after.machine.note("", "something else is told meanwhile", after.story.t)
    assert (state.phase, len(state.incidents)) == (phase, incidents)
    after.waits(2.0)
    after.joins(late, **back)
    after.waits(SPARE_GRACE_S + 1.0)
    assert (state.phase, len(state.incidents)) == (then, incidents)


@pytest.mark.parametrize("begin", [starts, waits_for_its_spare, launches])
def test_it_does_not_once_they_can(begin: Callable[[], tuple[Successor, str]]) -> None:
    after, _ = begin()
    after.waits(60.0, hangs=True)
    after.waits(60.0)
    assert after.story.state.phase is Phase.REQUEUED
