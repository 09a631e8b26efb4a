"""The keeper and its own ranks: slots, what is held and what is not, and restores from this node's memory."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jurymast.agent.io import Phases
from jurymast.agent.keeping import Keeping
from jurymast.core.keeper.holding import ROUND_BYTES, SLOTS
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ImageId
from jurymast.core.state.messages import Room
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import RestoreStatus, SlotWord, Word
from jurymast.keeper.memory import MappedBuffer
from jurymast.storage.orders import Answer, StorageFailed
from support.keepers import (
    BLOCK,
    COMMON_BYTES,
    SIZE,
    FakeRank,
    flip,
    holding,
    image_bytes,
    keeper,
    plan,
    ready_rank,
    run,
    saved,
    settled,
    source,
    until,
    use_small_blocks,
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


def test_a_buffer_is_sealed_touched_and_leaves_nothing() -> None:
    buffer = MappedBuffer(3 << 20)
    assert buffer.capacity == 2 * ROUND_BYTES
    assert buffer.allocated == 0
    buffer.map[5] = 7
    buffer.reserve(0, buffer.capacity)
    assert buffer.allocated == buffer.capacity
    assert buffer.map[5] == 7
    for size in (0, 2 * buffer.capacity):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(buffer.descriptor, size)
    descriptor = buffer.descriptor
    buffer.close()
    buffer.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


async def test_an_image_is_hashed_held_and_told() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        assert rank.answer is RestoreStatus.ELSEWHERE
        slot = rank.save(10)
        one.image_published(0, slot, 0.25)
        (message,) = await until("word of it", lambda: told.of(msg.Held))
        (copy,) = message.copies
        assert (copy.step, copy.attempt, copy.rank, copy.world) == (10, 1, 0, 1)
        assert (copy.tier, copy.part, copy.size_bytes, copy.stall_s) == (
            "memory",
            "all",
            SIZE,
            0.25,
        )
        assert copy.common_bytes == COMMON_BYTES
        assert len(copy.common_id) == 32
        assert one.inventory() == (copy,)
        one.look()
        assert len(told.of(msg.Held)) == 1


async def test_a_held_slot_is_never_written_and_the_committed_one_stays() -> None:
    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        first = await saved(one, rank, 10)
        one.obey(msg.Committed(step=10, attempt=1))
        second = await saved(one, rank, 20)
        assert {first, second} == {0, 1}
        assert rank.writable() == []
        one.obey(msg.Committed(step=10, attempt=1))  # again: nothing newer is safe
        assert rank.writable() == []
        one.obey(msg.Committed(step=20, attempt=1))
        assert rank.writable() == [first]
        one.obey(msg.Committed(step=10, attempt=1))  # late: the newest stays
        assert [copy.step for copy in one.inventory()] == [20]


async def test_a_freed_slot_waits_for_its_readers() -> None:
    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        first = await saved(one, rank, 10)
        lent = one.copies.acquire(ImageId(10, 1, 0))
        assert lent is not None
        assert one.copies.acquire(ImageId(10, 1, 0)) is lent
        assert one.copies.acquire(ImageId(10, 2, 0)) is None
        await saved(one, rank, 20)
        one.obey(msg.Committed(step=20, attempt=1))
        assert one.copies.acquire(ImageId(10, 1, 0)) is None  # nobody new
        one.copies.release(lent)
        await settled(one)
        assert rank.writable() == []
        assert Path(lent.path).read_bytes()[:SIZE] == image_bytes(10, 0)
        image = memoryview(Path(lent.path).read_bytes())
        assert lent.manifest.with_blocks(image) == lent.manifest
        one.copies.release(lent)
        await until("slot", lambda: rank.writable() == [first])


@pytest.mark.parametrize("scarce", [False, True])
async def test_a_storage_process_reads_a_copy_where_memory_allows_and_no_slot_stays_busy(
    scarce: bool,
) -> None:
    limit = Room(1 << 40, "plenty")
    async with keeper(room=lambda: limit) as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        first = await saved(one, rank, 10)
        if scarce:
            limit = Room(0, "a small node")
        loan = await one.lend(10, 1, 0)
        assert loan is not None
        assert await one.lend(10, 2, 0) is None
        await saved(one, rank, 20)
        one.obey(msg.Committed(step=20, attempt=1))
        await settled(one)
        assert rank.writable() == ([] if scarce else [first])
        assert Path(loan.path).read_bytes()[:SIZE] == image_bytes(10, 0)
        image = memoryview(Path(loan.path).read_bytes())
        assert loan.manifest.with_blocks(image) == loan.manifest
        loan.give_back()
        await until("slot", lambda: rank.writable() == [first])


async def test_an_image_in_two_parts_is_lent_as_it_lies() -> None:
    """A replica of another rank's own part, and the common part, which this node's rank has as well, as a
    spare has not."""

    async with holding("a", 0, 2) as (a, _), holding("b", 1, 2) as (b, told), keeper("c") as (c, too):
        order = msg.Replicate(step=10, attempt=1, rank=0, part="own", sources=(source(a, 0),))
        b.obey(order)
        c.obey(order)
        replica = (10, 1, 0, "peer", "own")
        await until("the replicas", lambda: replica in told.held() and replica in too.held())
        loan = await b.lend(10, 1, 0)
        assert loan is not None
        assert Path(loan.common_path).read_bytes()[:COMMON_BYTES] == image_bytes(10, 0)[:COMMON_BYTES]
        assert Path(loan.path).read_bytes()[COMMON_BYTES:SIZE] == image_bytes(10, 0)[COMMON_BYTES:]
        assert loan.manifest.image == (10, 1, 0)
        loan.give_back()
        assert await c.lend(10, 1, 0) is None


@pytest.mark.parametrize("during", ["the question for memory", "the copy"])
def test_a_loan_that_is_cancelled_gives_nothing_away_that_a_thread_still_uses(
    monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    written: list[MappedBuffer] = []
    copying = MappedBuffer.copy

    def halted() -> None:
        reached.set()
        assert go_on.wait(120)

    def room() -> Room:
        if during == "the question for memory" and asking:
            halted()
        return Room(1 << 40, "plenty")

    def copy(target: MappedBuffer, source: MappedBuffer, start: int, end: int) -> None:
        written.append(target)
        if during == "the copy":
            halted()
        copying(target, source, start, end)

    asking: list[bool] = []
    monkeypatch.setattr(MappedBuffer, "copy", copy)

    async def work() -> None:
        async with keeper(room=room) as (one, _):
            one.launch(1, [0], 1, None)
            rank = await ready_rank(one)
            first = await saved(one, rank, 10)
            asking.append(True)
            lending = asyncio.ensure_future(one.lend(10, 1, 0))
            await until("the thread", reached.is_set)
            lending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lending
            if during == "the copy":
                other = await one.borrow(SIZE, "the next who asks")
                assert written
                assert other not in written
                assert other is not None
                one.give_back(other)
            asking.clear()
            go_on.set()
            await saved(one, rank, 20)
            one.obey(msg.Committed(step=20, attempt=1))
            await until("the slot", lambda: rank.writable() == [first])
            await until("its copy", lambda: one.machine.memory.idle)

    try:
        run(work())
    finally:
        go_on.set()


async def test_images_of_dead_ranks_void_steps_and_other_ranks_are_not_held() -> None:
    async with keeper() as (one, told):
        one.launch(2, [0], 1, None)
        rank = await ready_rank(one)
        rank.save(10, attempt=1)
        one.look()
        await until("free slots", lambda: len(rank.writable()) == SLOTS)
        rank.save(10, 3, attempt=2)  # not this slot's rank
        one.look()
        await until("free slots", lambda: len(rank.writable()) == SLOTS)
        assert "another image's" in told.of(msg.Dropped)[0].why
        one.obey(msg.Void(step=20, attempt=2))
        rank.save(20, attempt=2)
        one.look()
        await until("free slots", lambda: len(rank.writable()) == SLOTS)
        await saved(one, rank, 30, attempt=2)
        one.obey(msg.Void(step=30, attempt=2))
        assert len(rank.writable()) == SLOTS
        assert one.inventory() == ()
        assert [held[0] for held in told.held()] == [30]


async def test_what_a_killed_rank_left_is_mended() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        rank.begin(rank.writable()[0])  # and dies in it
        one.look()
        one.launch(2, [0], 1, plan(10, 1, {0: [source(one, 0, tier="memory")]}))
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        assert rank.restored()[0] == image_bytes(10, 0)
        assert len(rank.writable()) == 1
        assert all(slot[SlotWord.SEQ] % 2 == 0 for slot in rank.slots)
        (word,) = told.of(msg.Prefetched)
        assert word.tiers == {"memory": SIZE}
        assert word.passed_over == ()
        await saved(one, rank, 20, attempt=2)
        one.obey(msg.Committed(step=20, attempt=2))
        assert len(rank.writable()) == 1
        assert [copy.step for copy in one.inventory()] == [20]


async def test_an_older_safe_image_stays_until_the_newer_one_that_was_restored_is_safe() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        older = await saved(one, rank, 10)
        one.obey(msg.Committed(step=10, attempt=1))
        await saved(one, rank, 20)
        one.launch(2, [0], 1, plan(20, 1, {0: [source(one, 0, tier="memory")]}))
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        one.look()
        assert [copy.step for copy in one.inventory()] == [10, 20]
        rank.want(SIZE + 4096)
        one.look()
        assert [copy.step for copy in one.inventory()] == [10, 20], "if the node is lost now, 20 is too"
        assert rank.writable() == []
        one.obey(msg.Committed(step=20, attempt=1))
        assert [copy.step for copy in one.inventory()] == [20]
        assert not told.of(msg.Dropped)
        assert rank.writable() == [older]


async def test_an_older_image_that_is_not_safe_stays_until_all_have_restored() -> None:
    """Another node may find that its image of the newer one is damaged."""

    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        older = await saved(one, rank, 10)
        await saved(one, rank, 20)
        one.launch(2, [0], 1, plan(20, 1, {0: [source(one, 0, tier="memory")]}))
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        assert [copy.step for copy in one.inventory()] == [10, 20]
        one.launch(3, [0], 1, plan(10, 1, {0: [source(one, 0, tier="memory")]}))
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        assert rank.restored()[0] == image_bytes(10, 0)
        rank.want(SIZE + 4096)
        one.look()
        assert [copy.step for copy in one.inventory()] == [10]
        await until("the other slot", lambda: rank.writable() == [1 - older])


async def test_the_same_step_of_two_attempts_is_not_mixed() -> None:
    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10, data=b"1" * SIZE)
        one.launch(2, [0], 1, plan(10, 1, {0: [source(one, 0)]}))
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        await saved(one, rank, 10, attempt=2, data=b"2" * SIZE)
        assert {(copy.step, copy.attempt) for copy in one.inventory()} == {(10, 1), (10, 2)}
        one.obey(msg.Committed(step=10, attempt=2))
        one.launch(3, [0], 1, plan(10, 1, {0: [source(one, 0)]}))
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.answer is RestoreStatus.FAILED


async def test_ranks_that_restore_nothing_from_memory_leave_images_there_until_they_have_started() -> None:
    """A node that is away may come back with the rest of the state before that."""

    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        one.obey(msg.Committed(step=10, attempt=1))
        one.launch(2, [0], 1, None)
        assert [copy.step for copy in one.inventory()] == [10]
        rank.want(SIZE)
        one.look()
        assert one.inventory() == ()
        assert len(rank.writable()) == SLOTS


async def test_an_image_that_does_not_hold_what_it_says_is_dropped() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        for word, value in ((SlotWord.MANIFEST, 5), (SlotWord.IMAGE, 1 << 40), (SlotWord.MANIFEST, -1)):
            number = rank.writable()[0]
            before = rank.slots[number][SlotWord.SEQ]
            rank.save(10)
            rank.slots[number][word] = value
            one.look()
            await until("free", lambda number=number: number in rank.writable())  # type: ignore[misc]
            assert rank.slots[number][SlotWord.SEQ] == before + 2
        assert one.inventory() == ()
        assert len(told.of(msg.Dropped)) == 3


async def _small_then_large(one: Keeper) -> tuple[FakeRank, int]:
    one.launch(1, [0], 1, None)
    rank = await ready_rank(one)
    held = await saved(one, rank, 10)
    rank.want(8 << 20)
    one.look()
    await until("larger slot", lambda: any(slot[SlotWord.CAPACITY] >= 8 << 20 for slot in rank.slots))
    return rank, held


async def test_a_rank_that_grows_gets_larger_slots_but_not_in_place_of_what_is_held() -> None:
    async with keeper() as (one, _):
        rank, held = await _small_then_large(one)
        assert rank.slots[held][SlotWord.CAPACITY] == ROUND_BYTES
        with rank.map(held) as place:
            assert place[:SIZE] == image_bytes(10, 0)
        generation = rank.slots[held][SlotWord.GENERATION]
        await saved(one, rank, 20)
        one.obey(msg.Committed(step=20, attempt=1))
        assert rank.writable() == [held]
        assert rank.slots[held][SlotWord.CAPACITY] == 8 << 20
        assert rank.slots[held][SlotWord.GENERATION] != generation


async def test_a_slot_that_is_being_written_is_not_replaced() -> None:
    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        rank.begin(0)
        descriptor = rank.slots[0][SlotWord.FD]
        rank.want(8 << 20)
        one.look()
        await until("larger slot", lambda: rank.slots[1][SlotWord.CAPACITY] == 8 << 20)
        assert rank.slots[0][SlotWord.FD] == descriptor
        assert rank.slots[0][SlotWord.CAPACITY] == ROUND_BYTES


async def test_ranks_that_change_nodes_leave_their_images_for_others() -> None:
    """The node gets other ranks: what it holds is still served, and its slots are the new ranks'."""

    async with keeper("a", 2) as (one, _):
        one.launch(1, [0, 1], 2, None)
        ranks = [await ready_rank(one, local) for local in (0, 1)]
        for local, rank in enumerate(ranks):
            await saved(one, rank, 10, local, world=2)
        one.obey(msg.Committed(step=10, attempt=1))
        one.launch(2, [1, 0], 2, plan(10, 1, {0: [source(one, 0)], 1: [source(one, 1)]}))
        for local, rank in enumerate(ranks):
            await until("restore", lambda rank=rank: rank.answer is RestoreStatus.READY)  # type: ignore[misc]
            assert rank.restored()[0] == image_bytes(10, 1 - local)
        for local, rank in enumerate(ranks):
            again = await ready_other_slot(one, rank)
            await saved(one, again, 20, 1 - local, attempt=2, world=2)
        one.obey(msg.Committed(step=20, attempt=2))
        assert {copy.step for copy in one.inventory()} == {20}


