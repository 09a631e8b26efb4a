"""Slow work on images, outside the agent's event loop: finds their manifests, fetches their bytes from copies
on this node or others as `core.keeper.restores` decides, and verifies copies again, to find flipped bits
before a copy is needed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jurymast import background
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.restores import Filled, Found, usable, whom_to_ask
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, LOCAL, MEMORY, PEER, ImageId
from jurymast.keeper.copies import CopyTable, StoredCopy, report_of
from jurymast.keeper.io import KeeperIo
from jurymast.keeper.manifest import (
    HEADROOM_BYTES,
    Block,
    Manifest,
    blocks_of,
    is_intact,
    room_of,
)
from jurymast.keeper.memory import ImageBuffer
from jurymast.keeper.transfer import BROKEN, STREAMS, ImageFetch, manifest_of, text_of

# Each copy in memory is verified again this often, at most so late, with this share of a core.
SCRUB_EVERY_S, SCRUB_LOOK_S, SCRUB_SHARE = 600.0, 1.0, 0.1


@dataclass
class Going:
    """A task that is running. `stop` is set once nobody needs it; `manifest` is that of the image found."""

    stop: threading.Event = field(default_factory=threading.Event)
    manifest: Manifest | None = None
    filling: ImageFetch | None = None


@dataclass(frozen=True)
class Gatherer:
    """Fetches and verifies images for the agent's loop; threads do the work. `distrust` is called with bad
    copies of this node."""

    io: KeeperIo
    copies: CopyTable
    distrust: Callable[[StoredCopy, str], None]

    async def find(self, going: Going, effect: do.FindImage) -> Found:
        why = list[str]()
        here = self.copies.manifest(effect.image)
        found = here or await self._manifest(effect.image, effect.sources, why)
        if found is None or going.stop.is_set():
            return Found(None, passed_over=tuple(why))
        going.manifest, capacity = found
        return Found(report_of(going.manifest, PEER, ALL), slot_bytes(going.manifest, capacity), tuple(why))

    async def _manifest(
        self, key: ImageId, sources: Sequence[msg.Source], passed_over: list[str]
    ) -> tuple[Manifest, int] | None:
        """Return (the image's manifest, the capacity of its buffer or 0) from any source, or None."""
        for source in whom_to_ask(self.io.node, key.rank, sources):
            try:
                return await self.io.with_keeper(source, lambda one: manifest_of(one, self.io.ways, key))
            except BROKEN as error:
                passed_over.append(f"{source.node}: {text_of(error)}")
        return None

    async def verify(self, going: Going, effect: do.Verify) -> bool:
        """Hash a held copy again; return False if it is corrupt or no longer held."""
        copy = effect.copy
        assert isinstance(copy, StoredCopy)
        assert copy.memory is not None
        if not self.copies.read(copy):
            return False
        try:
            going.filling = ImageFetch(copy.manifest, copy.memory, stop=going.stop)
            return await self.io.in_thread(going.filling.keep, copy.part, MEMORY)
        finally:
            self.copies.release(copy)

    async def fetch(self, going: Going, effect: do.Fetch, buffer: ImageBuffer) -> Filled:
        filling = going.filling
        if filling is None:
            assert going.manifest is not None, "nothing is fetched before it is found"
            filling = ImageFetch(going.manifest, buffer, effect.part, stop=going.stop)
        reserving = self.io.in_thread(buffer.reserve, effect.start, effect.end)
        why = await _reserved(reserving, self._fill(filling, effect.image, effect.sources))
        copy, behind = None, 0
        if filling.complete and not why:
            copy = await self.io.in_thread(StoredCopy, filling.manifest, effect.tier, effect.part, buffer)
            behind = await self.io.in_thread(_add_manifest, copy, buffer) if effect.behind else 0
        passed_over = tuple(filling.passed_over)
        return Filled(copy, behind, filling.got, passed_over, why, buffer.allocated)

    async def _fill(self, filling: ImageFetch, key: ImageId, sources: Sequence[msg.Source]) -> None:
        """Fill until nothing is missing or no source is left. A common part may come from another rank's
        image: its hashes show whether it is the same."""
        for source in usable(sources, lambda: filling.lacking):
            if filling.stop.is_set():
                return
            theirs = ImageId(key.step, key.attempt, source.rank)
            if source.node == self.io.node:
                await self._from_here(filling, theirs, source.part)
            else:
                await self.from_keeper(filling, source, theirs)

    async def _from_here(self, filling: ImageFetch, key: ImageId, part: str) -> None:
        found = [copy for copy in self.copies.find(key) if copy.part in (ALL, part)]
        if not found:
            filling.passed_over.append(f"{self.io.node}: not held")
        for copy in found:
            if copy.place is filling.buffer or not self.copies.read(copy):
                continue
            tier = LOCAL if copy.tier == LOCAL else MEMORY
            name = f"{self.io.node}, {tier}"
            try:
                why = await self.io.in_thread(filling.from_copy, name, copy, part, tier)
            finally:
                self.copies.release(copy)
            if why:
                self.distrust(copy, why)

    async def from_keeper(self, filling: ImageFetch, source: msg.Source, key: ImageId) -> None:
        """Fetch missing blocks of the image `key` from the source's node. Returns once all are fetched or the
        connections have failed."""
        wanted = filling.wanted(source.part)
        queue, good, reasons = deque(wanted), list[Block](), list[str]()

        async def pull() -> None:
            try:
                reasons.extend(
                    await self.io.with_keeper(
                        source, lambda one: filling.pull(one, self.io.ways, key, queue, good)
                    )
                )
            except BROKEN as error:
                reasons.append(text_of(error))

        await asyncio.gather(*(pull() for _ in range(min(STREAMS, len(wanted)))))
        if filling.take(good, PEER) < len(wanted):
            filling.passed_over.append(f"{source.node}: {reasons[0] if reasons else 'interrupted'}")

    async def scrub(self, every_s: float = SCRUB_EVERY_S) -> None:
        """Verify each copy in memory once in `every_s` seconds, one after another."""
        loop = asyncio.get_running_loop()
        while True:
            held = [one for one in self.copies if one.memory is not None]
            oldest = min(held, key=lambda one: one.verified_at, default=None)
            # What comes meanwhile is verified later than this.
            due_s = every_s if oldest is None else oldest.verified_at + every_s - loop.time()
            if oldest is not None and due_s <= 0.0:
                await self.read_again(oldest, SCRUB_SHARE)
            else:
                await asyncio.sleep(max(due_s, SCRUB_LOOK_S))

    async def read_again(self, copy: StoredCopy, share: float = 1.0) -> None:
        """Hash a copy again, using `share` of a core; `distrust` it at the first block that is wrong.

        It is a reader for only one block at a time, so that freeing a slot does not wait for it.
        """
        loop = asyncio.get_running_loop()
        if copy.memory is None:
            return
        for block in blocks_of(copy.manifest, copy.part):
            started = loop.time()
            if not self.copies.read(copy):
                return
            try:
                good = await self.io.in_thread(is_intact, copy.memory, block)
            finally:
                self.copies.release(copy)
            if not good:
                self.distrust(copy, f"the block at {block.at} of the {block.part} part is corrupt in memory")
                return
            await asyncio.sleep((loop.time() - started) * (1 / share - 1))
        copy.verified_at = loop.time()


async def _reserved(reserve: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> str:
    """Take the memory for a part of a buffer while `work` fetches into it. Once nobody writes into the buffer
    any more, return why the kernel has no memory, or ""."""
    reserving = background.start(reserve, background.to_its_awaiter)
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


def _add_manifest(copy: StoredCopy, buffer: ImageBuffer) -> int:
    """Write the manifest after the image, without hashes if there is no room for them. Return its bytes, or 0
    if there is no room."""
    start = copy.manifest.size_bytes
    for data in (copy.manifest_bytes, replace(copy.manifest, blocks={}).to_bytes()):
        if start + len(data) <= buffer.capacity:
            buffer.write(start, data)
            return len(data)
    return 0
