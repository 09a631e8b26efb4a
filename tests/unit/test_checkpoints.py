"""What is ordered when agents tell what they hold: commits, replicas, writes, restores."""

from __future__ import annotations

import pytest
from msgspec import structs

from jurymast.agent.storage_processes import failure_domain
from jurymast.core.checkpoints import replicas
from jurymast.core.checkpoints.agreement import NextSave
from jurymast.core.checkpoints.copies import RETRY_MAX_S, RETRY_S
from jurymast.core.checkpoints.replicas import REST_SHARE
from jurymast.core.checkpoints.writes import WRITE_LIMIT_S
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Launch, Record, Send
from jurymast.core.state.images import Copy, StateId
from jurymast.core.state.run import Phase, Role, TierState
from jurymast.core.supervision.machine import Supervision
from support.site import ACTIVE, Site
from support.stories import Story


def test_a_step_is_committed_with_the_last_rank_s_image_and_told_once() -> None:
    site = Site()
    site.hold(0)
    site.hold(1)
    assert site.saved("memory") == []
    site.hold(2)
    site.hold(2)
    assert site.saved("memory") == [(10, True)]
    told = next(e for e in site.events if isinstance(e, ev.Saved))
    assert (told.stall_s, told.size_bytes, told.copied) == (0.02, 300, False)


def test_only_own_parts_are_replicated_and_older_images_go_when_all_are() -> None:
    site = Site()
    site.save()
    orders = site.ordered(msg.Replicate)
    assert [(node, order.rank, order.part) for node, order in orders] == [
        ("s1", rank, "own") for rank in range(3)
    ]
    assert orders[0][1].sources[0].hosts == ("at-n1",)
    site.look()
    assert site.ordered(msg.Replicate) == []  # ordered already
    assert site.ordered(msg.Committed) == []
    site.replicas_made()
    assert sorted(node for node, _ in site.ordered(msg.Committed)) == ["n1", "n2", "n3", "s1"]
    assert site.saved("peer") == [(10, True)]


def copies_took(site: Site) -> list[float]:
    return [event.seconds for event in site.events if isinstance(event, ev.Saved) and event.tier == "peer"]


def test_how_long_replicas_take_of_a_restored_state_is_told_since_they_are_ordered() -> None:
    """Not since its save, which may be hours ago or unknown, nor since the choice, after which ranks take a
    while to start: the cadence would follow from that."""
    site = Site()
    site.save()
    site.time += 3600.0
    site.state.attempt, site.state.phase = 2, Phase.LAUNCHING
    site.choose(launch(*ACTIVE))
    site.time += 60.0
    site.state.attempt, site.state.phase = 1, Phase.RUNNING  # the images are of it
    site.look()
    site.time += 2.0
    site.replicas_made()
    assert copies_took(site) == [2.0]


def test_the_wait_before_a_replica_is_tried_again_is_no_time_that_copies_take() -> None:
    """One node was frozen for a second. The cadence stays: ranks would else lose more than `max_loss`."""
    site = Site()
    site.save()
    site.time += 3.0
    failed = msg.Unreplicated(step=10, attempt=1, rank=1, part="own", why="timed out")
    site.hear("s1", failed)
    for rank in (0, 2):
        site.hold(rank, "s1", tier="peer", part="own")
    site.time += RETRY_S + 0.1
    site.look()
    site.time += 0.5
    site.hold(1, "s1", tier="peer", part="own")
    site.look()
    assert copies_took(site) == pytest.approx([0.5])


def test_what_a_supervisor_finds_copied_when_it_takes_over_shows_not_how_long_copies_take() -> None:
    site = Site()
    site.state.saved["peer"] = TierState(seconds=3.0)
    site.joined("s1", copies=tuple(site.report(rank, 10, "peer", "own") for rank in range(3)))
    for rank, node in enumerate(ACTIVE):
        site.time += 3.5
        site.joined(node, copies=(site.report(rank),))
    site.look()
    assert (site.saved("peer"), copies_took(site)) == ([(10, True)], [0.0])
    assert site.state.saved["peer"].seconds == 3.0, "as it was measured last"


def test_of_thousands_of_nodes_some_are_looked_at_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SLICE_NODES", 1)
    site = Site(by_hand=True)
    for rank in range(3):
        site.hold(rank)  # the last one commits the step
    for rank in range(3):
        assert site.checkpoints.replicas.under_way
        site.slice()
        assert [order.rank for _, order in site.ordered(msg.Replicate)] == [rank]
    assert not site.checkpoints.replicas.under_way
    site.replicas_made()
    site.slice()
    site.lost("n2")  # before all were looked at
    assert not site.checkpoints.replicas.under_way
    assert site.ordered(msg.Committed) == []


