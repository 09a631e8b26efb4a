"""Slow work on images, outside the agent's event loop: finds their manifests, fetches their bytes from copies
on this node or others as `core.keeper.restores` decides, and verifies copies again, to find flipped bits
before a copy is needed.

Also makes the XOR of one part of several ranks' images, and rebuilds a lost rank's part from it. An XOR is
laid out like an image: block i of its common part is the XOR of block i of all common parts, shorter ones
padded with zeros, and the same holds for its own part. So every block that goes in or comes out is verified
by the manifest of the image or XOR that it belongs to.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from jurymast import background
from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER, ImageId
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.restores import Filled, Found, Ingredient, ingredients, members, usable, whom_to_ask
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper.copies import CopyTable, Group, StoredCopy, report_of
from jurymast.keeper.manifest import (
    HEADROOM_BYTES,
    BadImage,
    Block,
    Manifest,
    blocks_of,
    is_intact,
    room_of,
)
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.transfer import Filling, manifest_of
from jurymast.wire.protocol import Access

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function as asyncio.to_thread does, but in a new daemon thread: one that waits for a dead disk
    blocks nothing else, not even the agent's end. If the caller is cancelled, the thread continues and its
    result is dropped.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    name = getattr(function, "__name__", "keeper")
    threading.Thread(target=_work, args=(future, function, arguments), name=name, daemon=True).start()
    answer = asyncio.wrap_future(future)
    # An exception refers to the frames that it passed; without this they would keep it and its buffers alive.
    del future
    return await answer


def _work(future: Future[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:  # any error is for the caller
        future.set_exception(error)
        del future  # as above
    else:
        future.set_result(result)


# ---- parity

# Blocks under way at a time; they take memory from the reserve that `memory` keeps.
WINDOW_BLOCKS = 2
# Without numpy, the GIL is held for the time of one piece.
PIECE_BYTES = 64 << 10

# (part, offset in the part)
Place = tuple[str, int]


@dataclass
class Mixing:
    """XORs ingredients into the memory that `target` returns for a place and a length, or None if that place
    is not wanted. `failed` has the places for which an ingredient is missing, `why` a line for each.
    """

    gathering: Gatherer
    target: Callable[[Place, int], memoryview | None]
    stop: threading.Event
    why: list[str]
    failed: set[Place] = field(default_factory=set)

    async def add(self, one: Ingredient, manifest: Manifest, part: str) -> None:
        """Add this part of the image that has this manifest."""
        blocks = blocks_of(manifest, part)
        for window in _windows(block for block in blocks if self._wants(manifest, block)):
            if self.stop.is_set():
                return
            length = sum(block.length for block in window)
            scratch = await in_thread(MappedBuffer, length)
            try:
                filling = Filling(
                    manifest, scratch, part, list(window), stop=self.stop, origin=window[0].at,
                    group=one.group,
                )  # fmt: skip
                await self.gathering.fill(filling, one.image, one.sources)
                self.why += [line for line in filling.passed_over if line not in self.why]
                for block in window:
                    if block in filling.missing:
                        self.failed.add(place_of(manifest, block))
                    else:
                        await in_thread(self._xor, manifest, block, filling)
            finally:
                await in_thread(scratch.close)

    def _wants(self, manifest: Manifest, block: Block) -> bool:
        place = place_of(manifest, block)
        return place not in self.failed and self.target(place, block.length) is not None

    def _xor(self, manifest: Manifest, block: Block, filling: Filling) -> None:
        into = self.target(place_of(manifest, block), block.length)
        assert into is not None
        xor_into(into, filling.view(block))


def place_of(manifest: Manifest, block: Block) -> Place:
    return block.part, block.at - manifest.extent(block.part)[0]


def empty(members: Sequence[Manifest], part: str) -> Manifest:
    """Return the manifest, still without hashes, of the XOR of this part of these images, which is as long as
    the longest of them."""
    first = members[0]
    common = max(one.common_bytes for one in members) if part == ALL else 0
    own = max(one.size_bytes - one.common_bytes for one in members)
    return Manifest(first.step, first.attempt, first.rank, first.world, "", common + own, common)


async def build(
    gathering: Gatherer,
    manifest: Manifest,
    buffer: MappedBuffer,
    part: str,
    members: Iterable[tuple[Ingredient, Manifest]],
    stop: threading.Event,
    why: list[str],
) -> Manifest | None:
    """Make the XOR in `buffer`. Return its manifest with hashes, or None if a member is not available
    whole."""

    def target(place: Place, length: int) -> memoryview:
        start = manifest.extent(place[0])[0] + place[1]
        return buffer.view(start, start + length)

    await in_thread(_clear, buffer, 0, manifest.size_bytes)
    mix = Mixing(gathering, target, stop, why)
    for one, its in members:
        await mix.add(one, its, part)
        if mix.failed or stop.is_set():
            return None
    return await in_thread(manifest.with_blocks, buffer.view(0, manifest.size_bytes))


async def rebuild(gathering: Gatherer, filling: Filling, key: ImageId, source: msg.Source) -> None:
    """Rebuild the blocks that `filling` lacks from the XOR at `source` and the same part of its other
    members."""
    wanted = {place_of(filling.manifest, block): block for block in filling.wanted(source.part)}

    def target(place: Place, length: int) -> memoryview | None:
        return filling.view(wanted[place]) if place in wanted else None

    why: list[str] = []
    mix = Mixing(gathering, target, filling.stop, why)
    for block in wanted.values():
        await in_thread(_clear, filling.buffer, block.at - filling.origin, block.length)
    for one in ingredients(key, source):
        found = await gathering.manifest(one.image, one.sources, why, one.group)
        if found is None:
            break
        await mix.add(one, found[0], source.part)
    else:
        good = [block for place, block in wanted.items() if place not in mix.failed]
        if not filling.stop.is_set():
            await in_thread(filling.keep, source.part, PEER, good)
    if filling.wanted(source.part) and not filling.stop.is_set():
        ranks = ", ".join(str(rank) for rank in sorted(source.group))
        reason = "; ".join(why) or "blocks are corrupt"
        filling.passed_over.append(f"{source.node}, parity of ranks {ranks}: {reason}")


def _windows(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    """Yield a few adjacent blocks at a time."""
    window: list[Block] = []
    for block in blocks:
        if window and (len(window) == WINDOW_BLOCKS or block.at != window[-1].at + window[-1].length):
            yield window
            window = []
        window.append(block)
    if window:
        yield window


def xor_into(target: memoryview, data: memoryview) -> None:
    """XOR `data` into `target`, up to the end of the shorter one."""
    length = min(len(target), len(data))
    target, data = target[:length], data[:length]
    numpy = _numpy()
    if numpy is not None:  # 4 GB/s, and releases the GIL
        into = numpy.frombuffer(target, dtype=numpy.uint8)
        numpy.bitwise_xor(into, numpy.frombuffer(data, dtype=numpy.uint8), out=into)
        return
    for at in range(0, length, PIECE_BYTES):  # 0.2 GB/s
        one, other = target[at : at + PIECE_BYTES], data[at : at + PIECE_BYTES]
        mixed = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
        one[:] = mixed.to_bytes(len(one), "little")


@cache
def _numpy() -> Any:
    """Return numpy, which is usually installed with torch, or None."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _clear(buffer: MappedBuffer, at: int, length: int) -> None:
    """Write zeros; not through a slice, which would hold the GIL."""
    if length:
        first = ctypes.c_char.from_buffer(buffer.map, at)
        ctypes.memset(ctypes.addressof(first), 0, length)


