"""What the keeper's machine decides where two things happen at once."""

from __future__ import annotations

import pytest

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import Buffer, RankSlots, SlotState
from jurymast.core.state import messages as msg
from jurymast.core.state.images import PEER, ImageId, StateId
from support.keeper_model import WANTS, KeeperNode, Waiting


def trained(steps: int = 1) -> KeeperNode:
    """A node whose only rank, number 0, has saved so many steps, each of them held."""
    node = KeeperNode(0, count=1)
    node.free = 1 << 40
    node.launch(None, [0])
    node.want(0, WANTS[0])
    node.quiet()
    for step in range(1, steps + 1):
        assert node.save(0, step)
        node.quiet()
    return node


def answer_one(node: KeeperNode, kind: type[Waiting]) -> None:
    """Only this is answered: what else waits goes on waiting."""
    others = [one for one in node.waiting if not isinstance(one, kind)]
    node.waiting = [one for one in node.waiting if isinstance(one, kind)]
    assert node.waiting, f"nothing is asked that {kind.__name__} answers"
    node.answer(quietly=True)
    node.waiting += others


def kinds(node: KeeperNode) -> list[type[Waiting]]:
    return [type(one) for one in node.waiting]


def steps_held(node: KeeperNode) -> list[int]:
    return sorted(copy.image[0] for copy in node.served)


def test_an_older_safe_image_stays_until_all_ranks_have_restored_the_newer() -> None:
    node = trained()
    node.commit(StateId(1, 1))
    assert node.save(0, 2)
    node.quiet()
    node.launch(StateId(2, 1), [0])
    node.quiet()
    assert node.ranks[0].restore == "ready"
    assert steps_held(node) == [1, 2], "another node may fail to bring step 2"
    node.launch(StateId(1, 1), [0])
    node.quiet()
    assert node.ranks[0].found == (1, 1, 0)
    node.want(0, WANTS[0])  # only a rank that goes on asks, and no rank goes on before all can
    assert steps_held(node) == [1]
    node.quiet()
    assert node.save(0, 3)


def test_what_was_saved_for_a_rank_that_is_elsewhere_now_goes_unless_it_is_safe() -> None:
    node = trained(2)
    node.commit(StateId(2, 1))
    assert node.save(0, 3)
    node.quiet()
    node.may_go = lambda copy: copy.image.step == 3  # which is not safe
    node.act(node.machine.on_launch(2, [1], node.world, None, 0.0))
    assert steps_held(node) == [2]


def test_a_base_that_is_given_up_while_it_is_made_ready_is_nobody_elses() -> None:
    """Its slot is the rank's again only when nobody writes the manifest there any more."""
    node = trained()
    node.launch(StateId(1, 1), [0])
    answer_one(node, do.Verify)
    while do.Measure in kinds(node):
        answer_one(node, do.Measure)
    assert kinds(node) == [do.Fetch]
    node.may_go = lambda copy: True
    node.act(node.machine.on_order(msg.Void(step=1, attempt=1)))
    (view,) = [view for view in node.ranks[0].slots if view.buffer == node.waiting[0].buffer]  # type: ignore[union-attr]
    assert not view.mine
    node.quiet()
    assert node.ranks[0].restore == "failed"
    assert view.buffer not in {buffer.number for buffer in node.machine.memory.idle}
    assert sum(view.mine for view in node.ranks[0].slots) == 2


def test_a_replica_that_is_given_up_while_it_is_verified_for_a_restore_is_not_lost() -> None:
    node = KeeperNode(0, count=1)
    node.free = 1 << 40
    node.launch(None, [0])
    node.states = [StateId(5, 1)]
    order = msg.Replicate(step=5, attempt=1, rank=0, part="own", sources=node.sources(0))
    node.act(node.machine.on_order(order))
    node.quiet()
    assert [copy.tier for copy in node.served] == [PEER]
    node.launch(StateId(5, 1), [0])
    assert kinds(node) == [do.Verify]
    node.may_go = lambda copy: True
    node.act(node.machine.on_order(msg.Void(step=5, attempt=1)))
    node.quiet()  # the machine's check would find the buffer that nobody has
    assert node.ranks[0].found == (5, 1, 0)


def replicate(node: KeeperNode, step: int) -> None:
    order = msg.Replicate(step=step, attempt=1, rank=2, part="own", sources=node.sources(2))
    node.asked.add((ImageId(step, 1, 2), "own"))
    node.act(node.machine.on_order(order))


@pytest.mark.parametrize("order", [msg.Committed(step=6, attempt=1), msg.Void(step=5, attempt=1)])
def test_a_replica_of_what_is_passed_is_not_made(order: msg.KeeperOrder) -> None:
    node = trained()
    replicate(node, 5)
    node.may_go = lambda copy: True
    node.act(node.machine.on_order(order))
    node.asked.clear()
    node.quiet()
    assert 5 not in steps_held(node)
    assert not node.replicated


