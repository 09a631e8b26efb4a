"""A run that loses more nodes than there are spares, and may go on with fewer: when it does, when it has all
again, and what is told of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jurymast.core.checkpoints.copies import RETRY_S as WRITE_AGAIN_S
from jurymast.core.run import size
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Launch, Record, Requeue, SaveFirst
from jurymast.core.state.run import Fewer, Phase, Role
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.core.supervision.growing import RETRY_S, Growing
from jurymast.journal import initial_state
from support.commands import RUN, Place
from support.site import Site
from support.stories import Story

THREE = Settings(nodes_min=3)


def started(*, spares: int = 0, settings: Settings = THREE) -> Story:
    return Story(active=4, spares=spares, settings=settings).running()


def lose(story: Story, *victims: str) -> None:
    for victim in victims:
        story.lost(victim)
    story.stopped()


def again(story: Story) -> None:
    """The ranks that were launched do new steps."""
    story.ranks_up()
    story.restored(10)
    story.stepped(20)


def shrunk(*, settings: Settings = THREE) -> Story:
    story = started(settings=settings)
    lose(story, story.state.placement[1])
    again(story)
    return story


def requeues(story: Story) -> bool:
    return any(isinstance(one, Requeue) for _, one in story.decisions)


# ---- fewer nodes


def test_a_run_goes_on_with_fewer_nodes_in_their_order() -> None:
    story = started()
    one, victim, three, four = story.state.placement
    lose(story, victim)
    assert story.last(Launch).placement == (one, three, four)
    assert story.incident.action == "shrink"
    assert story.incident.why.endswith("the run goes on with 3 of 4 nodes")
    assert not requeues(story)


def test_without_the_policy_it_is_requeued() -> None:
    story = started(settings=Settings())
    lose(story, story.state.placement[1])
    assert requeues(story)


def test_it_is_requeued_below_the_least_number() -> None:
    story = started()
    lose(story, *story.state.placement[:2])
    assert requeues(story)
    story = shrunk()
    lose(story, story.state.placement[0])
    assert requeues(story)


def test_a_spare_is_taken_first() -> None:
    story = started(spares=1)
    lose(story, story.state.placement[1])
    assert story.incident.action == "swap"
    assert len(story.last(Launch).placement) == 4


def test_what_spares_there_are_fill_some_places() -> None:
    story = started(spares=1)
    lost = story.state.placement[1:3]
    lose(story, *lost)
    assert story.incident.action == "shrink"
    assert len(story.last(Launch).placement) == 3
    assert not {*lost} & {*story.last(Launch).placement}


def test_a_run_that_may_get_a_node_holds_its_nodes_first() -> None:
    story = started(settings=Settings(nodes_min=3, refill=True, hold_s=100.0))
    lose(story, story.state.placement[1])
    story.wait(90.0)
    assert (story.state.phase, story.state.attempt) == (Phase.WAITING, 1)
    story.wait(11.0)
    assert len(story.last(Launch).placement) == 3
    assert "no node came in 100 s, the run goes on with 3 of 4 nodes" in story.incident.why


def test_a_node_with_a_bad_gpu_leaves_also_where_the_job_must_not_be_requeued() -> None:
    """The ranks of the others go on without it; it kept its ranks, as if nothing could be done."""
    story = Story(active=4, spares=0, settings=THREE, requeue=False).running()
    bad = story.state.placement[1]
    found = ev.HealthFound(
        t=story.t, node=bad, probe="nvidia", code="xid-79", verdict="bad", kind="hardware", message="gone",
        at=story.t, device="gpu0",
    )  # fmt: skip
    story.feed(found)
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("gpu_bad", "shrink")
    assert len(story.last(Launch).placement) == 3
    assert bad not in story.state.placement


def test_nothing_shrinks_while_slurm_ends_the_job() -> None:
    story = started()
    story.feed(ev.Signalled(t=story.t, signal="SIGTERM"))
    assert not size.may_shrink_to(story.state, 3)


def test_a_restart_of_fewer_nodes_keeps_their_number() -> None:
    story = shrunk()
    before = story.state.placement
    story.failed(0)
    story.stopped()
    story.backed_off()
    assert story.last(Launch).placement == before


# ---- all of them again


def came(story: Story, name: str = "n9") -> None:
    story.join(name)


def test_a_node_that_comes_is_taken_in_after_a_save() -> None:
    story = shrunk()
    growing = Growing(story.state)
    assert growing.on_time(story.t) == []
    came(story)
    grow = asked(growing.on_time(story.t))
    assert (grow.what, "n9" in grow.by) == (ev.GROW, True)
    assert growing.on_time(story.t + RETRY_S - 1.0) == []
    story.feed(grow)
    story.stopped()
    assert story.last(Launch).placement[3] == "n9"
    assert (story.incident.cause, story.incident.action) == ("grow_asked", "grow")
    assert story.incident.charged == "nobody"


def asked(effects: list[Effect]) -> ev.Asked:
    """What follows the save that is asked for."""
    record, first = effects
    assert isinstance(record, Record)
    assert isinstance(record.event, ev.Asked)
    assert record.event.what == "save"
    assert isinstance(first, SaveFirst)
    assert isinstance(first.then, ev.Asked)
    return first.then


def test_a_run_does_not_grow_while_it_could_not_bring_its_state_to_more_ranks() -> None:
    story = shrunk()
    came(story)
    assert size.can_grow(story.state)
    story.saved(20, tier="shared", ok=False)
    assert not size.can_grow(story.state)


def test_a_run_does_not_grow_by_a_node_that_was_blamed_or_is_drained() -> None:
    story = shrunk()
    came(story)
    story.feed(ev.NodeDraining(t=story.t, node="n9", why="kernel update"))
    assert not size.can_grow(story.state)


def test_a_node_that_was_lost_and_came_back_is_taken_in_when_it_has_stayed() -> None:
    story = started()
    victim = story.state.placement[1]
    lose(story, victim)
    again(story)
    story.join(victim)
    story.feed(ev.NodeReady(t=story.t, node=victim, store_port=1))
    assert story.state.nodes[victim].role is Role.SUSPECT
    assert not size.can_grow(story.state)
    story.wait(size.STAYED_S)
    assert size.can_grow(story.state)


def test_a_restart_takes_in_what_is_ready() -> None:
    story = shrunk()
    came(story)
    story.failed(0)
    story.stopped()
    story.backed_off()
    assert len(story.last(Launch).placement) == 4


# ---- the state of another number of ranks


def test_what_another_number_of_ranks_saved_is_brought_to_storage_before_it_is_restored() -> None:
    """From there any number of ranks restore it: here two, after the loss of the third one's node."""
    site = Site()
    site.save(10)
    site.replicas_made(10)
    site.answer(site.ordered(msg.Write))
    site.save(20)
    site.replicas_made(20)
    assert site.checkpoints.reshard(3, site.time) == ([], "")  # as many ranks have it in memory
    site.lost("n2")
    site.time += WRITE_AGAIN_S
    site.orders.clear()  # ended with the node
    for _ in range(2):
        effects, waits = site.checkpoints.reshard(2, site.time)
        assert waits == "the checkpoint of step 20, which is written for 2 ranks"
        site.do(effects)
        for node, order in site.ordered(msg.Replicate):  # the spare had a part of the lost rank's image
            site.hold(order.rank, node, at=20, tier="peer", part="all")
    site.answer(site.ordered(msg.Write))
    assert site.checkpoints.reshard(2, site.time) == ([], "")
    site.state.attempt = 2
    told = Launch(attempt=2, placement=("n1", "n3"), master_address="", master_port=1, reason="")
    chosen = site.choose(told)
    assert (chosen.tier, chosen.step) == ("shared", 20)


# ---- what is told


def test_the_time_with_fewer_nodes_is_noted() -> None:
    story = shrunk()
    first = story.state.fewer[0]
    assert (first.nodes, first.until) == (3, None)
    story.wait(60.0)
    came(story)
    story.feed(ev.Asked(t=story.t, what=ev.GROW, by="test"))
    assert story.state.fewer == [Fewer(3, first.since, story.t)]
    assert story.t - first.since > 60.0


def test_people_are_told_with_how_many_nodes_a_run_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.program("squeue", "echo RUNNING")
    story = Story(active=4, spares=0, settings=THREE, began_at=time.time() - 60.0).running()
    lose(story, story.state.placement[1])
    again(story)
    place.story(story)
    assert "goes on with 3 of 4 nodes" in place.good("status", RUN)
    assert "ran on 3 of 4 nodes for" in place.good("report", RUN)


@pytest.mark.parametrize("other", [{"tasks": True}, {"observed": True}, {"active": 3}])
def test_runs_of_tasks_and_those_without_a_margin_have_all_their_nodes(other: dict[str, object]) -> None:
    plan = started().plan
    assert initial_state(plan).nodes_min == 3
    assert initial_state(RunPlan.from_json({**plan.to_json(), **other})).nodes_min == 0
