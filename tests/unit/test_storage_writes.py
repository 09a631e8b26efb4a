"""When committed steps are written to storage, by whom, and what they leave to be restored."""

from __future__ import annotations

import pytest

from jurymast.core.checkpoints.agreement import NextSave
from jurymast.core.checkpoints.copies import RETRY_MAX_S, RETRY_S
from jurymast.core.checkpoints.writes import WRITE_LIMIT_S
from jurymast.core.state import messages as msg
from jurymast.core.state.images import StateId
from support.site import ACTIVE, Site, launch, unreplicated


def test_a_committed_step_is_written_by_the_nodes_that_have_it_one_at_a_time() -> None:
    site = Site()
    site.save()
    writes = site.ordered(msg.Write)
    assert [(node, order.ranks, order.lead) for node, order in writes] == [
        ("n1", (0,), True), ("n2", (1,), False), ("n3", (2,), False),
    ]  # fmt: skip
    site.save(20)
    assert site.ordered(msg.Write) == []
    site.answer(writes)
    assert site.saved("shared") == [(10, True)]
    assert site.shared == {(10, 1): 150}
    site.look()
    assert {order.step for _, order in site.ordered(msg.Write)} == {20}


def test_a_failed_write_is_told_cancelled_everywhere_and_tried_again() -> None:
    site = Site()
    site.save()
    writes = site.ordered(msg.Write)
    site.answer(writes[1:2], why="no space left")
    assert site.saved("shared") == [(10, False)]
    assert site.state.saved["shared"].error == "n2: no space left"
    assert [node for node, _ in site.ordered(msg.CancelWrite)] == ["n1", "n3"]
    assert site.ordered(msg.Write) == []
    site.answer(writes[:1])  # too late
    assert site.saved("shared") == [(10, False)]
    site.time += RETRY_S + 0.1
    site.look()
    assert site.ordered(msg.Write)[0][1].step == 10


def test_an_image_that_ranks_have_replaced_meanwhile_says_nothing_of_the_storage_or_the_node() -> None:
    """Their newer one is written at once. If the same is said of the same state again, it is a failure."""
    site = Site()
    site.save()

    def gone(order: msg.Write) -> None:
        why = "the image of rank 1 is no longer here"
        site.hear("n2", msg.Written(id=order.id, tier=order.tier, ok=False, why=why, gone=True))

    (_, order), *_ = site.ordered(msg.Write)
    gone(order)
    assert [node for node, _ in site.ordered(msg.CancelWrite)] == ["n1", "n3"]
    assert site.saved("shared") == []
    site.look()
    (_, again), *_ = writes = site.ordered(msg.Write)
    assert {node for node, _ in writes} == {"n1", "n2", "n3"}
    gone(again)
    assert site.saved("shared") == [(10, False)]
    site.look()
    assert site.ordered(msg.Write) == []


def test_a_storage_that_goes_on_failing_is_tried_less_often_and_told_of_when_that_changes() -> None:
    site = Site()
    site.save()
    tries: list[float] = []

    def tried_until(end: float, why: str) -> None:
        while site.time < end:
            site.time += 1.0
            site.look()
            if writes := site.ordered(msg.Write):
                tries.append(site.time)
                place = f".writing-{len(tries):08d}.0{len(tries)}ab"
                site.answer(writes[len(tries) % 2 :], why=f"{why}, at {place}")

    site.answer(site.ordered(msg.Write), why="it hangs: its process was killed")
    tried_until(site.time + 3600.0, "it still hangs")
    assert 12 <= len(tries) <= 20
    assert site.saved("shared") == [(10, False)] * 2
    assert not site.secured()  # who waits for it, before the nodes go, does not wait long
    assert site.time - tries[-1] > RETRY_S
    site.answer(site.ordered(msg.Write), why="no space left")
    assert site.saved("shared") == [(10, False)] * 3
    site.time += RETRY_MAX_S
    site.look()
    site.answer(site.ordered(msg.Write))
    assert site.saved("shared")[-1] == (10, True)
    site.save(20)
    site.answer(site.ordered(msg.Write), why="no space left")
    site.time += RETRY_S
    site.look()
    assert len(site.ordered(msg.Write)) == 3  # after a success as at first
    assert site.saved("shared")[3:] == [(10, True), (20, False)]


