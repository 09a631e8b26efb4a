"""Parts of other nodes' images, or the XOR of several, held here in case one of those nodes dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, MEMORY, PEER
from jurymast.keeper import limits, parity
from jurymast.keeper.copies import Copy, Group, Key
from jurymast.keeper.fetch import Filling
from jurymast.keeper.gathering import Source, members_of
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
        self._running: dict[tuple[Key, str, Group], threading.Event] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def order(self, order: msg.Replicate) -> None:
        key: Key = (order.step, order.attempt, order.rank)
        part, group = order.part, tuple(sorted(order.group))
        sources, members = [Source.of(one) for one in order.sources], dict(members_of(order.members))
        here = self._found(key, part, group)
        if here:
            self._keeper.tell(msg.Held(copies=tuple(copy.said() for copy in here)))
        elif (key, part, group) not in self._running:
            stop = self._running[key, part, group] = threading.Event()
            why: list[str] = []
            if group:
                theirs = {rank: members[rank] for rank in group}
                work = self._mix(key, part, theirs, stop, why)
            else:
                work = self._copy(key, part, sources, stop, why)
            self._keeper.spawn(self._hold(key, part, group, work, stop, why))

    def _found(self, key: Key, part: str, group: Group) -> list[Copy]:
        found = self._keeper.copies.find(key, (MEMORY, PEER), group)
        return [copy for copy in found if copy.part in (ALL, part)]

    def stop(self, key: Key | None = None) -> None:
        """Give up what is under way, of one image or all."""
        for (one, _, _), event in self._running.items():
            if key in (None, one):
                event.set()

    async def _hold(
        self,
        key: Key,
        part: str,
        group: Group,
        work: Coroutine[Any, Any, None],
        stop: threading.Event,
        why: list[str],
    ) -> None:
        """Tells what comes of `work`, which says in `why` what it had to pass over."""
        try:
            async with self._at_once:
                await work
        except Refused as refused:
            self._keeper.tell(msg.Refused(why=str(refused), group=group))
            why.append(str(refused))
        finally:
            work.close()
            del self._running[key, part, group]
        if why and not stop.is_set() and not self._found(key, part, group):
            step, attempt, rank = key
            self._keeper.tell(
                msg.Unreplicated(
                    step=step, attempt=attempt, rank=rank, part=part, why="; ".join(why), group=group
                )
            )  # fmt: skip

    async def _copy(
        self, key: Key, part: str, sources: Sequence[Source], stop: threading.Event, why: list[str]
    ) -> None:
        """Raises Refused."""
        found = await self._keeper.gathering.manifest(key, sources, why)
        if found is not None and not stop.is_set():
            await self._fill(key, part, *found, sources, stop, why)

    async def _mix(
        self,
        key: Key,
        part: str,
        members: Mapping[int, Sequence[Source]],
        stop: threading.Event,
        why: list[str],
    ) -> None:
        """Raises Refused."""
        keeper, taken = self._keeper, []
        for rank, sources in members.items():
            theirs = (key[0], key[1], rank)
            found = await keeper.gathering.manifest(theirs, sources, why)
            if found is None or stop.is_set():
                why.append(f"nobody has the image of rank {rank}")
                return
            taken.append(parity.Ingredient(theirs, part, found[0], sources))
        manifests = tuple(one.manifest for one in taken)
        manifest = parity.empty(manifests, part)
        size = manifest.size_bytes
        asked = f"the parity of {len(taken)} ranks, {limits.size(size)}"
        (buffer,) = await keeper.memory.take(1, size, asked, extent=(0, size))
        keeper.filling.add(buffer)
        held = False
        try:
            await keeper.memory.reserve(buffer, (0, size))
            made = await parity.build(keeper.gathering, manifest, buffer, taken, stop, why)
            if made is not None and not stop.is_set():
                held = True
                keeper.hold(Copy(made, PEER, part, buffer, members=manifests))
        finally:
            keeper.filling.discard(buffer)
            if not held:
                keeper.recycle(buffer)

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
