"""Attempts that do not come about at once: storage hangs, images do not come, an attempt is unknown."""

from __future__ import annotations

from jurymast.core.run.restoring import WAIT_LIMIT_S
from jurymast.core.state import events as ev
from jurymast.core.state import within
from jurymast.core.state.effects import Launch, StopWorkers
from jurymast.core.state.images import MEMORY, SHARED
from jurymast.core.state.run import Phase
from support.stories import START, Story


def test_a_launch_that_waits_for_storage_is_no_hang_and_people_are_told() -> None:
    """A rank is killed while the run directory hangs: the launch waits, as long as that takes."""
    story = Story(active=4, spares=1).running(50)
    story.failed(1, exit_code=-9)
    story.stopped()
    for _ in range(40):
        story.wait(15.0)
        story.feed(ev.LaunchWaits(t=story.t, attempt=2, what="the run directory /runs", seconds=15.0))
    assert (story.state.phase, len(story.state.incidents)) == (Phase.LAUNCHING, 1)
    assert [alert.subject for alert in story.state.alerts] == ["launch waits"]
    assert "for the run directory /runs" in story.state.alerts[0].message
    story.told().ranks_up().restored(40).stepped(60)
    assert (story.state.phase, story.state.incident) == (Phase.RUNNING, None)


def test_storage_that_hangs_for_long_explains_what_comes_late() -> None:
    """It was found once, at its begin; ranks that stand still ten minutes later wait for it all the same."""
    story = Story(active=4, spares=1).running(50)
    for name in story.state.nodes:
        story.t += 0.01
        story.feed(
            ev.HealthFound(
                t=story.t, node=name, probe="storage", code="storage-hangs", verdict="suspect",
                kind="storage", device="/lustre", at=story.t, message="no answer for 30 s",
            )
        )  # fmt: skip
    story.t += 600.0
    story.hung()
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("storage_failed", "restart")


def restore_failed(story: Story, node: str) -> None:
    """One rank waits in vain for what it is to restore."""
    story.told().ranks_up()
    story.t += 1.0
    story.feed(
        ev.RestoreFailed(
            t=story.t, node=node, attempt=story.state.attempt, rank=0, step=40, of=1, why="n5: refused"
        )
    )  # fmt: skip


def test_an_image_that_does_not_come_is_tried_again_elsewhere_before_an_older_one_is_restored() -> None:
    story = Story(active=2, spares=2).running(50)
    story.failed(0, exit_code=-9)
    story.stopped()
    first = story.state.placement[0]
    restore_failed(story, first)
    story.stopped().backed_off()
    assert (story.incident.cause, story.incident.action, story.incident.node) == (
        "restore_failed",
        "restart",
        first,
    )
    assert story.state.failed_to_restore() == set()
    restore_failed(story, first)
    story.stopped().backed_off()
    assert story.incident.action == "swap"
    restore_failed(story, story.state.placement[1])
    story.stopped().backed_off()
    assert story.state.failed_to_restore() == {(40, 1)}
    assert "3 restores of step" in story.state.alerts[-1].message
    assert story.state.phase is Phase.LAUNCHING
    story.told().ranks_up()
    story.feed(ev.Restored(t=story.t, attempt=story.state.attempt, step=30, tier="memory", seconds=1.0))
    assert story.state.failed_to_restore() == {(40, 1)}
    story.feed(ev.Restored(t=story.t, attempt=story.state.attempt, step=40, tier="memory", seconds=1.0))
    assert story.state.failed_to_restore() == set(), "it can be had after all"


def restore_waits(story: Story, node: str, seconds: float, rank: int = 0) -> None:
    story.t += 30.0
    story.feed(
        ev.RestoreWaits(
            t=story.t, node=node, attempt=story.state.attempt, rank=rank, path="/lustre/x", seconds=seconds
        )
    )  # fmt: skip


def storage_hangs(story: Story, node: str) -> None:
    """A rank there gets no answer, for longer than is waited for."""
    if story.state.phase is Phase.LAUNCHING:
        story.told().ranks_up()
    for seconds in (30.0, WAIT_LIMIT_S - 1.0):
        restore_waits(story, node, seconds)
        assert story.state.phase is Phase.RUNNING
        assert "restores from /lustre/x" in story.state.alerts[-1].message
    restore_waits(story, node, WAIT_LIMIT_S)
    assert story.state.phase is Phase.STOPPING
    story.stopped().backed_off()


