"""Slow work on images: finding their manifests, verifying them again (to find flipped bits before a copy is
needed), and fetching them into buffers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from jurymast.core.checkpoints.copies import ALL, MEMORY, PEER
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.restores import members
from jurymast.core.keeper.work import Filled, Found
from jurymast.keeper.copies import CopyTable, StoredCopy, report_of
from jurymast.keeper.fetch import Filling
from jurymast.keeper.gathering import Gatherer, build, empty
from jurymast.keeper.manifest import Manifest, blocks_of, is_intact
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.threads import in_thread

SCRUB_EVERY_S = 600.0
SCRUB_LOOK_S = 1.0
# Share of one core.
SCRUB_SHARE = 0.1

Distrust = Callable[[StoredCopy, str], None]


async def scrub(copies: CopyTable, distrust: Distrust, every_s: float = SCRUB_EVERY_S) -> None:
    """Verify each copy in memory once in `every_s` seconds, one after another."""
    while True:
        due = [
            one
            for one in copies
            if isinstance(one.place, MappedBuffer) and one.verified_at + every_s < time.monotonic()
        ]
        if due:
            await read_again(copies, min(due, key=lambda one: one.verified_at), distrust, SCRUB_SHARE)
        else:
            await asyncio.sleep(min(SCRUB_LOOK_S, every_s))


async def read_again(copies: CopyTable, copy: StoredCopy, distrust: Distrust, share: float = 1.0) -> None:
    """Hash a copy again, using `share` of a core; `distrust` it at the first block that is wrong.

    It is a reader for only one block at a time, so that freeing a slot does not wait for it.
    """
    buffer = copy.place
    if not isinstance(buffer, MappedBuffer):
        return
    for block in blocks_of(copy.manifest, copy.part):
        started = time.monotonic()
        if not copies.read(copy):
            return
        try:
            good = await in_thread(is_intact, buffer.view(0, copy.manifest.size_bytes), block)
        finally:
            copies.release(copy)
        if not good:
            distrust(copy, f"the block at {block.at} of the {block.part} part is corrupt in memory")
            return
        await asyncio.sleep((time.monotonic() - started) * (1 / share - 1))
    copy.verified_at = time.monotonic()


@dataclass
class Going:
    """A task that is running. `stop` is set once nobody needs it; `manifests` are of the images found."""

    stop: threading.Event = field(default_factory=threading.Event)
    manifests: list[Manifest] = field(default_factory=list)
    filling: Filling | None = None


async def find(gathering: Gatherer, going: Going, effect: do.FindImages) -> Found:
    why, slot = list[str](), 0
    for one in effect.wanted:
        key = (effect.step, effect.attempt, one.rank)
        found = await gathering.manifest(key, one.sources, why)
        if found is None or going.stop.is_set():
            break
        manifest, capacity = found
        going.manifests.append(manifest)
        slot = slot or slot_bytes(manifest, capacity)
    return Found(tuple(report_of(one, PEER, ALL) for one in going.manifests), slot, tuple(why))


async def verify(copies: CopyTable, going: Going, effect: do.Verify) -> bool:
    """Hash a held copy again; return False if it is corrupt or no longer held."""
    copy = effect.copy
    assert isinstance(copy, StoredCopy)
    assert isinstance(copy.place, MappedBuffer)
    if not copies.read(copy):
        return False
    try:
        going.filling = Filling(copy.manifest, copy.place, stop=going.stop)
        return await in_thread(going.filling.keep, copy.part, MEMORY)
    finally:
        copies.release(copy)


async def fetch(gathering: Gatherer, going: Going, effect: do.Fetch, buffer: MappedBuffer) -> Filled:
    filling = going.filling or Filling(going.manifests[0], buffer, effect.part, stop=going.stop)
    filling_it = gathering.fill(filling, effect.image, effect.sources)
    why = await _reserve_and(filling_it, buffer, effect.start, effect.end)
    copy, behind = None, 0
    if filling.complete and not why:
        copy = await in_thread(StoredCopy, filling.manifest, effect.tier, effect.part, buffer)
        behind = await in_thread(_add_manifest, copy, buffer) if effect.behind else 0
    passed_over = tuple(filling.passed_over)
    return Filled(copy, behind, filling.got, passed_over, why, buffer.allocated)


async def mix(gathering: Gatherer, going: Going, effect: do.Mix, buffer: MappedBuffer) -> Filled:
    why = list[str]()
    try:
        await in_thread(buffer.reserve, 0, effect.size)
    except OSError as error:
        return Filled(None, refused=str(error), allocated=buffer.allocated)
    manifest = empty(going.manifests, effect.part)
    first = going.manifests[0]
    taken = zip(members(first.step, first.attempt, effect.members), going.manifests, strict=True)
    made = await build(gathering, manifest, buffer, effect.part, taken, going.stop, why)
    copy = None
    if made is not None:
        copy = StoredCopy(made, PEER, effect.part, buffer, members=going.manifests)
    return Filled(copy, passed_over=tuple(why), allocated=buffer.allocated)


async def _reserve_and(work: Coroutine[Any, Any, None], buffer: MappedBuffer, start: int, end: int) -> str:
    """Take the memory for a part of the buffer while `work` fetches into it. Once nobody writes into the
    buffer any more, return why the kernel has no memory, or ""."""
    reserving = asyncio.ensure_future(in_thread(buffer.reserve, start, end))
    try:
        await work
    except BaseException:
        reserving.cancel()
        raise
    try:
        await reserving
    except OSError as error:
        return str(error)
    return ""


def slot_bytes(manifest: Manifest, capacity: int) -> int:
    """Return the bytes of a buffer that becomes a slot: as many as the image's buffer on another node has
    (`capacity`), or else the image's size with room to grow. The manifest follows the image."""
    if capacity:
        return max(manifest.size_bytes, capacity)
    values = sum(item.length for item in manifest.items if not item.is_tensor)
    return manifest.size_bytes + values + 2 * len(manifest.to_bytes()) + (4 << 20)


def _add_manifest(copy: StoredCopy, buffer: MappedBuffer) -> int:
    """Write the manifest after the image, without hashes if there is no room for them. Return its bytes, or 0
    if there is no room."""
    start = copy.manifest.size_bytes
    for data in (copy.manifest_bytes, replace(copy.manifest, blocks={}).to_bytes()):
        if start + len(data) <= buffer.capacity:
            buffer.map[start : start + len(data)] = data
            return len(data)
    return 0