async def ready_other_slot(one: Keeper, rank: FakeRank) -> FakeRank:
    rank.want(SIZE + 4096)
    one.look()
    await until("a slot", rank.writable)
    return rank


async def test_a_flipped_bit_in_memory_is_found_at_restore() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        flip(one, ImageId(10, 1, 0), 3 * BLOCK + 5)
        one.launch(2, [0], 1, plan(10, 1, {0: [source(one, 0, tier="memory")]}))
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.answer is RestoreStatus.FAILED
        assert "corrupt" in told.of(msg.Dropped)[0].why
        assert "corrupt" in told.of(msg.Unrestorable)[0].why
        assert one.inventory() == ()
        await ready_rank(one)  # the memory is not lost


async def test_a_flipped_bit_in_memory_is_found_by_reading_again() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        (copy,) = one.copies
        await one.gathering.read_again(copy)
        assert told.of(msg.Dropped) == []
        flip(one, ImageId(10, 1, 0), SIZE - 1)
        one.spawn(one.gathering.scrub(every_s=0.0))
        (word,) = await until("word of it", lambda: told.of(msg.Dropped))
        assert "own part is corrupt in memory" in word.why
        assert word.copy.step == 10
        await until("free slots", lambda: len(rank.writable()) == SLOTS)


def put_local(root: Path, data: bytes, one: Keeper, key: ImageId) -> Path:
    """As a storage process lays it out."""
    step, attempt, rank = key
    folder = root / f"step-{step:08d}.a{attempt:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / f"rank-{rank:05d}.image"
    image.write_bytes(data)
    image.with_suffix(".manifest").write_bytes(one.copies.find(key)[0].manifest_bytes)
    return image