def test_a_restore_that_gets_no_answer_is_told_and_tried_again_then_elsewhere() -> None:
    story = Story(active=2, spares=2).allocated()
    first = story.state.placement[0]
    storage_hangs(story, first)
    told = (story.incident.cause, story.incident.action, story.incident.node)
    assert told == ("storage_failed", "restart", first)
    storage_hangs(story, first)
    assert story.incident.action == "swap"
    assert first not in story.state.placement
    for _ in range(10):
        storage_hangs(story, story.state.placement[0])
    assert story.state.phase is Phase.LAUNCHING, "people have hours to repair it"
    story.told().ranks_up().restored(40).stepped(60)
    assert (story.state.phase, story.state.incident) == (Phase.RUNNING, None)


def test_a_rank_is_waited_for_as_long_as_storage_may_take() -> None:
    assert within.RESTORE_TOLD_S == 30.0
    story = Story(active=2, spares=1).allocated().ranks_up()
    phases = []
    for seconds in (299.0, 300.0):
        restore_waits(story, story.state.placement[0], seconds)
        phases.append(story.state.phase)
    assert phases == [Phase.RUNNING, Phase.STOPPING]


def test_a_wait_that_has_ended_is_not_held_against_its_node() -> None:
    story = Story(active=2, spares=1).allocated().ranks_up()
    placed = story.state.placement
    restore_waits(story, placed[1], 290.0, rank=1)
    story.feed(ev.Restored(t=story.t, attempt=story.state.attempt, step=40, tier="shared", seconds=290.0))
    restore_waits(story, placed[0], 300.0)
    assert [node for node, *_ in story.state.findings.failures] == [placed[0]]


def test_where_several_nodes_get_no_answer_none_is_blamed() -> None:
    story = Story(active=2, spares=1).allocated().ranks_up()
    for _ in range(3):
        if story.state.phase is Phase.LAUNCHING:
            story.told().ranks_up()
        placed = story.state.placement
        restore_waits(story, placed[1], WAIT_LIMIT_S - 10.0, rank=1)
        restore_waits(story, placed[0], WAIT_LIMIT_S)
        story.stopped().backed_off()
        assert (story.incident.cause, story.incident.action) == ("storage_failed", "restart")
        assert story.state.placement == placed


def test_a_wait_that_was_over_long_ago_ends_nothing() -> None:
    story = Story(active=2, spares=1).running(50)
    restore_waits(story, story.state.placement[0], WAIT_LIMIT_S)
    assert (story.state.phase, story.state.alerts) == (Phase.RUNNING, [])


def test_an_attempt_that_the_journal_does_not_know_is_stopped_and_the_next_one_begins() -> None:
    """The journal's disk was full when the supervisor launched attempt 2, and then it died."""
    story = Story(active=2, spares=1).running()
    found = ev.AttemptFound(t=story.t, node=story.state.placement[0], attempt=2)
    story.feed(found)
    assert (story.last(StopWorkers).attempt, story.last(StopWorkers).nodes) == (2, story.state.placement)
    assert story.feed(found) == []
    story.stopped()
    assert (story.incident.cause, story.incident.charged) == ("relaunch_asked", "nobody")
    assert "the journal ends in attempt 1" in story.incident.evidence
    assert story.last(Launch).attempt == 3


def test_the_node_that_a_supervisor_left_behind_is_known() -> None:
    story = Story(active=2, spares=1).running()
    first = story.state.supervised_on
    assert story.state.abandoned == {}
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node=first))
    assert story.state.abandoned == {}, "its process was started again"
    left_at = story.t - 1.5
    story.feed(ev.SupervisorStarted(t=story.t, epoch=3, node="n3", silent_s=1.5))
    assert story.state.abandoned == {first: left_at}
    story.feed(ev.SupervisorStarted(t=story.t + 1.0, epoch=4, node="n2"))
    assert story.state.abandoned == {first: left_at, "n3": story.t + 1.0}, "who was quicker knew no more"
    comes_back(story, first)
    story.feed(ev.SupervisorStarted(t=story.t + 2.0, epoch=5, node="n3"))
    assert story.state.abandoned == {"n2": story.t + 2.0}


def taken_over(story: Story, *heard: str) -> None:
    """These nodes have come back to the new supervisor."""
    story.feed(ev.SupervisorStarted(t=story.t, epoch=story.state.epoch + 1, node=heard[0]))
    for name in heard:
        comes_back(story, name)


def comes_back(story: Story, name: str) -> None:
    known = story.state.nodes[name].incarnation
    story.feed(ev.NodeJoined(t=story.t, node=name, address=name, incarnation=known))


def host_died(story: Story, node: str) -> None:
    story.feed(ev.WorkersStopped(t=story.t, node=node, attempt=story.state.attempt, store_port=0))


