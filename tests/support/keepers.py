"""Keepers for tests, and ranks that speak to them as `keeper.manifest` says, without torch."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from jurymast.core.keeper.holding import SLOTS
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ImageId
from jurymast.core.state.messages import Room
from jurymast.keeper import manifest
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import Manifest, RankRecord, RestoreStatus, SlotWord, Word
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.wire.protocol import Access
from jurymast.worker import link

SECRET = b"k" * 32
ACCESS = Access(SECRET)
LIMIT_S = 120.0
BLOCK = 64 << 10
SIZE = 10 * BLOCK + 123
COMMON_BYTES = 4 * BLOCK + 45

Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=msg.ToSupervisor)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    async def limited() -> Result:
        return await asyncio.wait_for(work, LIMIT_S)

    return asyncio.run(limited())


async def until(what: str, condition: Callable[[], Result], limit_s: float = 60.0) -> Result:
    """The first true value of `condition`; the loop goes on meanwhile."""
    end = asyncio.get_running_loop().time() + limit_s
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < end, f"within {limit_s} s: no {what}"
        await asyncio.sleep(0.005)
    return value


async def settled(one: Keeper) -> None:
    """All that the keeper began has ended, but for the reading again that never does."""
    await until("end of what was begun", lambda: len(one._tasks) <= 1)
    await asyncio.sleep(0)
    one.machine.check()


def use_small_blocks(patch: pytest.MonkeyPatch, size: int = BLOCK) -> None:
    """Several blocks in small images."""
    patch.setattr(manifest, "BLOCK_BYTES", size)


def image_bytes(step: int, rank: int, size: int = SIZE, common: int = COMMON_BYTES) -> bytes:
    """The common part depends on the step, the own part on the rank as well."""
    return random.Random(step).randbytes(common) + random.Random(f"{step} {rank}").randbytes(size - common)


class Told(list[msg.FromKeeper]):
    """What a keeper told the supervisor."""

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self if isinstance(message, kind)]

    def held(self) -> list[tuple[int, int, int, str, str]]:
        return [
            (copy.step, copy.attempt, copy.rank, copy.tier, copy.part)
            for message in self.of(msg.Held)
            for copy in message.copies
        ]


class FakeRank:
    """The rank's side of its words."""

    def __init__(self, keeper: Keeper, local_rank: int = 0) -> None:
        page = link.open_page(keeper.io.page_path)
        assert page is not None
        self.folder = os.path.dirname(keeper.io.page_path)
        self.record = RankRecord(page, local_rank)
        self.slots = [self.record.slot(number) for number in range(SLOTS)]

    def want(self, size: int) -> None:
        self.record[Word.WANT] = size

    def writable(self) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if slot.writable]

    def map(self, number: int) -> mmap.mmap:
        slot = self.slots[number]
        descriptor = os.open(f"{self.folder}/{slot[SlotWord.FD]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, slot[SlotWord.CAPACITY])
        finally:
            os.close(descriptor)

    def begin(self, number: int) -> None:
        self.slots[number][SlotWord.SEQ] = self.slots[number][SlotWord.FREED] + 1

    def save(
        self,
        step: int,
        rank: int = 0,
        *,
        attempt: int = 1,
        world: int = 1,
        size: int = SIZE,
        common: int = COMMON_BYTES,
        data: bytes | None = None,
        contents_at: int = -1,
    ) -> int:
        """Write and publish into a writable slot; its number."""
        number = self.writable()[0]
        slot, image = self.slots[number], data or image_bytes(step, rank, size, common)
        behind = Manifest(step, attempt, rank, world, "2.13", size, common, contents_at).to_bytes()
        self.begin(number)
        with self.map(number) as place:
            place[:size] = image
            place[size : size + len(behind)] = behind
        slot[SlotWord.STEP], slot[SlotWord.IMAGE], slot[SlotWord.MANIFEST] = step, size, len(behind)
        slot[SlotWord.SEQ] = slot[SlotWord.FREED] + 2
        return number

    @property
    def answer(self) -> RestoreStatus:
        return RestoreStatus(self.record[Word.RESTORE])

    def restored(self) -> tuple[bytes, Manifest]:
        """What it finds in the slot that the keeper names."""
        assert self.answer is RestoreStatus.READY
        size, behind = self.record[Word.RESTORE_IMAGE], self.record[Word.RESTORE_MANIFEST]
        number = self.record[Word.RESTORE_SLOT]
        assert number not in self.writable()
        with self.map(number) as place:
            found = Manifest.from_bytes(place[size : size + behind])
            assert (found.step, found.attempt) == (
                self.record[Word.RESTORE_STEP],
                self.record[Word.RESTORE_ATTEMPT],
            )
            return place[:size], found


def plenty() -> Room:
    return Room(1 << 40, "/nowhere/memory.max")


@asynccontextmanager
async def keeper(
    node: str = "a",
    ranks: int = 1,
    *,
    secret: bytes = SECRET,
    encrypt: bool = False,
    room: Callable[[], Room] = plenty,
    local_root: Path | None = None,
) -> AsyncIterator[tuple[Keeper, Told]]:
    told = Told()
    one = Keeper(
        RealKeeperIo(Access(secret, encrypt=encrypt), node, ranks, room), told.append, local_root=local_root
    )
    await one.start()
    one.listen_at("127.0.0.1")
    try:
        yield one, told
    finally:
        await one.close()


async def ready_rank(one: Keeper, local_rank: int = 0, size: int = SIZE) -> FakeRank:
    """A rank with two slots that it may write into."""
    rank = FakeRank(one, local_rank)
    rank.want(size + 4096)
    one.look()
    await until("two slots", lambda: len(rank.writable()) == SLOTS)
    return rank


async def saved(one: Keeper, rank: FakeRank, step: int, number: int = 0, **more: Any) -> int:
    """Save, and wait until the keeper holds it; the slot."""
    slot = rank.save(step, number, **more)
    one.look()
    key = ImageId(step, more.get("attempt", 1), number)
    await until(f"image of step {step}", lambda: one.copies.find(key, ("memory",)))
    return slot


@asynccontextmanager
async def holding(
    node: str, rank: int = 0, world: int = 1, image: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[Keeper, Told]]:
    """A node whose own rank has saved step 10; `image`: see `FakeRank.save`."""
    image = image or {}
    async with keeper(node, **more) as (one, told):
        one.launch(1, [rank], world, None)
        await saved(one, await ready_rank(one, size=image.get("size", SIZE)), 10, rank, world=world, **image)
        yield one, told


def source(one: Keeper, rank: int, part: str = "all", tier: str = "peer", **more: Any) -> msg.Source:
    """As the supervisor spells it."""
    told = msg.Source(tier=tier, node=one.io.node, hosts=("127.0.0.1",), port=one.port, part=part, rank=rank)
    return msgspec.structs.replace(told, **more)


def plan(step: int, attempt: int, sources: dict[int, list[msg.Source]]) -> msg.Restore:
    ranks = {rank: tuple(found) for rank, found in sources.items()}
    return msg.Restore(step=step, attempt=attempt, ranks=ranks)


def flip(one: Keeper, key: ImageId, at: int, tier: str = "memory") -> None:
    """A bit of a held image turns."""
    place = one.copies.find(key, (tier,))[0].place
    assert isinstance(place, MappedBuffer)
    place.map[at] ^= 1
