"""How a supervisor leaves: not before the newest checkpoint is on storage, if that can be had."""

from __future__ import annotations

from dataclasses import replace

from jurymast.core.checkpoints.checkpoints import GATHER_LIMIT_S
from jurymast.core.checkpoints.copies import INTERRUPTED_S, RETRY_S
from jurymast.core.judges.silence import LIMIT_MAX_S
from jurymast.core.nodes.acknowledgement import Disk
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskSuperseded, Effect, GiveWay, Send, WhyEnding
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import Phase, TierState
from jurymast.core.supervision.departure import KILL_WAIT_S, RESERVE_S, SPARED_S, TELL_EVERY_S
from support.site import Site
from support.stories import Story
from support.successor import Successor, image, sent_home, written


def requeued() -> tuple[Story, str, str]:
    """A node of three is lost, and there is no spare: the story, and the two that are left."""
    story = Story(active=3, spares=0).running()
    one, other, out = story.state.placement
    story.lost(out)
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    return story, one, other


def test_a_successor_waits_for_what_agents_hold_before_it_lets_them_go() -> None:
    """The one before it died while the newest checkpoint was on its way: it is in memory only."""
    story, one, other = requeued()
    after = Successor(story)
    assert AskSuperseded() not in after.effects
    effects = [*after.joins(one, copies=(image(0),)), *after.waits(0.5)]
    assert (written(effects), sent_home(effects)) == ({}, False)
    orders = written([*after.joins(other, copies=(image(1),)), *after.waits(0.5)])
    assert {node: order.ranks for node, order in orders.items()} == {one: (0,), other: (1,)}
    id = orders[one].id
    for phase in list(msg.WritePhase)[1:-1]:
        assert not sent_home(after.waits(0.5))
        after.hears(one, msg.WriteReached(id=id, phase=phase))
        if phase is msg.WritePhase.ANNOUNCE:
            after.hears(other, msg.WriteReached(id=id, phase=phase))
    for node in (other, one):
        assert not sent_home(after.waits(0.5))
        after.hears(node, msg.Written(id=id, tier="shared", ok=True, size_bytes=9, why=""))
    assert sent_home(after.waits(0.1))


def test_who_never_comes_is_not_waited_for_longer_than_at_any_take_over() -> None:
    story, one, _ = requeued()
    after = Successor(story)
    after.joins(one, copies=(image(0),))
    effects = after.waits(LIMIT_MAX_S)
    assert sent_home(effects)
    assert story.state.phase is Phase.REQUEUED


def test_another_writes_what_a_node_that_is_lost_meanwhile_has_not_written() -> None:
    story, one, other = requeued()
    after = Successor(story)
    after.joins(one, copies=(image(0), image(1, "peer")))
    effects = after.joins(other, copies=(image(1),))
    assert set(written([*effects, *after.waits(0.1)])) == {one, other}
    orders = written(after.waits(LIMIT_MAX_S, beating=(one,)))
    assert orders[one].ranks == (0, 1)
    after.hears(one, msg.Written(id=orders[one].id, tier="shared", ok=True, size_bytes=18, why=""))
    effects = after.waits(2.0, beating=())
    assert sent_home(effects)
    assert "lost" not in " ".join(text for _, text in story.state.notes)


def test_a_node_that_is_lost_while_slurm_ends_the_job_is_not_waited_for() -> None:
    """It counts against nobody then; but another is to write what it has not written."""
    story = Story(active=2, spares=1).running()
    after = Successor(story)
    one, other = story.state.placement
    (spare,) = story.state.nodes.keys() - {one, other}
    after.joins(spare, copies=(image(1, "peer"),))
    after.joins(one, ranks="running", attempt=1, copies=(image(0),))
    effects = after.joins(other, ranks="running", attempt=1, copies=(image(1),))
    assert set(written(effects)) == {one, other}
    (asks,) = [one for one in after.machine.on_sigterm(story.t) if isinstance(one, WhyEnding)]
    after.machine.on_end_explained(asks, "preempted", "", story.t)
    orders = written(after.waits(LIMIT_MAX_S, beating=(one, spare)))
    assert {node: order.ranks for node, order in orders.items()} == {one: (0,), spare: (1,)}
    assert not story.state.incidents


