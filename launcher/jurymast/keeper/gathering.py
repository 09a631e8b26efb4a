"""Fetches an image's bytes from copies on this node or others, as `core.keeper.restores` decides.

Also makes the XOR of one part of several ranks' images, and rebuilds a lost rank's part from it. An XOR is
laid out like an image: block i of its common part is the XOR of block i of all common parts, shorter ones
padded with zeros, and the same holds for its own part. So every block that goes in or comes out is verified
by the manifest of the image or XOR that it belongs to.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER
from jurymast.core.keeper.copies import Image as Key
from jurymast.core.keeper.restores import Ingredient, ingredients, usable, whom_to_ask
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper.copies import CopyTable, Group, StoredCopy
from jurymast.keeper.fetch import Filling, manifest_of
from jurymast.keeper.manifest import BadImage, Block, Manifest, blocks_of
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.threads import in_thread
from jurymast.wire.shield import Access

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
                scratch.close()

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


async def rebuild(gathering: Gatherer, filling: Filling, key: Key, source: msg.Source) -> None:
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


@dataclass(frozen=True)
class Gatherer:
    """Fetches images for the agent's loop; threads do the work. `distrust` is called with bad copies of this
    node."""

    copies: CopyTable
    access: Access
    node: str
    distrust: Callable[[StoredCopy, str], None]

    async def manifest(
        self, key: Key, sources: Sequence[msg.Source], passed_over: list[str], group: Group = ()
    ) -> tuple[Manifest, int] | None:
        """Return (the image's manifest, the capacity of its buffer or 0) from this node or any source, or
        None; with a `group`, those of the group's XOR."""
        here = self.copies.manifest(key, group)
        if here is not None:
            return here
        for source in whom_to_ask(self.node, key[2], sources):
            try:
                return await in_thread(manifest_of, source, self.access, key, group)
            except (OSError, AuthenticationError, ProtocolError, BadImage) as error:
                passed_over.append(f"{source.node}: {error or type(error).__name__}")
        return None

    async def fill(self, filling: Filling, key: Key, sources: Sequence[msg.Source]) -> None:
        """Fill until nothing is missing or no source is left. A common part may come from another rank's
        image: its hashes show whether it is the same."""
        for source in usable(sources, lambda: filling.lacking):
            if filling.stop.is_set():
                return
            theirs = (key[0], key[1], source.rank)
            if source.group and not filling.group:
                await rebuild(self, filling, key, source)
            elif source.node == self.node:
                await self._from_here(filling, theirs, source.part)
            else:
                await in_thread(filling.from_peer, source, self.access, theirs, source.part, PEER)

    async def _from_here(self, filling: Filling, key: Key, part: str) -> None:
        found = [copy for copy in self.copies.find(key, group=filling.group) if copy.part in (ALL, part)]
        if not found:
            filling.passed_over.append(f"{self.node}: not held here (any more)")
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
