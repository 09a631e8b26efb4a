"""Keepers under orders in any sequence: no copy is ever written over, mixed up, or half there."""

from __future__ import annotations

import os
import random
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import RestoreStatus
from jurymast.keeper.memory import MappedBuffer
from support.keepers import (
    COMMON_BYTES,
    SIZE,
    FakeRank,
    Told,
    flip,
    image_bytes,
    keeper,
    plan,
    run,
    settled,
    source,
    until,
    use_small_blocks,
)
from support.waiting import wait_until

NODES = 3
ROUNDS = 60
SEEDS = range(4)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


def content(step: int, attempt: int, rank: int) -> bytes:
    return image_bytes(1000 * attempt + step, rank)


class Cluster:
    """A rank a node, and a supervisor that gives orders by dice, some of them late or senseless."""

    def __init__(self, keepers: list[tuple[Keeper, Told]], dice: random.Random) -> None:
        self.keepers = keepers
        self.ranks = [FakeRank(one) for one, _ in keepers]
        self.dice = dice
        self.attempt = 1
        self.step = 0
        self.order = list(range(NODES))
        self.saved: list[tuple[int, int]] = []
        self.lent: list[tuple[tuple[int, int, int], Loan]] = []

    async def settled(self) -> None:
        for one, _ in self.keepers:
            await settled(one)

    def launch(self, restore: msg.Restore | None) -> None:
        for place, (one, _) in enumerate(self.keepers):
            one.launch(self.attempt, [self.order[place]], NODES, restore)
        for rank in self.ranks:
            rank.want(SIZE + 4096)

    async def save(self) -> None:
        self.step += 1
        for place, rank in enumerate(self.ranks):
            if rank.writable() and self.dice.random() < 0.95:
                number = self.order[place]
                data = content(self.step, self.attempt, number)
                rank.save(self.step, number, attempt=self.attempt, world=NODES, data=data)
        self.saved.append((self.step, self.attempt))

    async def commit(self) -> None:
        step, attempt = self.dice.choice(self.saved)
        for one, _ in self.keepers:
            one.obey(msg.Committed(step=step, attempt=attempt))

    async def void(self) -> None:
        step, attempt = self.saved[-1]
        for one, _ in self.keepers:
            one.obey(msg.Void(step=step, attempt=attempt))

    async def replicate(self) -> None:
        step, attempt = self.dice.choice(self.saved[-3:])
        holder, rank = self.dice.choice(self.keepers)[0], self.dice.randrange(NODES)
        sources = tuple(source(one, rank) for one, _ in self.keepers if one is not holder)
        part = self.dice.choice(["all", "own", "common"])
        holder.obey(msg.Replicate(step=step, attempt=attempt, rank=rank, part=part, sources=sources))

    async def lend(self) -> None:
        one = self.dice.choice(self.keepers)[0]
        for copy in one.copies:
            if copy.part == ALL and (loan := await one.lend(*copy.image)) is not None:
                self.lent.append((copy.image, loan))
                return

    async def give_back(self) -> None:
        if self.lent:
            key, loan = self.lent.pop(self.dice.randrange(len(self.lent)))
            with open(loan.path, "rb") as file:
                assert file.read(SIZE) == content(*key)
            loan.give_back()

    async def corrupt(self) -> None:
        one = self.dice.choice(self.keepers)[0]
        copies = [copy for copy in one.copies if copy.part == ALL]
        if copies and not self.lent:
            copy = self.dice.choice(copies)
            flip(one, copy.image, self.dice.randrange(SIZE), copy.tier)
            one.doubt(copy)
            await settled(one)

    async def restart(self) -> None:
        """Mostly from a step that somebody holds, with the ranks on other nodes; some sources are wrong."""
        if self.dice.random() < 0.7:
            await self.settled()
        held = [(copy.step, copy.attempt) for one, _ in self.keepers for copy in one.inventory()]
        step, attempt = self.dice.choice(held or self.saved)
        self.attempt += 1
        self.dice.shuffle(self.order)
        for rank in self.ranks:
            if rank.writable() and self.dice.random() < 0.3:
                rank.begin(rank.writable()[0])  # and dies
        sources = {}
        for number in range(NODES):
            found = [source(one, number) for one, _ in self.keepers]
            found += [source(one, (number + 1) % NODES, "common") for one, _ in self.keepers]
            self.dice.shuffle(found)
            sources[number] = found
        self.launch(plan(step, attempt, sources) if self.dice.random() < 0.9 else None)
        if self.dice.random() < 0.2:  # once more, before that is done
            self.attempt += 1
            self.launch(plan(step, attempt, sources))
        for place, rank in enumerate(self.ranks):
            await until("answer", lambda rank=rank: rank.answer is not RestoreStatus.PENDING)  # type: ignore[misc]
            if rank.answer is RestoreStatus.READY:
                data, _ = rank.restored()
                assert data == content(step, attempt, self.order[place])

    async def save_and_restore(self) -> None:
        """Whatever happened before."""
        self.attempt += 1
        self.launch(None)
        for (one, _), rank in zip(self.keepers, self.ranks, strict=True):
            one.look()
            await until("a slot", rank.writable)
        self.step += 1
        for place, rank in enumerate(self.ranks):
            number = self.order[place]
            data = content(self.step, self.attempt, number)
            rank.save(self.step, number, attempt=self.attempt, world=NODES, data=data)
            self.keepers[place][0].look()
        await self.settled()
        sources = {number: [source(one, number) for one, _ in self.keepers] for number in range(NODES)}
        restore = plan(self.step, self.attempt, sources)
        self.attempt += 1
        self.launch(restore)
        await self.settled()
        assert all(rank.answer is RestoreStatus.READY for rank in self.ranks)
        self.check()

    def check(self) -> None:
        for (one, _), rank in zip(self.keepers, self.ranks, strict=True):
            places = [copy.place for copy in one.copies]
            for number in rank.writable():
                slot = one.machine.ranks[0].slots[number]
                assert slot.buffer is not None
                buffer = one.buffers[slot.buffer.number]
                assert buffer not in places
                assert not buffer.readers
            for copy in one.copies:
                assert isinstance(copy.place, MappedBuffer)
                start, end = (0, SIZE) if copy.part == ALL else copy.manifest.extent(copy.part)
                assert copy.manifest.common_bytes == COMMON_BYTES
                assert bytes(copy.place[start:end]) == content(*copy.image)[start:end]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_sequence_of_orders(seed: int) -> None:
    async def work() -> None:
        dice = random.Random(seed)
        async with AsyncExitStack() as stack:
            keepers = [await stack.enter_async_context(keeper(f"n{place}")) for place in range(NODES)]
            cluster = Cluster(keepers, dice)
            cluster.launch(None)
            acts = [cluster.save] * 6 + [cluster.commit] * 4 + [cluster.replicate] * 8
            acts += [cluster.restart, cluster.restart, cluster.lend, cluster.give_back]
            acts += [cluster.void, cluster.corrupt]
            for number in range(ROUNDS):
                for one, _ in keepers:
                    one.look()
                if number == 0 or dice.random() < 0.6:
                    await cluster.settled()
                    cluster.check()
                await (cluster.save if number < 2 else dice.choice(acts))()
            await cluster.settled()
            cluster.check()
            while cluster.lent:
                await cluster.give_back()
            await cluster.settled()
            cluster.check()
            await cluster.save_and_restore()
            used = {buffer for one, _ in keepers for buffer in one.buffers.values()}
            assert not any(buffer.readers for buffer in used)
            await until("every image in sight", lambda: len(images() - earlier) == len(used))

    earlier = images()  # that other tests of this process still hold
    run(work())
    wait_until("memory given back", lambda: not images() - earlier)


def images() -> set[int]:
    """Inodes of this process's open memory files that are images. A mapping has a descriptor of its own."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the directory's own descriptor
            if "jurymast-image" in os.readlink(path):
                found.add(path.stat().st_ino)
    return found