@pytest.mark.parametrize("written", [True, False])
def test_who_has_written_its_share_may_be_lost(written: bool) -> None:
    site = Site()
    site.save()
    writes = site.ordered(msg.Write)
    site.answer(writes[1:] if written else writes[1:2])
    site.lost("n3")
    site.answer(writes[:1])
    assert site.saved("shared") == [(10, written)]


def test_a_lost_writer_and_an_endless_silence_end_a_write() -> None:
    site = Site()
    site.save()
    site.lost("n3")
    assert site.saved("shared") == [(10, False)]
    site = Site()
    site.save()
    site.time += WRITE_LIMIT_S + 1
    site.look()
    assert site.saved("shared") == [(10, False)]


def test_a_write_that_takes_much_longer_than_the_last_is_told_of_once() -> None:
    site = Site()
    site.save()
    writes = site.ordered(msg.Write)
    site.time += 10.0
    site.answer(writes)
    site.save(20)
    writes = site.ordered(msg.Write)
    for time_s in (44.0, 2.0, 50.0):  # 15 s and three times 10 s may pass
        site.time += time_s
        site.look()
    assert site.saved("shared") == [(10, True), (20, False)]
    assert site.state.saved["shared"].error == "not written after 46 s: the storage is slow or hangs"
    assert site.ordered(msg.CancelWrite) == []
    site.answer(writes)
    assert site.saved("shared")[-1] == (20, True)
    assert site.state.saved["shared"].failures == 0


def test_one_node_copies_what_is_on_shared_storage_to_the_object_store() -> None:
    site = Site(object_url="s3://bucket", object_every_s=60.0)
    site.save()
    assert {order.tier for _, order in site.ordered(msg.Write)} == {"shared"}
    site.checkpoints.on_storage_read({StateId(5, 1): 900}, [], site.time)
    site.look()
    ((node, order),) = site.ordered(msg.Write)
    assert (node, order.tier, order.step, order.ranks) == ("n1", "object", 5, ())
    site.answer([(node, order)], why="is it up?")
    assert site.state.saved["object"].failures == 1
    site.time += 60.0
    site.look()
    site.answer(site.ordered(msg.Write))
    assert site.saved("object") == [(5, False), (5, True)]


def with_slow_writes() -> Site:
    """A write takes 5 s, and the next one is due; ranks save every 4 s, and have saved step 20."""
    site = Site(replicas=0, shared_every_s=10.0)
    site.save()
    writes = site.ordered(msg.Write)
    site.time += 5.0
    site.answer(writes)
    site.save(20)
    assert site.ordered(msg.Write) == []
    site.time += 5.1
    return site


def test_a_write_that_takes_longer_than_from_save_to_save_begins_just_after_one() -> None:
    """Otherwise it would still have a slot when the save after the next one needs that."""
    site = with_slow_writes()
    site.next_save = NextSave(latest=20, in_s=0.5, every_s=4.0)
    site.look()
    assert site.ordered(msg.Write) == []
    site.next_save = NextSave(latest=30, in_s=3.9, every_s=4.0)  # which is not whole yet
    site.look()
    assert site.ordered(msg.Write) == []
    site.save(30)
    assert {order.step for _, order in site.ordered(msg.Write)} == {30}


@pytest.mark.parametrize(
    ("in_s", "every_s", "waited_s"),
    [(0.5, 4.0, 4.1), (1.1, 4.0, 0.0), (0.1, 6.0, 0.0), (3.5, 2.0, 0.0)],
    ids=["it waits no longer", "there is time enough", "writes are fast enough", "no time is right"],
)
def test_a_write_that_is_due_waits_for_nothing_else(in_s: float, every_s: float, waited_s: float) -> None:
    site = with_slow_writes()
    site.time += waited_s
    site.next_save = NextSave(latest=20, in_s=in_s, every_s=every_s)
    site.look()
    assert {order.step for _, order in site.ordered(msg.Write)} == {20}