def test_to_look_for_replicas_takes_a_tenth_of_the_time_at_most() -> None:
    site = Site(by_hand=True)
    site.save()
    site.slice(2.0)
    site.hold(0, "s1", tier="peer", part="own")
    site.time += 0.9 * REST_SHARE * 2.0
    site.look()
    assert not site.checkpoints.replicas.under_way
    site.time += 0.1 * REST_SHARE * 2.0
    site.look()
    assert site.checkpoints.replicas.under_way


def test_while_no_ranks_run_nobody_looks_for_what_is_missing() -> None:
    """There it would be done again at every look, just when there is most to do."""
    site = Site(by_hand=True)
    site.save()
    site.state.phase = Phase.STOPPING
    site.slice()
    assert not site.checkpoints.replicas.under_way
    site.lost("n2")
    site.look()
    assert not site.checkpoints.replicas.under_way
    assert site.ordered(msg.Replicate) == []


def test_older_images_stay_while_the_newer_ones_live_on_one_node_only() -> None:
    site = Site()
    site.save()
    site.replicas_made()
    site.save(20)
    site.lost("n2")
    assert not site.checkpoints.copies.restorable(StateId(20, 1))
    assert site.checkpoints.copies.restorable(StateId(10, 1))


def test_a_replica_that_could_not_be_made_is_ordered_again_later() -> None:
    site = Site()
    site.save()
    site.ordered(msg.Replicate)
    site.hear("s1", msg.Unreplicated(rank=1, step=10, attempt=1, part="own", why="x"))
    site.look()
    assert site.ordered(msg.Replicate) == []
    site.time += RETRY_S + 0.1
    site.look()
    assert [order.rank for _, order in site.ordered(msg.Replicate)] == [1]


def test_what_a_lost_or_damaged_holder_held_is_replicated_elsewhere() -> None:
    site = Site()
    site.save()
    site.ordered(msg.Replicate)
    site.replicas_made()
    site.state.nodes["s1"].role = Role.FAILED
    site.lost("s1")
    site.look()
    assert {node for node, _ in site.ordered(msg.Replicate)} <= set(ACTIVE)
    for rank in range(3):
        site.hold(rank, ACTIVE[(rank + 1) % 3], tier="peer", part="own")
    site.look()
    assert site.saved("peer") == [(10, True)]  # told once


def test_a_full_spare_is_replaced_by_partners() -> None:
    site = Site()
    site.hear("s1", msg.Refused(why="no room"))
    site.save()
    assert {node for node, _ in site.ordered(msg.Replicate)} <= set(ACTIVE)


def unreplicated(order: msg.Replicate, why: str) -> msg.Unreplicated:
    return msg.Unreplicated(step=order.step, attempt=order.attempt, rank=order.rank, part=order.part, why=why)


def test_a_pair_of_nodes_that_cannot_talk_costs_no_checkpoint() -> None:
    """The spare does not reach n3's data port: another node holds its replica, and saves go on."""
    site = Site()
    held_by = set()
    for at in range(10, 200, 10):
        site.save(at)
        for _ in range(20):
            for node, order in site.ordered(msg.Replicate):
                if order.rank == 2 and node == "s1":
                    site.hear(node, unreplicated(order, "n3: timed out"))
                else:
                    held_by |= {node} if order.rank == 2 else set()
                    site.hold(order.rank, node, at=order.step, tier="peer", part=order.part)
            site.time += 1.0
            site.look()
    assert held_by <= {"n1", "n2"}
    assert held_by
    committed = {message.step for _, message in site.ordered(msg.Committed)}
    assert committed == set(range(10, 200, 10)), "each lets agents free a slot"
    told = [e for e in site.events if isinstance(e, ev.Noted) and "has no replica" in e.message]
    assert 1 <= len(told) <= 4, "as often as they are given up"


def test_nothing_is_ordered_of_images_that_nobody_is_known_to_have() -> None:
    """A rank is about to restore it, say. That the order fails would count against who gets it."""
    site = Site()
    site.save()
    (node, order), *_ = site.ordered(msg.Replicate)
    asks = site.checkpoints.replicas.order
    assert asks(node, structs.replace(order, step=20, sources=())) == []
    known = structs.replace(order, step=20)
    assert asks(node, known) == [Send(node, known)], "that was no order"


