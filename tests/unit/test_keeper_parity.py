"""The XOR of several nodes' images, over real sockets: made, damaged, and a lost member got out of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from jurymast.core import messages as msg
from jurymast.core.messages import Room
from jurymast.keeper import gathering
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import RestoreStatus
from jurymast.keeper.memory import MappedBuffer
from support.keepers import (
    BLOCK,
    COMMON_BYTES,
    SIZE,
    FakeRank,
    Told,
    image_bytes,
    keeper,
    member,
    plan,
    ready_rank,
    run,
    saved,
    settled,
    source,
    until,
    use_small_blocks,
)

KEY = (10, 1, 0)
GROUP = (0, 1, 2)
# The images' sizes and those of their common parts: no two alike, one ends within a block of the others.
SIZES = ((SIZE, COMMON_BYTES), (SIZE - 3 * BLOCK, COMMON_BYTES - BLOCK), (SIZE + 77, COMMON_BYTES + BLOCK))
ALIKE = tuple((size, COMMON_BYTES) for size in (SIZE, SIZE - 3 * BLOCK, SIZE + 77))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


def content(rank: int, sizes: tuple[tuple[int, int], ...] = ALIKE) -> bytes:
    return image_bytes(10, rank, *sizes[rank])


@asynccontextmanager
async def group_of_three(
    sizes: tuple[tuple[int, int], ...] = ALIKE,
) -> AsyncIterator[tuple[list[Keeper], Keeper, Told]]:
    """Three nodes whose ranks have saved step 10, and a spare."""
    async with AsyncExitStack() as stack:
        members = []
        for rank, (size, common) in enumerate(sizes):
            one, _ = await stack.enter_async_context(keeper("abc"[rank]))
            one.launch(1, [rank], 3, None)
            await saved(one, await ready_rank(one, size=size), 10, rank, world=3, size=size, common=common)
            members.append(one)
        spare, told = await stack.enter_async_context(keeper("s"))
        yield members, spare, told


def order(members: list[Keeper], part: str = "own") -> msg.Replicate:
    parts = tuple(member(rank, one) for rank, one in enumerate(members))
    return msg.Replicate(step=10, attempt=1, rank=0, part=part, group=GROUP, members=parts)


async def made(members: list[Keeper], spare: Keeper, told: Told, part: str = "own") -> None:
    spare.obey(order(members, part))
    spare.obey(order(members, part))  # said twice
    await until("parity", told.held)


def through(spare: Keeper, members: list[Keeper], rank: int, part: str = "own") -> msg.Source:
    others = tuple(member(n, one) for n, one in enumerate(members) if n != rank)
    return source(spare, rank, part, group=GROUP, members=others)


async def restored(one: Keeper, rank: int, sources: list[msg.Source]) -> FakeRank:
    one.launch(2, [rank], 3, plan(10, 1, {rank: sources}))
    local = FakeRank(one)
    await until("answer", lambda: local.answer is not RestoreStatus.PENDING)
    return local


def flip(one: Keeper, at: int, group: tuple[int, ...] = ()) -> None:
    """A bit turns in what it holds, whatever that is."""
    (copy,) = [copy for copy in one.copies if copy.group == group]
    assert isinstance(copy.place, MappedBuffer)
    copy.place.map[at] ^= 1


@pytest.mark.parametrize("lost", GROUP)
@pytest.mark.parametrize("part", ["own", "all"])
def test_each_member_can_be_lost(lost: int, part: str) -> None:
    """Their lengths differ; with their common parts in the XOR as well, those too."""
    sizes = ALIKE if part == "own" else SIZES

    async def work() -> None:
        async with group_of_three(sizes) as (members, spare, told), keeper("new") as (new, new_told):
            await made(members, spare, told, part)
            (copy,) = spare.inventory()
            commons, owns = ([c for _, c in sizes], [size - common for size, common in sizes])
            assert copy.size_bytes == max(owns) + (max(commons) if part == "all" else 0)
            assert [one.rank for one in copy.members] == [0, 1, 2]
            assert [one.size_bytes for one in copy.members] == [size for size, _ in sizes]
            await members[lost].close()
            common = [source(one, n, "common") for n, one in enumerate(members) if n != lost]
            sources = [*(common if part == "own" else []), through(spare, members, lost, part)]
            rank = await restored(new, lost, sources)
            assert rank.restored()[0] == content(lost, sizes)
            (word,) = new_told.of(msg.Prefetched)
            assert word.tiers == {"peer": sizes[lost][0]}
            assert word.passed_over == ()

    run(work())


def test_the_spare_that_holds_it_becomes_the_lost_node() -> None:
    async def work() -> None:
        async with group_of_three() as (members, spare, told):
            await made(members, spare, told)
            await members[1].close()
            rank = await restored(spare, 1, [source(members[0], 0, "common"), through(spare, members, 1)])
            assert rank.restored()[0] == content(1)
            assert {(c.tier, bool(c.members)) for c in spare.inventory()} == {
                ("memory", False), ("peer", True)
            }  # fmt: skip
            spare.obey(msg.Committed(step=20, attempt=2))
            assert spare.inventory() == ()
            assert told.of(msg.Dropped) == []

    run(work())


def test_a_corrupt_member_does_not_get_into_it() -> None:
    async def work() -> None:
        async with group_of_three() as (members, spare, told):
            flip(members[1], ALIKE[1][0] - 5)
            spare.obey(order(members))
            (word,) = await until("word", lambda: told.of(msg.Unreplicated))
            assert "b: the block at" in word.why
            assert (word.part, word.rank, word.group) == ("own", 0, (0, 1, 2))
            assert spare.inventory() == ()
            await until("the bad copy's end", lambda: not members[1].inventory())

    run(work())


@pytest.mark.parametrize("where", ["member", "parity"])
@pytest.mark.parametrize("other", [False, True])
def test_a_block_that_is_corrupt_when_it_is_needed(where: str, other: bool) -> None:
    """It is found, where it is, and nothing is made of it; another source brings that block alone."""

    async def work() -> None:
        async with group_of_three() as (members, spare, told), keeper("new") as (new, new_told):
            await made(members, spare, told)
            bad = spare if where == "parity" else members[2]
            flip(bad, BLOCK + 5, GROUP) if where == "parity" else flip(bad, COMMON_BYTES + BLOCK + 5)
            sources = [source(members[2], 2, "common"), through(spare, members, 0)]
            sources += [source(members[0], 0)] if other else []
            rank = await restored(new, 0, sources)
            if other:
                (word,) = new_told.of(msg.Prefetched)
                assert rank.restored()[0] == content(0)
                assert "corrupt" in word.passed_over[-1]
                assert word.passed_over[-1].startswith("s, parity of ranks 0, 1, 2: ")
            else:
                (lost,) = new_told.of(msg.Unrestorable)
                assert rank.answer is RestoreStatus.FAILED
                assert "corrupt" in lost.why
                assert new.inventory() == ()
            await until("the bad copy's end", lambda: not bad.inventory())

    run(work())


def test_two_lost_members_are_not_made_up() -> None:
    async def work() -> None:
        async with group_of_three() as (members, spare, told), keeper("new") as (new, _):
            await made(members, spare, told)
            sources = [source(members[2], 2, "common"), through(spare, members, 0)]
            await members[0].close()
            await members[1].close()
            assert (await restored(new, 0, sources)).answer is RestoreStatus.FAILED
            await settled(new)
            assert new.inventory() == ()

    run(work())


def test_a_node_without_the_memory_says_for_what() -> None:
    async def work() -> None:
        small = keeper("small", room=lambda: Room(4096, "/nowhere/memory.max"))
        async with group_of_three() as (members, _, _), small as (one, told):
            one.obey(order(members))
            await until("word", lambda: told.of(msg.Unreplicated))
            (word,) = told.of(msg.Refused)
            assert word.group == (0, 1, 2)
            assert "the parity of 3 ranks" in word.why
            assert one.inventory() == ()

    run(work())


def test_what_goes_wrong_in_making_it_is_told_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: object) -> None:
        raise OSError("too many open files")

    async def work() -> None:
        async with group_of_three() as (members, spare, told):
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            with monkeypatch.context() as patch:
                patch.setattr(gathering, "build", broken)
                for part in ("own", "all"):  # as many as are made at a time
                    spare.obey(order(members, part))
                await until("words", lambda: len(told.of(msg.Unreplicated)) == 2)
            assert "too many open files" in told.of(msg.Unreplicated)[0].why
            await settled(spare)
            await made(members, spare, told)

    run(work())


def test_it_is_given_up_with_the_state_it_is_of() -> None:
    async def work() -> None:
        async with group_of_three() as (members, spare, told):
            await made(members, spare, told)
            spare.obey(msg.Forget(step=10, attempt=1, ranks=(0,)))
            assert len(spare.inventory()) == 1  # that was about a replica of rank 0
            spare.obey(msg.Void(step=10, attempt=1))
            assert spare.inventory() == ()
            spare.obey(order(members))
            await until("parity", lambda: len(told.held()) == 2)
            spare.launch(2, [0], 3, None)
            assert spare.inventory() == ()

    run(work())


@pytest.mark.parametrize("numpy", [True, False])
def test_the_xor_itself(numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numpy:
        monkeypatch.setattr(gathering, "_numpy", lambda: None)
    one, other = os.urandom(3 * gathering.PIECE_BYTES + 5), os.urandom(2 * gathering.PIECE_BYTES + 3)
    target = bytearray(one)
    gathering.xor_into(memoryview(target), memoryview(other))
    assert target == bytes(a ^ b for a, b in zip(one, other, strict=False)) + one[len(other) :]
    gathering.xor_into(memoryview(target)[: len(other)], memoryview(one))
    assert target[: len(other)] == other