def test_a_copy_to_local_disks_waits_for_the_next_save_as_well() -> None:
    """It has no pause after the last one: it waits at most for a save from then on."""
    site = Site(replicas=0, shared_every_s=3600.0, local_path="/scratch")
    site.save()
    writes = site.ordered(msg.Write)
    site.time += 5.0
    site.next_save = NextSave(latest=10, in_s=0.5, every_s=4.0)
    site.save(20)
    site.answer([(node, order) for node, order in writes if order.tier == "shared"])
    site.answer([(node, order) for node, order in writes if order.tier == "local"])
    site.look()
    assert site.ordered(msg.Write) == []
    site.time += 4.1
    site.look()
    assert {(order.tier, order.step) for _, order in site.ordered(msg.Write)} == {("local", 20)}


def test_before_the_nodes_go_the_newest_step_gets_to_storage_put_together_where_needed() -> None:
    site = Site(shared_every_s=3600.0)
    site.save()
    site.answer(site.ordered(msg.Write))
    site.save(20)
    site.replicas_made(20)
    assert site.ordered(msg.Write) == []  # not due
    site.ordered(msg.Replicate)
    site.lost("n2")
    assert not site.secured()
    (holder, order), *rest = site.ordered(msg.Replicate)
    assert (order.rank, order.part, rest) == (1, "all", [])
    site.hear(holder, unreplicated(order, "x"))
    assert not site.secured()
    assert site.ordered(msg.Replicate) == []
    site.time += RETRY_S + 0.1
    assert not site.secured()
    assert len(site.ordered(msg.Replicate)) == 1
    site.hold(1, holder, at=20, tier="peer")
    assert not site.secured()
    site.answer(site.ordered(msg.Write))
    assert site.secured()
    assert (20, 1) in site.shared


def test_what_the_ranks_passed_over_on_storage_does_not_stand_for_newer_states() -> None:
    site = Site(replicas=0)
    for at in (10, 20):
        site.save(at)
        site.answer(site.ordered(msg.Write))
        site.time += 60.0
    site.lost("n2")
    site.state.attempt = 2
    chosen = site.choose(launch("n1", "s1", "n3"))
    assert (chosen.tier, chosen.step) == ("shared", 20)
    site.checkpoints.on_restored(2, 20, "shared")
    assert set(site.shared) == {(10, 1), (20, 1)}
    site.checkpoints.on_restored(2, 10, "memory")  # nobody has looked at storage
    assert set(site.shared) == {(10, 1), (20, 1)}
    site.checkpoints.on_restored(2, 10, "shared")  # 20 is corrupt
    assert set(site.shared) == {(10, 1)}
    assert site.secured()
    site.state.placement = ("n1", "s1", "n3")
    for rank, node in enumerate(site.state.placement):
        site.hold(rank, node, at=15)
    assert site.checkpoints.unsaved() == "the checkpoint of step 15"
    assert not site.secured()
    site.answer(site.ordered(msg.Write))
    assert site.secured()
    assert set(site.shared) == {(10, 1), (15, 2)}


def test_what_all_ranks_saved_to_storage_themselves_is_restored_before_what_is_older_in_memory() -> None:
    site = Site()
    site.save(10)
    site.state.attempt = 2
    site.checkpoints.on_saved_together(StateId(30, 2), 300)
    assert site.checkpoints.unsaved() == ""
    chosen = site.choose(launch("n1", "s1", "n3"))
    assert (chosen.tier, chosen.step, chosen.tiers) == ("shared", 30, {"shared": 300})


def test_a_save_that_was_rolled_back_meanwhile_does_not_count() -> None:
    site = Site()
    site.do(site.checkpoints.go_back(10, site.time))
    site.checkpoints.on_saved_together(StateId(30, 1), 300)
    assert site.shared == {}


def test_what_could_not_be_restored_from_memory_does_not_hold_newer_states_up() -> None:
    site = Site()
    site.save(30)
    site.state.attempt = 2
    assert site.choose(launch(*ACTIVE)).tier == "memory"
    site.checkpoints.on_restored(2, 10, "shared")
    site.save(20)
    assert site.saved("memory") == [(30, True), (20, True)]


def test_nothing_is_waited_for_when_nothing_would_be_lost() -> None:
    assert Site().secured()