@dataclass
class Finds:
    """Storage that reads an image, and finds it damaged, or cannot read it."""

    damaged: bool

    async def write(self, order: msg.Write, loans: list[Loan], phases: Phases) -> Answer:
        return StorageFailed(why="no", damaged=order.ranks[0] if self.damaged else -1)


@pytest.mark.parametrize(
    ("flipped", "found"),
    [(True, True), (True, False), (False, True)],
    ids=["damage", "inability", "a copy's"],
)
async def test_an_image_that_a_storage_process_finds_damaged_is_read_again_at_once(
    flipped: bool, found: bool
) -> None:
    """The process may have read a copy of it, so what it says is no proof."""
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        await saved(one, await ready_rank(one), 10)
        (copy,) = one.copies
        copy.verified_at = 0.0
        if flipped:
            flip(one, ImageId(10, 1, 0), SIZE - 1)
        ended: list[str] = []
        storage: Any = Finds(found)
        keeping = Keeping(one, storage, lambda message: None, lambda id, phase: None, ended.append)
        keeping.write(msg.Write(id="7", tier="shared", step=10, attempt=1, ranks=(0,), world=1))
        await until("end", lambda: ended)
        if found:
            await until("another look", lambda: copy.verified_at or told.of(msg.Dropped))
        await settled(one)
        assert ["corrupt in memory" in word.why for word in told.of(msg.Dropped)] == [True] * (
            flipped and found
        )