def test_agents_do_not_leave_before_the_journal_is_written() -> None:
    """What it lacks, only they could tell another supervisor. But they are not kept for ever."""
    story = Story(active=2, spares=0).running()
    one, other = story.state.placement
    after = Successor(story)
    for node in (one, other):
        after.joins(node, ranks="running", attempt=1)
        effects = after.hears(node, msg.Finished(attempt=1))
    assert story.state.phase is Phase.SUCCEEDED
    assert not sent_home([*effects, *after.waits(2 * TELL_EVERY_S, unwritten=True)])
    assert "the journal is not on shared storage" in " ".join(text for _, text in story.state.notes)
    assert after.machine.departure.lacks_journal, "it may be written into the reserve now"
    assert sent_home(after.waits(0.1))


def has_finished() -> Successor:
    story = Story(active=2, spares=0).running()
    after = Successor(story)
    for node in story.state.placement:
        after.joins(node, ranks="running", attempt=1)
        after.hears(node, msg.Finished(attempt=1))
    return after


def test_agents_that_another_supervisor_has_by_now_are_not_sent_away() -> None:
    """It was cut off from some of them, and they would be gone for the one that has taken over."""
    after = has_finished()
    after.superseded = True
    effects = after.waits(1.0)
    assert GiveWay() in effects
    assert not sent_home(effects)


def test_agents_leave_without_an_answer_when_slurm_ends_the_job() -> None:
    after = has_finished()
    after.superseded = None
    assert AskSuperseded() in (effects := after.waits(1.0))
    assert not sent_home(effects)
    effects = [*after.machine.on_sigterm(after.story.t), *after.waits(0.1)]
    assert sent_home(effects)
    assert after.machine.on_superseded(False, after.story.t) == []
    assert after.machine.on_superseded(True, after.story.t) == [GiveWay()]


def test_the_reserve_is_not_for_the_journal_while_a_checkpoint_is_waited_for_as_well() -> None:
    """Others would take what is given up, and the outcome needs some of it."""
    story, one, other = requeued()
    after = Successor(story)
    for rank, node in enumerate((one, other)):
        after.joins(node, copies=(image(rank),))
    assert not sent_home(after.waits(1.0, unwritten=True))
    assert not after.machine.departure.lacks_journal


def test_a_journal_that_cannot_be_written_is_not_waited_for_until_slurm_kills_the_job() -> None:
    story = Story(active=2, spares=0).running()
    after = Successor(story)
    for node in story.state.placement:
        after.joins(node, ranks="running", attempt=1)
    (asks,) = [one for one in after.machine.on_sigterm(story.t) if isinstance(one, WhyEnding)]
    after.machine.on_end_explained(asks, "preempted", "", story.t, 60.0)
    assert not sent_home(after.waits(60.0 - RESERVE_S - 1.0, unwritten=True))
    assert sent_home(after.waits(2.0, unwritten=True))


def preempted_with_grace() -> tuple[Successor, str, str]:
    """Slurm leaves the job a minute, and nothing was saved: all nodes are told to leave, but for one that has
    been away for so long that it would be lost at any other time."""
    story = Story(active=2, spares=0).running()
    one, other = story.state.placement
    after = Successor(story)
    after.joins(one, ranks="running", attempt=1)
    after.joins(other, ranks="running", attempt=1)
    after.machine.on_connection_closed(other, 2, story.t)
    (asks,) = [one for one in after.machine.on_sigterm(story.t) if isinstance(one, WhyEnding)]
    after.machine.on_end_explained(asks, "preempted", "", story.t, 60.0)
    assert sent_home(after.waits(LIMIT_MAX_S, beating=(one,)))
    return after, one, other