class Memory:
    """Of each node: what replicas it holds, and how many it has room for."""

    def __init__(self, site: Site, **room: int) -> None:
        self.site, self.room = site, room
        self.steps: dict[str, list[int]] = {name: [] for name in (*ACTIVE, "s1")}
        self.committed: list[int] = []

    def save(self, at: int) -> list[str]:
        """Ranks save, and nodes do as they are told. Returns who refused a replica."""
        refused: list[str] = []
        self.site.save(at)
        while self.site.orders:
            orders, self.site.orders = self.site.orders, []
            for node, message in orders:
                steps = self.steps[node]
                if isinstance(message, msg.Committed):
                    steps[:] = [step for step in steps if step >= message.step]
                    self.committed.append(message.step)
                elif not isinstance(message, msg.Replicate):
                    pass
                elif len(steps) < self.room.get(node, 0):
                    steps.append(message.step)
                    self.site.hold(message.rank, node, at=message.step, tier="peer", part=message.part)
                else:
                    refused.append(node)
                    self.site.hear(node, msg.Refused(why="no room"))
                    self.site.hear(node, unreplicated(message, "no room"))
            self.site.look()
        return refused


def test_where_no_node_has_memory_for_replicas_saves_go_on_without() -> None:
    memory = Memory(Site())
    assert set(memory.save(10)) == {*ACTIVE, "s1"}
    assert [memory.save(at) for at in (20, 30)] == [[], []], "who holds nothing that goes is asked again"
    assert set(memory.committed) == {10, 20, 30}, "no slot comes free"
    assert memory.site.saved("peer") == []


def test_a_node_with_room_for_one_state_s_replicas_is_asked_again_when_the_older_ones_go() -> None:
    memory = Memory(Site(), s1=3)
    assert memory.save(10) == []
    for at in (20, 30):
        assert "s1" in memory.save(at)
        assert memory.steps["s1"] == [at] * 3
    assert memory.site.saved("peer") == [(10, True), (20, True), (30, True)]


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


def test_a_rank_that_skips_makes_the_step_void_and_is_told_once() -> None:
    site = Site()
    site.skip(20, 1)
    site.skip(20, 2)
    assert site.saved("memory") == [(20, False)]
    assert [node for node, _ in site.ordered(msg.Void)] == [*ACTIVE, "s1"]


def test_a_state_that_outgrew_its_node_starts_the_ranks_again() -> None:
    site = Site()
    site.skip(20, 1, within.Skip.REFUSED)
    assert [e.what for e in site.events if isinstance(e, ev.Asked)] == [ev.RELAUNCH]


def launch(*placement: str) -> Launch:
    return Launch(attempt=2, placement=placement, master_address="", master_port=0, reason="")


def test_the_restore_names_sources_with_addresses_and_is_journalled() -> None:
    site = Site()
    site.save()
    site.replicas_made()
    site.lost("n2")
    site.state.attempt = 2
    chosen = site.choose(launch("n1", "s1", "n3"))
    assert (chosen.step, chosen.tier, chosen.tiers) == (10, "memory", {"memory": 200, "peer": 100})
    message = site.checkpoints.restore.message("s1", range(1, 2))
    assert message is not None
    assert (message.step, message.attempt) == (10, 1)
    first = message.ranks[1][0]
    assert (first.tier, first.node, first.part, first.port) == ("peer", "s1", "own", 7)


def test_without_images_for_all_the_ranks_look_in_shared_storage() -> None:
    site = Site(replicas=0)
    site.save()
    site.lost("n2")
    chosen = site.choose(launch("n1", "s1", "n3"))
    assert chosen.tier == ""
    assert site.checkpoints.restore.message("n1", range(1)) is None
    # what agents still hold of the old step is not what the ranks will save under it
    assert not site.checkpoints.copies.in_memory(StateId(10, 1))


def test_where_no_copy_of_a_save_is_left_the_run_says_so_and_alerts() -> None:
    site = Site(replicas=0)
    assert site.choose(launch(*ACTIVE)).reason == "nothing was saved yet"
    site.save()
    site.lost("n2")
    site.state.attempt = 2
    for _ in range(2):  # the first does not get as far as its first step
        chosen = site.choose(launch("n1", "s1", "n3"))
        assert chosen.tier == ""
        assert chosen.reason == "no whole copy is left of step 10, which was the newest, or of an older one"
    told = ev.Restored(t=site.time, attempt=2, step=0, tier="", seconds=0.1)
    site.do([Record(told)])
    (alert,) = site.state.alerts
    assert alert.message == "the run goes on from step 0 instead of step 10: it is no longer there"


def test_going_back_drops_what_is_newer_wherever_it_comes_from() -> None:
    site = Site()
    site.save()
    site.answer(site.ordered(msg.Write))
    site.save(20)
    site.do(site.checkpoints.go_back(10, site.time))
    assert {node for node, _ in site.ordered(msg.ForgetNewer)} == {"n1", "n2", "n3", "s1"}
    site.save(30)  # ranks that have not stopped yet
    assert site.checkpoints.copies.newest_first() == [(10, 1)]
    assert site.choose(launch(*ACTIVE)).step == 10