def test_a_spare_of_which_a_supervisor_that_took_over_has_not_heard_is_not_swapped_in() -> None:
    """It may have been lost with the one before: whoever comes first takes the place."""
    story = Story(active=2, spares=2).running()
    one, other = story.state.placement
    unheard, heard = (name for name in story.state.nodes if name not in story.state.places)
    taken_over(story, one, other)
    story.lost(other)
    story.stopped()
    assert (story.state.phase, story.incident.action) == (Phase.WAITING, "swap")
    story.feed(ev.NodeLost(t=story.t, node=unheard, how="silent", silent_s=8.0, limit_s=8.0))
    assert story.state.phase is Phase.WAITING
    comes_back(story, heard)
    assert story.last(Launch).placement == (one, heard)


def test_a_node_whose_torchrun_host_starts_anew_is_better_than_a_requeue() -> None:
    """The spare that was to replace it is lost: it takes its own place again as soon as it is ready."""
    story = Story(active=2, spares=1).running()
    one, other = story.state.placement
    (spare,) = (name for name in story.state.nodes if name not in story.state.places)
    story.failed(1, exit_code=-9)
    host_died(story, other)
    story.stopped()
    assert spare in story.last(Launch).placement
    story.lost(spare)
    story.stopped()
    assert story.state.phase is Phase.WAITING, story.incident.reason
    story.feed(ev.NodeReady(t=story.t, node=other, store_port=1))
    story.backed_off()
    assert story.last(Launch).placement == (one, other)


def test_nodes_whose_hosts_start_anew_are_waited_for_although_some_are_ready_sooner() -> None:
    """The last node of a run that is nearly over is lost: the others had ended, and their hosts with them."""
    story = Story(active=3, spares=1).running()
    lost, *others = story.state.placement
    story.lost(lost)
    for node in others:
        host_died(story, node)
    for port, node in enumerate(others, 1):
        assert story.state.phase is Phase.WAITING, story.incident.reason
        story.feed(ev.NodeReady(t=story.t, node=node, store_port=port))
    assert set(story.last(Launch).placement) == {*story.state.nodes} - {lost}


def test_a_node_was_not_lost_before_a_step_that_it_took_part_in() -> None:
    story = Story(active=2, spares=1).running()
    stepped_at = story.t
    story.stepped(40)
    story.t += 2.0
    story.feed(ev.NodeLost(t=story.t, node=story.state.placement[1], how="silent", silent_s=5.0))
    assert story.incident.fault_at == story.state.stepped_at >= stepped_at
    assert story.incident.seconds()["detect"] < 5.0


def test_an_attempt_found_while_the_one_before_stops_is_stopped_as_well() -> None:
    story = Story(active=2, spares=1).running()
    story.lost(story.state.placement[0])
    other = story.state.placement[1]
    story.feed(ev.AttemptFound(t=story.t, node=other, attempt=2))
    assert (story.last(StopWorkers).attempt, story.last(StopWorkers).nodes) == (2, (other,))
    story.feed(ev.WorkersStopped(t=story.t, node=other, attempt=1, store_port=1))
    assert story.state.phase is Phase.STOPPING
    story.stopped()
    assert story.last(Launch).attempt == 3


def test_a_node_that_has_stopped_ranks_of_an_attempt_that_the_journal_lacks_can_be_used() -> None:
    story = Story(active=2, spares=0).submitted()
    started = ev.AllocationStarted(
        t=story.t, slurm_job="1", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=START
    )
    story.feed(started)
    story.join("n1")
    joined = ev.NodeJoined(
        t=story.t, node="n2", address="10.0.0.2", incarnation="n2-1", pid=1, boot_id="b", gpus=0
    )
    story.feed(joined)
    story.feed(ev.AttemptFound(t=story.t, node="n2", attempt=1))
    story.feed(ev.WorkersStopped(t=story.t, node="n2", attempt=1, store_port=29000))
    assert story.last(Launch).attempt == 2


def test_what_was_restored_from_storage_is_there_whoever_said_so_before() -> None:
    """A write that lost a node before it could say that it was done counts as failed, and was complete."""
    story = Story().allocated().ranks_up()
    assert story.state.saved_on(SHARED) == 0
    story.feed(ev.Restored(t=story.t, attempt=story.state.attempt, step=5, tier=SHARED, seconds=1.0))
    assert story.state.saved_on(SHARED) == 5
    story.feed(ev.Restored(t=story.t, attempt=story.state.attempt, step=9, tier=MEMORY, seconds=1.0))
    assert story.state.saved_on(SHARED) == 5


def test_who_takes_over_after_the_run_s_end_rules_in_its_own_epoch() -> None:
    """It still brings the newest checkpoint to storage: what was said of other writes is not of its own."""
    story = Story(active=2, spares=1).running().finished()
    assert story.state.phase is Phase.SUCCEEDED
    taken_over(story, "n3")
    assert (story.state.epoch, story.state.supervised_on) == (2, "n3")
