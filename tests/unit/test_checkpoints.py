"""What is ordered when agents tell what they hold: commits, replicas, writes, restores."""

from __future__ import annotations

import pytest
from msgspec import structs

from jurymast.agent.storage_processes import failure_domain
from jurymast.core.checkpoints import replicas
from jurymast.core.checkpoints.copies import RETRY_S
from jurymast.core.checkpoints.replicas import REST_SHARE
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Record, Send
from jurymast.core.state.images import Copy, StateId
from jurymast.core.state.run import Phase, Role, TierState
from jurymast.core.supervision.machine import Supervision
from support.site import ACTIVE, Site, launch, unreplicated
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