def test_free_slots_make_room_for_others_images_when_the_nodes_are_about_to_go() -> None:
    node = trained()
    node.free = 0
    order = msg.Replicate(step=5, attempt=1, rank=2, part="all", sources=node.sources(2))
    node.act(node.machine.on_order(order))
    node.quiet()
    assert steps_held(node) == [1]
    node.ranks[0].slots[0].writing = node.ranks[0].slots[1].writing = True
    node.act(node.machine.on_order(msg.GiveSlotsUp()))
    node.act(node.machine.on_order(order))
    node.quiet()
    assert steps_held(node) == [1], "its rank is writing there"
    node.ranks[0].slots[0].writing = node.ranks[0].slots[1].writing = False
    node.act(node.machine.on_order(msg.GiveSlotsUp()))
    node.act(node.machine.on_order(order))
    node.quiet()
    assert steps_held(node) == [1, 5]


def test_older_replicas_make_room_for_what_a_rank_restores() -> None:
    """A spare that was full of replicas gets a rank."""
    node = KeeperNode(0, count=1)
    node.free = 1 << 40
    older = [*range(1, 9)]
    node.states = [StateId(step, 1) for step in (*older, 9)]
    for step in (*older, 9):
        replicate(node, step)
        node.quiet()
    assert steps_held(node) == [*older, 9]
    node.free = sum(taken for _, taken in node.buffers.values())
    node.launch(StateId(9, 1), [0])
    node.quiet()
    assert node.ranks[0].restore == "ready"
    assert steps_held(node) == [9, 9], "the newest is for others to restore"


def test_what_was_given_up_and_is_ordered_again_is_made() -> None:
    node = trained()
    replicate(node, 5)
    node.act(node.machine.on_order(msg.Void(step=5, attempt=1)))
    replicate(node, 5)
    node.quiet()
    assert node.replicated == 1
    assert not node.asked


def test_an_image_that_is_not_whole_in_its_own_memory_is_had_from_another_node() -> None:
    """A launch names nobody else for it: they are asked for when it turns out to be damaged."""
    node = trained()
    (held,) = [copy for copy in node.served if copy.image == (1, 1, 0)]
    node.attempt += 1
    restore = msg.Restore(step=1, attempt=1, ranks={0: ()})
    node.ranks[0].number = 0
    node.may_go = lambda copy: copy is held
    node.act(node.machine.on_launch(node.attempt, [0], node.world, restore, 0.0))
    (verify,) = [one for one in node.waiting if isinstance(one, do.Verify)]
    node.waiting.remove(verify)
    node.may_go = lambda copy: copy is held
    node.act(node.machine.on_copy_verified(verify.number, False))
    assert kinds(node) == [msg.AskSources]
    node.quiet()
    assert node.ranks[0].restore == "ready"
    assert node.ranks[0].found == (1, 1, 0)


def test_a_restore_that_waits_to_hear_who_else_has_it_ends_with_its_attempt() -> None:
    node = trained()
    node.launch(StateId(7, 1), [0])  # nobody here has it
    node.waiting.clear()
    node.attempt += 1
    restore = msg.Restore(step=7, attempt=1, ranks={0: ()})
    node.act(node.machine.on_launch(node.attempt, [0], node.world, restore, 0.0))
    assert msg.AskSources in kinds(node)
    node.launch(StateId(1, 1), [0])
    late = msg.Sources(step=7, attempt=1, rank=0, sources=node.sources(0))
    node.act(node.machine.on_order(late))
    node.waiting = [one for one in node.waiting if not isinstance(one, msg.AskSources)]
    node.quiet()
    assert node.ranks[0].found == (1, 1, 0)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_restore_waits_for_the_stopped_one_that_still_works_on_its_image(attempts: int) -> None:
    """It must not look elsewhere for what this node has."""
    node = trained()
    node.launch(StateId(1, 1), [0])
    assert kinds(node) == [do.Verify]
    for _ in range(attempts):
        node.launch(StateId(1, 1), [0])
        assert kinds(node) == [do.Verify]
    node.quiet()
    assert node.ranks[0].restore == "ready"
    assert node.ranks[0].found == (1, 1, 0)


def test_a_restore_of_another_image_waits_for_no_stopped_one() -> None:
    node = trained(2)
    node.launch(StateId(1, 1), [0])
    node.launch(StateId(2, 1), [0])
    assert kinds(node) == [do.Verify, do.Verify]
    node.quiet()
    assert node.ranks[0].found == (2, 1, 0)


def test_a_slot_with_just_the_memory_that_is_wanted_lacks_none() -> None:
    mine = RankSlots(0)
    for slot in mine.slots:
        slot.state, slot.buffer = SlotState.FREE, Buffer(1, 100)
    assert mine.lacking(100) == []
    assert mine.lacking(101) == mine.slots