def test_an_agent_that_joins_when_all_others_were_told_to_leave_is_told_as_well() -> None:
    """With what is left of the time that ranks have for what they do at a SIGTERM."""
    after, _, other = preempted_with_grace()
    (order,) = orders_to_leave([*after.joins(other, ranks="running", attempt=1), *after.waits(0.1)])
    assert 60.0 - LIMIT_MAX_S - RESERVE_S - 1.0 < order.grace_s <= 60.0 - RESERVE_S


def orders_to_leave(effects: list[Effect]) -> list[msg.Leave]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in sent if isinstance(message, msg.Leave)]


def test_what_an_agent_tells_as_it_joins_is_written_before_it_leaves() -> None:
    """It was away when the others were told. Nobody else knows it, and the run goes on elsewhere."""
    after = has_finished()
    after.superseded, other = None, after.nodes[1]
    assert AskSuperseded() in after.waits(1.0)
    story = after.story
    behind, written_all = Disk(appended=1), Disk(appended=1, written=1)
    assert after.machine.on_superseded(False, story.t, behind) == []
    assert not sent_home(after.waits(5.0, unwritten=True))
    assert AskSuperseded() in after.waits(0.1), "another may have taken over meanwhile"
    assert len(orders_to_leave(after.machine.on_superseded(False, story.t, written_all))) == 2
    after.machine.on_connection_closed(other, 2, story.t)
    assert not orders_to_leave([*after.joins(other), *after.waits(0.3, unwritten=True)])
    assert len(orders_to_leave(after.waits(0.1))) == 1
    assert not orders_to_leave(after.waits(0.3)), "once"


def test_a_node_that_is_lost_once_it_was_told_to_leave_is_not_waited_for() -> None:
    after, one, _ = preempted_with_grace()
    assert AskSuperseded() not in after.waits(LIMIT_MAX_S, beating=(one,))
    assert AskSuperseded() in after.waits(LIMIT_MAX_S, beating=())


def test_a_checkpoint_that_does_not_get_to_storage_is_told_of() -> None:
    story, one, other = requeued()
    after = Successor(story)
    for rank, node in enumerate((one, other)):
        after.joins(node, copies=(image(rank),))
    assert not sent_home(after.waits(62.0))
    assert "the storage is slow or hangs" in story.state.saved["shared"].error


def test_people_are_told_now_and_then_why_the_nodes_are_still_kept() -> None:
    story, one, other = requeued()
    after = Successor(story)
    for rank, node in enumerate((one, other)):
        after.joins(node, copies=(image(rank),))
    after.waits(2.5 * TELL_EVERY_S)
    told = [text for _, text in story.state.notes if "the nodes are kept" in text]
    assert [text.partition(" without progress: ")[2][:45] for text in told] == [
        "the checkpoint of step 8 is not on shared sto" for _ in range(2)
    ]


def test_what_failed_is_told_with_its_step_which_may_be_an_older_one() -> None:
    story, one, other = requeued()
    after = Successor(story)
    story.state.saved["shared"] = TierState(failures=1, error="node n2 was lost", failed_step=4)
    for rank, node in enumerate((one, other)):
        after.joins(node, copies=(image(rank),))
    after.waits(1.5 * TELL_EVERY_S)
    told = [text for _, text in story.state.notes if "the nodes are kept" in text]
    assert told[0].endswith("step 8 is not on shared storage (step 4: node n2 was lost)"), told


def test_of_a_run_that_has_ended_nobody_is_waited_for_when_slurm_starts_its_job_again() -> None:
    story = Story(active=2, spares=1).running().finished()
    assert story.state.ended
    story.allocated("n7", "n8", "n9", restarts=1)
    assert AskSuperseded() in Successor(story).waits(0.1)