def test_what_a_node_brings_back_of_an_earlier_attempt_is_not_committed() -> None:
    """Agents would give up the older state, which the ranks are just restoring."""
    site = Site()
    site.save(10)
    site.replicas_made(10)
    for rank in (0, 1):
        site.hold(rank, at=20)
    site.lost("n3")  # its image of step 20 is held, and nobody has heard of it
    site.state.attempt = 2
    assert site.choose(launch("n1", "n2", "s1")).step == 10
    report = msg.CopyReport(
        step=20, attempt=1, rank=2, world=3, tier="memory", part="all", size_bytes=100, common_bytes=60,
        common_id="same at 20",
    )  # fmt: skip
    site.ordered(msg.Committed)
    site.joined("n3", copies=(report,))
    site.look()
    assert site.saved("memory") == [(10, True)]
    assert site.ordered(msg.Committed) == []


def test_a_state_of_which_an_image_is_corrupt_everywhere_makes_room_for_the_next() -> None:
    site = Site(replicas=0)
    site.save(10)
    site.save(20)
    (copy,) = [copy for copy in site.checkpoints.copies.on("n2") if copy.step == 20]
    site.ordered(msg.Committed)
    site.hear("n2", msg.Dropped(copy=report_of(copy), why="its hash does not match"))
    site.look()
    assert {(message.step, message.attempt) for _, message in site.ordered(msg.Void)} == {(20, 1)}
    assert site.ordered(msg.Committed) == []
    assert site.saved("memory")[-1] == (20, False)
    site.save(30)
    assert site.saved("memory")[-1] == (30, True)


def report_of(copy: Copy) -> msg.CopyReport:
    return msg.CopyReport(
        tier=copy.tier, step=copy.step, attempt=copy.attempt, rank=copy.rank, world=copy.world,
        part=copy.part, size_bytes=copy.size_bytes, common_bytes=copy.common_bytes, common_id=copy.common_id,
    )  # fmt: skip


def test_an_agent_that_was_started_again_has_lost_its_images_and_writes_nothing() -> None:
    site = Site()
    site.save()
    site.replicas_made()
    assert site.saved("peer") == [(10, True)]
    site.ordered(msg.Replicate)
    site.joined("s1", incarnation="another")
    site.look()
    assert {node for node, _ in site.ordered(msg.Replicate)} == {"s1"}
    assert site.checkpoints.writes.any_under_way
    site.joined("n1", incarnation="another")
    assert not site.checkpoints.writes.any_under_way
    assert site.state.saved["shared"].error == "the agent of n1 restarted"
    assert {node for node, _ in site.ordered(msg.CancelWrite)} == {"n2", "n3"}


def test_a_rank_of_an_earlier_attempt_makes_no_step_of_this_one_void() -> None:
    site = Site()
    site.state.attempt = 2
    site.skip(20, 1, within.Skip.REFUSED, attempt=1)
    assert site.ordered(msg.Void) == []
    assert site.saved("memory") == []


def test_going_back_stops_every_node_that_writes_something_newer() -> None:
    site = Site()
    site.save(20)
    site.do(site.checkpoints.go_back(10, site.time))
    assert {node for node, _ in site.ordered(msg.CancelWrite)} == set(ACTIVE)
    assert not site.checkpoints.writes.any_under_way


def test_partners_are_chosen_by_the_switches_that_agents_tell() -> None:
    site = Site()
    for name, domain in {"n1": "spine.a", "n2": "spine.a", "n3": "spine.b", "s1": ""}.items():
        site.joined(name, domain=domain)
    site.hear("s1", msg.Refused(why="no room"))
    site.save()
    holders = {order.rank: node for node, order in site.ordered(msg.Replicate)}
    assert holders[0] == holders[1] == "n3"


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("spine.leaf1.n1", "switch.switch.node", "spine.leaf1"),
        ("n1.site", "node", ""),
        ("", "", ""),
    ],
)
def test_a_node_s_failure_domain_is_what_slurm_tells_of_its_switches(
    address: str, pattern: str, domain: str
) -> None:
    assert failure_domain(address, pattern) == domain


def test_a_supervisor_hears_from_the_ranks_what_storage_did_not_have() -> None:
    story = Story(active=2, spares=1).running()
    supervision = Supervision(story.state, "/runs/a", story.t)
    supervision.on_storage_read({StateId(10, 1): 9, StateId(20, 1): 9}, [], story.t)
    said = within.Restored(step=10, tier="shared", seconds=1.0, skipped=("step 20",))
    supervision.on_message("n1", 1, msg.RankEvent(attempt=2, event=said), story.t)
    assert set(supervision.checkpoints.writes.shared) == {(10, 1)}