# ---- images from other nodes


@dataclass(frozen=True)
class Gatherer:
    """Fetches images for the agent's loop; threads do the work. `distrust` is called with bad copies of this
    node."""

    copies: CopyTable
    access: Access
    node: str
    distrust: Callable[[StoredCopy, str], None]

    async def manifest(
        self, key: ImageId, sources: Sequence[msg.Source], passed_over: list[str], group: Group = ()
    ) -> tuple[Manifest, int] | None:
        """Return (the image's manifest, the capacity of its buffer or 0) from this node or any source, or
        None; with a `group`, those of the group's XOR."""
        here = self.copies.manifest(key, group)
        if here is not None:
            return here
        for source in whom_to_ask(self.node, key.rank, sources):
            try:
                return await in_thread(manifest_of, source, self.access, key, group)
            except (OSError, AuthenticationError, ProtocolError, BadImage) as error:
                passed_over.append(f"{source.node}: {error or type(error).__name__}")
        return None

    async def fill(self, filling: Filling, key: ImageId, sources: Sequence[msg.Source]) -> None:
        """Fill until nothing is missing or no source is left. A common part may come from another rank's
        image: its hashes show whether it is the same."""
        for source in usable(sources, lambda: filling.lacking):
            if filling.stop.is_set():
                return
            theirs = ImageId(key.step, key.attempt, source.rank)
            if source.group and not filling.group:
                await rebuild(self, filling, key, source)
            elif source.node == self.node:
                await self._from_here(filling, theirs, source.part)
            else:
                await in_thread(filling.from_peer, source, self.access, theirs, source.part, PEER)

    async def _from_here(self, filling: Filling, key: ImageId, part: str) -> None:
        found = [copy for copy in self.copies.find(key, group=filling.group) if copy.part in (ALL, part)]
        if not found:
            filling.passed_over.append(f"{self.node}: not held")
        for copy in found:
            if copy.place is filling.buffer or not self.copies.read(copy):
                continue
            tier = LOCAL if copy.tier == LOCAL else MEMORY
            name = f"{self.node}, {tier}"
            try:
                why = await in_thread(filling.from_file, name, copy.path, part, tier)
            finally:
                self.copies.release(copy)
            if why:
                self.distrust(copy, why)


# ---- verifying again

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


# ---- what the machine asks for


@dataclass
class Going:
    """A task that is running. `stop` is set once nobody needs it; `manifests` are of the images found."""

    stop: threading.Event = field(default_factory=threading.Event)
    manifests: list[Manifest] = field(default_factory=list)
    filling: Filling | None = None


async def find(gathering: Gatherer, going: Going, effect: do.FindImages) -> Found:
    why, slot = list[str](), 0
    for one in effect.wanted:
        key = ImageId(effect.step, effect.attempt, one.rank)
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
    reserving = background.start(in_thread(buffer.reserve, start, end), background.to_its_awaiter)
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
    return room_of(manifest) + 3 * HEADROOM_BYTES


def _add_manifest(copy: StoredCopy, buffer: MappedBuffer) -> int:
    """Write the manifest after the image, without hashes if there is no room for them. Return its bytes, or 0
    if there is no room."""
    start = copy.manifest.size_bytes
    for data in (copy.manifest_bytes, replace(copy.manifest, blocks={}).to_bytes()):
        if start + len(data) <= buffer.capacity:
            buffer.map[start : start + len(data)] = data
            return len(data)
    return 0