def test_a_supervisor_that_hears_of_a_newer_one_sends_the_other_agents_there_and_goes() -> None:
    """Its storage hangs, so that neither it nor they see that; half of the nodes each have no checkpoint."""
    story = Story(active=2, spares=1).running()
    one, other, third = story.state.nodes
    after = Successor(story)
    for node in (one, other, third):
        after.joins(node)
    epoch = story.state.epoch
    old = Endpoint(epoch, (one,), 7, one, "17.0", 1)
    assert GiveWay() not in after.hears(one, msg.HangsUp(newer=old)), "it is this one"
    newer = replace(old, epoch=epoch + 1)
    effects = after.hears(other, msg.HangsUp(newer=newer))
    assert [one for one in effects if isinstance(one, Send)] == [Send(third, msg.Moved(place=newer))]
    assert effects[-1] == GiveWay()


def with_an_unsaved_state() -> Site:
    """Step 10 is on storage, step 20 is in memory, with its replicas."""
    site = Site(shared_every_s=3600.0)
    site.save()
    site.answer(site.ordered(msg.Write))
    site.save(20)
    site.replicas_made(20)
    site.ordered(msg.Replicate)
    return site


def test_before_the_nodes_go_those_that_had_no_memory_for_more_are_asked_once_more() -> None:
    """The memory of what ranks would write next serves as well then."""
    site = with_an_unsaved_state()
    for node in ("n1", "n3", "s1"):
        site.hear(node, msg.Refused(why="no memory"))
    site.lost("n2")
    assert not site.secured()
    assert {node for node, _ in site.ordered(msg.GiveSlotsUp)} == {"n1", "n3", "s1"}
    (_, order), *_ = site.ordered(msg.Replicate)
    assert (order.rank, order.part) == (1, "all")
    for node in ("n1", "n3", "s1"):
        assert not site.checkpoints.final_write.secured
        site.hear(node, msg.Refused(why="no memory"))
        site.secured()
    assert site.secured(), "asked again for ever"
    assert site.ordered(msg.GiveSlotsUp) == []


def test_older_states_give_way_to_the_newest_when_no_node_has_memory_to_put_any_together() -> None:
    """Of two states a spare has all ranks' own parts, and the node that is left the common part."""
    site = Site(shared_every_s=3600.0)
    for at in (10, 20):
        for rank in range(3):
            site.hold(rank, at=at)
            site.hold(rank, "s1", at=at, tier="peer", part="own")
    for node in ("n1", "n2"):
        site.lost(node)
    site.time += RETRY_S + 0.1
    site.orders.clear()
    for _ in range(2):  # the second time once 10 is found to have no room either
        while not (orders := site.ordered(msg.Replicate)):
            site.time += RETRY_S
            assert not site.secured()
        assert {order.step for _, order in orders} == {20}
        assert {node for node, _ in site.ordered(msg.GiveSlotsUp)} == {"n3", "s1"}
        for node, order in orders:
            no = msg.Unreplicated(step=20, attempt=1, rank=order.rank, part=order.part, why="no memory")
            site.hear(node, msg.Refused(why="no memory"))
            site.hear(node, no)
    given_up = {node: order.step for node, order in site.ordered(msg.Committed)}
    assert given_up == {"n3": 20, "s1": 20}
    site.secured()
    assert site.secured(), "asked again for ever"


def test_who_has_both_parts_of_an_image_writes_it_and_needs_no_memory() -> None:
    """A partner has replicas of the own parts, and the common part with its own images."""
    site = Site(shared_every_s=3600.0)
    site.save()
    for rank in range(3):
        site.hold(rank, "n3", tier="peer", part="own")
    for node in ("n1", "n2", "s1"):
        site.lost(node)
    site.time += RETRY_S + 0.1
    site.orders.clear()
    assert not site.secured()
    ((node, order),) = site.orders
    assert isinstance(order, msg.Write)
    assert (node, order.ranks, order.lead) == ("n3", (0, 1, 2), True)