async def test_an_image_on_disk_that_a_storage_process_finds_damaged_counts_no_more(tmp_path: Path) -> None:
    async with keeper(local_root=tmp_path) as (one, told):
        one.launch(1, [0], 1, None)
        await saved(one, await ready_rank(one), 10)
        put_local(tmp_path, image_bytes(10, 0), one, ImageId(10, 1, 0))
        one.scan_local(tmp_path)
        await until("the copy on disk", lambda: one.copies.find(ImageId(10, 1, 0), ("local",)))
        one.obey(msg.Void(step=10, attempt=1))
        loan = await one.lend(10, 1, 0)
        assert loan is not None
        loan.doubt()
        loan.give_back()
        assert [(word.copy.tier, word.why) for word in told.of(msg.Dropped)] == [
            ("local", "its bytes on disk are not what was hashed")
        ]


async def test_images_on_the_local_disk(tmp_path: Path) -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        image = put_local(tmp_path, image_bytes(10, 0), one, ImageId(10, 1, 0))
        half = (
            put_local(tmp_path, image_bytes(10, 0)[:-1], one, ImageId(10, 1, 0)).parent / "rank-00001.image"
        )
        half.write_bytes(b"an image without a manifest")
        one.scan_local(tmp_path)
        await settled(one)
        assert [held[3] for held in told.held()] == ["memory"]  # truncated: refused
        image.write_bytes(image_bytes(10, 0))
        one.scan_local(tmp_path)
        await until("word of it", lambda: (10, 1, 0, "local", "all") in told.held())

    async with keeper(local_root=tmp_path) as (one, told):  # the agent of the next allocation
        assert [copy.tier for copy in one.inventory()] == ["local"]
        one.launch(2, [0], 1, plan(10, 1, {0: [source(one, 0, tier="local")]}))
        rank = FakeRank(one)
        await until("restore", lambda: rank.answer is RestoreStatus.READY)
        assert rank.restored()[0] == image_bytes(10, 0)
        assert told.of(msg.Prefetched)[0].tiers == {"local": SIZE}

        bad = bytearray(image_bytes(10, 0))
        bad[7] ^= 1
        image.write_bytes(bad)
        one.launch(3, [1], 2, None)
        one.launch(4, [0], 1, plan(10, 1, {0: [source(one, 0, tier="local")]}))
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.answer is RestoreStatus.FAILED
        assert "corrupt" in told.of(msg.Dropped)[-1].why
        image.unlink()
        one.scan_local(tmp_path)


