"""A node whose ranks restore what another number of ranks saved: its keeper shows them all images."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jurymast.core.state import messages as msg
from jurymast.core.state.images import OWN, PEER, ImageId
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import Manifest, RestoreStatus, ShownImages, Word
from support.keepers import (
    COMMON_BYTES,
    SIZE,
    FakeRank,
    Told,
    flip,
    holding,
    image_bytes,
    run,
    saved,
    settled,
    source,
    until,
    use_small_blocks,
)

RESTORE = msg.Restore(step=10, attempt=1, ranks={0: ()}, world=2)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


@asynccontextmanager
async def collected() -> AsyncIterator[tuple[Keeper, Told]]:
    """A node of two, which has got what only the other one had."""
    async with holding("a", 0, 2) as (one, told), holding("b", 1, 2) as (other, _):
        sources = (source(other, 1),)
        one.obey(msg.Replicate(step=10, attempt=1, rank=1, part=OWN, sources=sources))
        await until("the own part", lambda: one.copies.find(ImageId(10, 1, 1), (PEER,)))
        yield one, told


def seen(rank: FakeRank) -> list[bytes]:
    """All images, as a rank reads them."""
    assert rank.answer is RestoreStatus.COLLECTED
    record = rank.record
    assert (record[Word.RESTORE_STEP], record[Word.RESTORE_ATTEMPT]) == (10, 1)
    assert record[Word.RESTORE_IMAGE] == 2 * SIZE
    with open(f"{rank.folder}/{record[Word.RESTORE_SLOT]}", "rb") as file:
        shown = ShownImages.from_bytes(file.read(record[Word.RESTORE_MANIFEST])).images
    found = []
    for number, one in enumerate(shown):
        assert Manifest.from_bytes(one.manifest).image == ImageId(10, 1, number)
        with open(f"{rank.folder}/{one.descriptor}", "rb") as file:
            data = file.read(SIZE)
        if one.common:
            with open(f"{rank.folder}/{one.common}", "rb") as file:
                data = file.read(COMMON_BYTES) + data[COMMON_BYTES:]
        found.append(data)
    return found


def test_a_rank_reads_all_images_until_all_have_restored() -> None:
    async def main() -> None:
        async with collected() as (one, _):
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            assert seen(rank) == [image_bytes(10, 0), image_bytes(10, 1)]
            lent = [copy.memory for copy in one.shown]
            assert [buffer.readers for buffer in lent if buffer is not None] == [2, 1, 2], (
                "one is read for the other, too"
            )
            rank.want(SIZE + 4096)
            one.look()
            await settled(one)
            assert one.shown == []
            assert [buffer.readers for buffer in lent if buffer is not None] == [0, 0, 0]

    run(main())


def test_what_was_collected_stays_until_a_newer_state_is_safe() -> None:
    async def main() -> None:
        async with collected() as (one, _):
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            rank.want(SIZE + 4096)
            one.look()
            await until("a slot", rank.writable)
            await saved(one, rank, 20, attempt=2)
            assert {copy.image for copy in one.copies} == {
                ImageId(10, 1, 0), ImageId(10, 1, 1), ImageId(20, 2, 0)
            }  # fmt: skip
            one.obey(msg.Committed(step=20, attempt=2))
            await settled(one)
            assert {copy.image for copy in one.copies} == {ImageId(20, 2, 0)}
            await until("both slots", lambda: len(rank.writable()) == 1)
            assert not one.machine.holding.leaving

    run(main())


def test_what_is_shown_does_not_change_while_ranks_read_it() -> None:
    """Not even if nobody wants it any more: the ranks of an attempt that is over are stopped later."""

    async def main() -> None:
        async with collected() as (one, _):
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            one.obey(msg.ForgetNewer(step=5))
            await settled(one)
            assert list(one.copies) == []
            assert seen(rank) == [image_bytes(10, 0), image_bytes(10, 1)]
            descriptors = {copy.memory.descriptor for copy in one.shown if copy.memory is not None}
            assert len(descriptors) == 2
            one.launch(3, [0], 1, None)
            await settled(one)
            assert rank.answer is RestoreStatus.ELSEWHERE
            assert one.shown == []
            assert not one.machine.holding.leaving

    run(main())


@pytest.mark.parametrize(("number", "tier", "at"), [(0, "memory", 5), (1, PEER, COMMON_BYTES + 5)])
def test_what_is_corrupt_is_not_shown(number: int, tier: str, at: int) -> None:
    async def main() -> None:
        async with collected() as (one, told):
            flip(one, ImageId(10, 1, number), at, tier)
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            assert rank.answer is RestoreStatus.FAILED
            (failed,) = told.of(msg.Unrestorable)
            assert (failed.attempt, failed.rank, failed.step, failed.of) == (2, 0, 10, 1)
            assert failed.why == f"rank {number}'s image cannot be verified here"
            assert [(one.copy.rank, one.why) for one in told.of(msg.Dropped)] == [
                (number, "blocks are corrupt in memory")
            ]

    run(main())


def test_a_node_that_lacks_something_says_so() -> None:
    async def main() -> None:
        async with holding("a", 0, 2) as (one, told):
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            assert rank.answer is RestoreStatus.FAILED
            assert [failed.why for failed in told.of(msg.Unrestorable)] == [
                "not all of rank 1's image is here"
            ]

    run(main())


def test_without_a_descriptor_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(capacity: int, number: int) -> None:
        raise OSError(24, os.strerror(24))

    async def main() -> None:
        async with collected() as (one, told):
            monkeypatch.setattr(one.io, "make", fails)
            one.launch(2, [0], 1, RESTORE)
            rank = FakeRank(one)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            assert rank.answer is RestoreStatus.FAILED
            assert ["Too many open files" in failed.why for failed in told.of(msg.Unrestorable)] == [True]
            assert one.shown == []

    run(main())
