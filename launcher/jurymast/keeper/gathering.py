"""Slow work on images, outside the agent's event loop: finds their manifests, fetches their bytes from copies
on this node or others as `core.keeper.restores` decides, and verifies copies again, to find flipped bits
before a copy is needed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jurymast import background
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.restores import Filled, Found, usable, whom_to_ask
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, LOCAL, MEMORY, PEER, ImageId
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper.copies import CopyTable, StoredCopy, report_of
from jurymast.keeper.manifest import (
    HEADROOM_BYTES,
    BadImage,
    Manifest,
    blocks_of,
    is_intact,
    room_of,
)
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.transfer import ImageFetch, manifest_of
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
        self, key: ImageId, sources: Sequence[msg.Source], passed_over: list[str]
    ) -> tuple[Manifest, int] | None:
        """Return (the image's manifest, the capacity of its buffer or 0) from this node or any source, or
        None."""
        here = self.copies.manifest(key)
        if here is not None:
            return here
        for source in whom_to_ask(self.node, key.rank, sources):
            try:
                return await in_thread(manifest_of, source, self.access, key)
            except (OSError, AuthenticationError, ProtocolError, BadImage) as error:
                passed_over.append(f"{source.node}: {error or type(error).__name__}")
        return None

    async def fill(self, filling: ImageFetch, key: ImageId, sources: Sequence[msg.Source]) -> None:
        """Fill until nothing is missing or no source is left. A common part may come from another rank's
        image: its hashes show whether it is the same."""
        for source in usable(sources, lambda: filling.lacking):
            if filling.stop.is_set():
                return
            theirs = ImageId(key.step, key.attempt, source.rank)
            if source.node == self.node:
                await self._from_here(filling, theirs, source.part)
            else:
                await in_thread(filling.from_peer, source, self.access, theirs, source.part, PEER)

    async def _from_here(self, filling: ImageFetch, key: ImageId, part: str) -> None:
        found = [copy for copy in self.copies.find(key) if copy.part in (ALL, part)]
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
    """A task that is running. `stop` is set once nobody needs it; `manifest` is that of the image found."""

    stop: threading.Event = field(default_factory=threading.Event)
    manifest: Manifest | None = None
    filling: ImageFetch | None = None


async def find(gathering: Gatherer, going: Going, effect: do.FindImage) -> Found:
    why = list[str]()
    found = await gathering.manifest(effect.image, effect.sources, why)
    if found is None or going.stop.is_set():
        return Found(None, passed_over=tuple(why))
    going.manifest, capacity = found
    return Found(report_of(going.manifest, PEER, ALL), slot_bytes(going.manifest, capacity), tuple(why))


async def verify(copies: CopyTable, going: Going, effect: do.Verify) -> bool:
    """Hash a held copy again; return False if it is corrupt or no longer held."""
    copy = effect.copy
    assert isinstance(copy, StoredCopy)
    assert isinstance(copy.place, MappedBuffer)
    if not copies.read(copy):
        return False
    try:
        going.filling = ImageFetch(copy.manifest, copy.place, stop=going.stop)
        return await in_thread(going.filling.keep, copy.part, MEMORY)
    finally:
        copies.release(copy)


async def fetch(gathering: Gatherer, going: Going, effect: do.Fetch, buffer: MappedBuffer) -> Filled:
    filling = going.filling
    if filling is None:
        assert going.manifest is not None, "nothing is fetched before it is found"
        filling = ImageFetch(going.manifest, buffer, effect.part, stop=going.stop)
    filling_it = gathering.fill(filling, effect.image, effect.sources)
    why = await _reserve_and(filling_it, buffer, effect.start, effect.end)
    copy, behind = None, 0
    if filling.complete and not why:
        copy = await in_thread(StoredCopy, filling.manifest, effect.tier, effect.part, buffer)
        behind = await in_thread(_add_manifest, copy, buffer) if effect.behind else 0
    passed_over = tuple(filling.passed_over)
    return Filled(copy, behind, filling.got, passed_over, why, buffer.allocated)


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
