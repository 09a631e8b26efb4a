"""Parts of other nodes' images, held here in case that node dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jurymast.keeper import limits
from jurymast.keeper.copies import ALL, MEMORY, PEER, Copy, Key
from jurymast.keeper.fetch import Filling
from jurymast.keeper.gathering import Source
from jurymast.keeper.limits import Refused
from jurymast.keeper.manifest import Manifest
from jurymast.keeper.threads import in_thread

if TYPE_CHECKING:
    from jurymast.keeper.keeper import Keeper

AT_ONCE = 2


class Replicas:
    """A replica counts when all of it is here and verified; until then every older one stays."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._running: dict[tuple[Key, str], threading.Event] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def order(self, order: dict[str, Any]) -> None:
        """{"step", "attempt", "rank", "part", "sources": [source, ...]}, tried in that order."""
        key: Key = (int(order["step"]), int(order["attempt"]), int(order["rank"]))
        part = str(order["part"])
        sources = [Source.of(one, key[2]) for one in order["sources"]]
        here = [copy for copy in self._keeper.copies.find(key, (MEMORY, PEER)) if copy.part in (ALL, part)]
        if here:
            self._keeper.tell({"say": "held", "copies": [copy.said() for copy in here]})
        elif (key, part) not in self._running:
            stop = self._running[key, part] = threading.Event()
            self._keeper.spawn(self._pull(key, part, sources, stop))

    def stop(self, key: Key | None = None) -> None:
        """Give up what is under way, of one image or all."""
        for (one, _), event in self._running.items():
            if key in (None, one):
                event.set()

    async def _pull(self, key: Key, part: str, sources: Sequence[Source], stop: threading.Event) -> None:
        why: list[str] = []
        try:
            async with self._at_once:
                found = await self._keeper.gathering.manifest(key, sources, why)
                if found is not None and not stop.is_set():
                    await self._fill(key, part, *found, sources, stop, why)
        except Refused as refused:
            self._keeper.tell({"say": "refused", "why": str(refused)})
            why.append(str(refused))
        finally:
            del self._running[key, part]
        if why and not stop.is_set() and not self._holds(key, part):
            step, attempt, rank = key
            self._keeper.tell(
                {
                    "say": "unreplicated", "step": step, "attempt": attempt, "rank": rank, "part": part,
                    "why": "; ".join(why),
                }
            )  # fmt: skip

    def _holds(self, key: Key, part: str) -> bool:
        return any(copy.part in (ALL, part) for copy in self._keeper.copies.find(key, (MEMORY, PEER)))

    async def _fill(
        self,
        key: Key,
        part: str,
        manifest: Manifest,
        capacity: int,
        sources: Sequence[Source],
        stop: threading.Event,
        why: list[str],
    ) -> None:
        keeper = self._keeper
        # It may become a slot; but memory is taken only for this part.
        size = slot_bytes(manifest, capacity)
        start, end = (0, manifest.size_bytes) if part == ALL else manifest.extent(part)
        asked = f"a replica of rank {key[2]}, {limits.size(end - start)}"
        (buffer,) = await keeper.memory.take(1, size, asked, extent=(start, end))
        keeper.filling.add(buffer)
        held = False
        try:
            filling = Filling(manifest, buffer, part, stop=stop)
            await keeper.fill(filling, (start, end), key, sources)
            why += filling.passed_over
            if filling.complete:
                copy = await in_thread(Copy, manifest, PEER, part, buffer)
                held = not stop.is_set()
                if held:
                    keeper.hold(copy)
        finally:
            keeper.filling.discard(buffer)
            if not held:
                keeper.recycle(buffer)


def slot_bytes(manifest: Manifest, capacity: int) -> int:
    """How large a buffer should be that is to become a slot: as large as the one the image has elsewhere
    (`capacity`), else with some room for the next image to grow. The manifest goes behind the image."""
    if capacity:
        return max(manifest.size_bytes, capacity)
    values = sum(item.length for item in manifest.items if not item.is_tensor)
    return manifest.size_bytes + values + 2 * len(manifest.to_bytes()) + (4 << 20)