def test_an_image_that_one_node_cannot_put_together_is_put_together_by_another() -> None:
    """It does not reach who has the parts, say."""
    site = with_an_unsaved_state()
    site.lost("n2")
    tried = []
    for _ in range(3):
        site.secured()
        ((holder, order),) = site.ordered(msg.Replicate)
        tried.append(holder)
        site.hear(holder, msg.Unreplicated(step=20, attempt=1, rank=1, part=order.part, why="timed out"))
        site.time += RETRY_S
    assert sorted(tried) == ["n1", "n3", "s1"]


def test_a_lost_node_delays_the_last_write_by_a_second_only() -> None:
    """Storage has not failed, and Slurm may kill the job soon. A partner has all that the node wrote."""
    site = Site(shared_every_s=3600.0)
    site.save()
    for rank in range(3):
        site.hold(rank, "s1", tier="peer", part="own")
    assert not site.secured()
    assert {node for node, _ in site.ordered(msg.Write)} == {"n1", "n2", "n3"}
    site.hold(2, "n1", tier="peer", part="all")
    site.lost("n3")
    site.secured()
    assert not site.ordered(msg.Write), "others may be lost in the same moment"
    site.time += INTERRUPTED_S
    site.secured()
    assert {node: order.ranks for node, order in site.ordered(msg.Write)} == {"n1": (0, 2), "n2": (1,)}


def test_what_one_node_cannot_write_others_do_before_the_nodes_go() -> None:
    """Its storage is not mounted, say: they have its image brought to them."""
    site = with_an_unsaved_state()
    assert not site.secured()
    first, *_ = site.ordered(msg.Write)
    assert (first[0], first[1].lead) == ("n1", True)
    site.answer([first], why="it is not mounted")
    site.time += RETRY_S + 0.1
    assert not site.secured()
    assert site.ordered(msg.Write) == []
    ((holder, order),) = site.ordered(msg.Replicate)
    assert (order.rank, order.part) == (0, "all")
    assert holder != "n1"
    site.hold(0, holder, at=20, tier="peer")
    site.secured()
    orders = site.ordered(msg.Write)
    assert {node: order.lead for node, order in orders if order.lead} == {holder: True}
    assert "n1" not in dict(orders)
    site.answer(orders)
    assert site.secured()


def where_one_node_cannot_write() -> tuple[Site, str, msg.Replicate]:
    """With the node that is to get what that one has, and the order for it."""
    site = with_an_unsaved_state()
    assert not site.secured()
    first, *_ = site.ordered(msg.Write)
    site.answer([first], why="it is not mounted")
    assert not site.secured()
    ((holder, order),) = site.ordered(msg.Replicate)
    assert isinstance(order, msg.Replicate)
    return site, holder, order


def test_what_one_node_cannot_write_is_with_others_at_once() -> None:
    """Slurm's SIGKILL may come within the pause that storage has after a failure: what others lack they get
    meanwhile, and write it as soon as they have it. After a second node's failure storage has its pause."""
    site, holder, order = where_one_node_cannot_write()
    assert order.rank == 0
    site.hold(0, holder, at=20, tier="peer")
    assert not site.secured()
    orders = site.ordered(msg.Write)
    assert {node for node, _ in orders} == {holder, "n2", "n3"}
    site.answer([one for one in orders if one[0] == "n3"], why="it is not mounted")
    for rank in range(3):
        site.hold(rank, "s1", at=20, tier="peer")
    assert not site.secured()
    assert site.ordered(msg.Write) == []
    site.time += RETRY_S + 0.1
    assert not site.secured()
    assert {node for node, _ in site.ordered(msg.Write)} == {"n2", "s1"}