async def test_going_back_forgets_what_is_newer(tmp_path: Path) -> None:
    async with keeper() as (one, _):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10)
        one.obey(msg.Committed(step=10, attempt=1))
        await saved(one, rank, 20)
        one.obey(msg.Committed(step=20, attempt=1))
        put_local(tmp_path, image_bytes(20, 0), one, ImageId(20, 1, 0))
        one.scan_local(tmp_path)
        await until("two copies", lambda: len(one.inventory()) == 2)
        one.obey(msg.ForgetNewer(step=10))
        assert one.inventory() == ()
        one.scan_local(tmp_path)
        await settled(one)
        assert one.inventory() == ()


async def test_a_restore_of_another_world_is_refused() -> None:
    async with keeper() as (one, told):
        one.launch(1, [0], 2, None)
        rank = await ready_rank(one)
        await saved(one, rank, 10, world=2)
        one.launch(2, [0], 1, plan(10, 1, {0: [source(one, 0)]}))
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.answer is RestoreStatus.FAILED
        assert "2 ranks, and this attempt has 1" in told.of(msg.Unrestorable)[0].why
        assert rank.record[Word.RESTORE_IMAGE] == 0


async def test_memory_that_comes_when_nobody_waits_for_it_any_more_is_given_back() -> None:
    async with keeper() as (one, _):
        asking = asyncio.ensure_future(one.borrow(SIZE, "a test"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until("the memory", lambda: one.machine.memory.buffers)
        await settled(one)
        assert not one.machine.holding.busy
