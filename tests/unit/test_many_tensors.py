"""A state of many tensors costs an agent nothing: what it does for an image depends only on its bytes."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec
import pytest

from jurymast.agent.storage_processes import lent_image
from jurymast.checkpoint.contents import Contents, Item
from jurymast.core.state import messages as msg
from jurymast.keeper.manifest import Manifest, Word
from jurymast.storage import orders
from support import keepers
from support.keepers import (
    FakeRank,
    Told,
    holding,
    keeper,
    plan,
    ready_rank,
    run,
    source,
    until,
    use_small_blocks,
)

FEW, MANY = 100, 10_000
SIZE = 4 << 20
OWN_CODE = "/jurymast/"
# What else may differ: a thread that takes its turn earlier or later.
TOLERANCE = 0.02
MEMORY_BYTES = 200 << 10


@dataclass
class Work:
    """Calls by and within our code, in all threads, and the largest number of bytes that were allocated."""

    calls: Counter[str] = field(default_factory=Counter)
    memory_bytes: int = 0
    said: list[int] = field(default_factory=list)  # sizes in bytes of messages and orders

    def saw(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call") and OWN_CODE in frame.f_code.co_filename:
            self.calls[f"{event} {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        threading.setprofile(self.saw)
        sys.setprofile(self.saw)
        tracemalloc.start()
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.memory_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()


def image(items: int) -> dict[str, Any]:
    """An image of `SIZE` bytes with the contents of so many items, as `FakeRank.save` takes it."""
    described = tuple(
        Item(f"state.{number}.exp_avg", ("state", f"{number}", "exp_avg"), 64 * number, 64, "float32", (16,))
        for number in range(items)
    )
    contents = Contents({}, described).to_bytes()
    data = keepers.image_bytes(10, 0, SIZE - len(contents), 0) + contents
    return {"size": SIZE, "common": 0, "data": data, "contents_at": SIZE - len(contents)}


async def save_lend_and_order(work: Work, items: int) -> Told:
    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one, size=SIZE)
        rank.save(10, **image(items))
        with work.counted():
            one.look()
            await until("image", lambda: told.of(msg.Held))
            loan = await one.lend(10, 1, 0)
            assert loan is not None
            images = (lent_image(loan),)
            order = orders.WriteShared(root="/r", step=10, attempt=1, world=1, nonce="0", images=images)
            work.said.append(len(msgspec.json.encode(order)))
            loan.give_back()
        return told


async def replicate(work: Work, items: int) -> Told:
    async with holding("a", image=image(items)) as (first, _), keeper("b") as (second, told):
        with work.counted():
            second.obey(msg.Replicate(step=10, attempt=1, rank=0, part="all", sources=(source(first, 0),)))
            await until("replica", lambda: told.of(msg.Held))
        return told


async def restore(work: Work, items: int) -> Told:
    async with holding("a", image=image(items)) as (first, _), keeper("b") as (second, told):
        with work.counted():
            second.launch(2, [0], 1, plan(10, 1, {0: [source(first, 0)]}))
            rank = FakeRank(second)
            await until("image to restore", lambda: rank.record[Word.RESTORE])
        got, manifest = rank.restored()
        assert len(Contents.from_bytes(got[manifest.contents_at :]).items) == items
        return told


@pytest.mark.parametrize("way", [save_lend_and_order, replicate, restore])
def test_no_work_in_the_agent_grows_with_the_number_of_tensors(
    monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    use_small_blocks(monkeypatch)
    few, many = Work(), Work()
    run(way(Work(), FEW))  # what is done only once in a process
    for work, items in ((few, FEW), (many, MANY)):
        work.said += [len(msg.encode(message)) for message in run(way(work, items))]
    assert sum(few.calls.values()) > 100
    grown = {name: count - few.calls[name] for name, count in many.calls.items() if count > few.calls[name]}
    assert sum(grown.values()) < max(50, TOLERANCE * sum(few.calls.values())), grown
    assert many.memory_bytes - few.memory_bytes < MEMORY_BYTES
    assert len(few.said) == len(many.said)
    assert max(many.said) - max(few.said) < 16, "a number of some more digits"


def test_a_manifest_has_a_fixed_size_for_an_image_of_a_size() -> None:
    sizes = []
    for items in (FEW, MANY):
        saved = image(items)
        made = Manifest(10, 1, 0, 1, "2.13", SIZE, 0, saved["contents_at"])
        sizes.append(len(made.with_blocks(memoryview(saved["data"])).to_bytes()))
    assert abs(sizes[0] - sizes[1]) < 4