def test_a_report_that_crosses_the_order_to_give_it_up_is_not_believed() -> None:
    """The node has the order by the time at which its report is read, and says nothing of what it drops."""
    site, holder, order = where_one_node_cannot_write()
    site.save(30)
    site.replicas_made(30)
    assert holder in dict(site.ordered(msg.Committed))
    site.hold(order.rank, holder, at=20, tier="peer")
    assert [copy for copy in site.checkpoints.copies.every() if copy.step == 20] == []


def test_after_a_warning_others_write_at_once_what_one_node_could_not() -> None:
    site = with_an_unsaved_state()
    site.hold(0, "s1", at=20, tier="peer")
    site.do(site.checkpoints.hasten(site.time))
    first, *_ = site.ordered(msg.Write)
    assert first[0] == "n1"
    site.answer([first], why="it is not mounted")
    site.look()
    assert {node: order.ranks for node, order in site.ordered(msg.Write)} == {
        "s1": (0,), "n2": (1,), "n3": (2,),
    }  # fmt: skip


def test_who_could_not_write_is_asked_again_when_nobody_can_take_its_images() -> None:
    """As soon as that is known, or after a while."""
    site = Site(replicas=0, shared_every_s=3600.0)
    site.save()
    for why in ("no room here", "no room there"):
        site.secured()
        site.answer([one for one in site.ordered(msg.Write) if one[0] == "n1"], why)
        site.time += RETRY_S + 0.1
        site.secured()
        ((holder, order),) = site.ordered(msg.Replicate)
        assert site.ordered(msg.Write) == []
        if why == "no room here":
            site.hear(holder, msg.Unreplicated(step=10, attempt=1, rank=0, part="all", why="no"))
    site.secured()
    assert site.ordered(msg.Write) == [], "it is not known yet"
    site.time += GATHER_LIMIT_S
    site.secured()
    assert {node for node, _ in site.ordered(msg.Write)} == {"n1", "n2", "n3"}


def test_slurm_is_asked_again_why_the_job_ends_and_the_run_ends_as_it_says() -> None:
    story = Story(active=2, spares=0).running()
    after = Successor(story)
    for node in story.state.placement:
        after.joins(node)
    (asks,) = [one for one in after.machine.on_sigterm(story.t) if isinstance(one, WhyEnding)]
    effects = after.machine.on_end_explained(asks, "unknown", "", story.t)
    assert not sent_home(effects)
    effects = after.waits(3.0)
    assert not sent_home(effects)
    assert effects.count(WhyEnding()) == 1
    effects = after.machine.on_end_explained(asks, "timeout", "", story.t)
    assert story.state.phase is Phase.FAILED
    assert sent_home([*effects, *after.waits(0.1)])


def test_training_goes_on_if_slurm_neither_ends_the_job_nor_says_why_it_would() -> None:
    story = Story(active=2, spares=0).running()
    after = Successor(story)
    for node in story.state.placement:
        after.joins(node)
    (asks,) = [one for one in after.machine.on_sigterm(story.t) if isinstance(one, WhyEnding)]
    after.machine.on_end_explained(asks, "unknown", "", story.t)
    assert not sent_home(after.waits(KILL_WAIT_S + SPARED_S + 1.0))
    assert not after.machine.departure.begun
    assert not after.machine.watch.ending
    assert story.state.phase is Phase.RUNNING


def test_a_job_that_goes_on_changes_nothing_for_a_run_that_leaves_by_itself() -> None:
    departure = Successor(requeued()[0]).machine.departure
    assert departure.begun
    departure.on_revoked()
    assert departure.begun


def test_a_run_that_has_left_its_nodes_cannot_go_back_when_the_job_goes_on() -> None:
    after = Successor(Story(active=2, spares=0).running())
    for node in after.story.state.placement:
        after.joins(node)
    departure = after.machine.departure
    departure.on_sigterm(after.story.t)
    departure.on_explained("preempted", None, after.story.t)
    after.waits(0.5)
    assert departure.leaving
    departure.on_revoked()
    assert departure.leaving
