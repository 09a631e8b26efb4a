"""The keeper: what a node's agent holds of checkpoints, in memory that outlives the ranks.

A rank writes an image into a free slot; the keeper hashes it, holds it, serves it to other agents, lends it
to the drainer, and gives the slot back when the supervisor says that a newer step is safe. It pulls replicas
of other nodes' images, and before an attempt starts it brings what its ranks restore into their slots.

All of it runs in the agent's loop; what takes time runs in threads, which touch only what they were given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER
from jurymast.core.checkpoints.foresight import Room
from jurymast.keeper import limits, scrub
from jurymast.keeper.buffers import Buffer
from jurymast.keeper.copies import Copies, Copy, Key, local_copies
from jurymast.keeper.fetch import Filling
from jurymast.keeper.gathering import Gathering, Source
from jurymast.keeper.limits import Refused
from jurymast.keeper.loans import Loan, lend
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.keeper.memory import Memory
from jurymast.keeper.page import RankRecord, Restore, SlotWord, Word, create_page
from jurymast.keeper.replicas import Replicas
from jurymast.keeper.restoring import Plan, Restoring
from jurymast.keeper.serve import Server
from jurymast.keeper.slots import RankSlots, Slot, State
from jurymast.keeper.threads import in_thread

SCAN_LIMIT_S = 5.0

Tell = Callable[[msg.FromKeeper], None]


class Keeper:
    """`tell` passes a message on to the supervisor, `room` says how much memory can be had. Usable after
    `start`."""

    def __init__(
        self,
        secret: bytes,
        node: str,
        ranks_per_node: int,
        tell: Tell,
        *,
        local_root: Path | None = None,
        room: Callable[[], Room] = limits.room,
    ) -> None:
        self._secret = secret
        self.node = node
        self.tell = tell
        self.attempt = 0
        self.port = 0
        self.copies = Copies(self._in_loop)
        self.memory = Memory(room)
        self._page_fd, self._page = create_page(ranks_per_node)
        self.ranks = [RankSlots(RankRecord(self._page, local), local) for local in range(ranks_per_node)]
        self._local_root = local_root
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.gathering = Gathering(self.copies, secret, node, self.distrust)
        self.filling: set[Buffer] = set()  # being written by a thread of ours
        self._restoring: Restoring | None = None
        self._replicas = Replicas(self)
        self._committed = (0, -1)  # (attempt, step): of two states the newer one compares greater
        self._void: set[tuple[int, int]] = set()  # (step, attempt)
        self._unwanted: set[Key] = set()  # rolled back: what the disk has of them is not looked at

    async def start(self) -> None:
        """Serve other agents, look at the local disk, and re-read what is held from now on."""
        self._loop = asyncio.get_running_loop()
        self._server = Server(self.copies, self._secret, lambda copy: self._in_loop(lambda: self.doubt(copy)))
        self.port = self._server.port
        self.spawn(scrub.forever(self.copies, self.distrust))
        if self._local_root is not None:
            try:
                await asyncio.wait_for(self._scan(self._local_root), SCAN_LIMIT_S)
            except asyncio.TimeoutError:
                pass  # a disk that hangs has nothing for us

    async def close(self) -> None:
        tasks = list(self._tasks)
        if self._restoring is not None:
            self._restoring.stop.set()
        self._replicas.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for buffer in self._buffers():
            buffer.close()
        self.memory.close()
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1

    @property
    def page_path(self) -> str:
        """Where ranks open the page with their words."""
        return f"/proc/{os.getpid()}/fd/{self._page_fd}"

    def inventory(self) -> list[msg.CopyReport]:
        """All copies held, as the supervisor is told of them."""
        return [copy.said() for copy in self.copies]

    def room(self) -> Room:
        """What this node can give to checkpoints, with what it gives now."""
        taken = sum(buffer.allocated for buffer in self._buffers()) + self.memory.idle_bytes
        room = self.memory.room()
        return Room(room.free + taken, room.limit)

    # ---- an attempt

    def launch(self, attempt: int, ranks: list[int], world: int, restore: msg.Restore | None) -> None:
        """The ranks of earlier attempts are dead, those of this one (`ranks` by local rank) about to start.

        Without `restore` nothing in memory is of use: they will save other states under the same steps.
        """
        if self._restoring is not None:
            self._restoring.stop.set()
        self.attempt = attempt
        self._void.clear()
        plan = Plan.of(restore) if restore else None
        self._give_up_for(plan)
        for local, mine in enumerate(self.ranks):
            mine.begin(ranks[local] if local < len(ranks) else -1)
            for slot in mine.slots:
                if slot.copy is not None and slot.copy.manifest.rank != mine.rank:
                    slot.detach()  # another rank's now; it is held all the same, for whoever has that rank
                self._settle(slot)
        self._restoring = Restoring(self, attempt, plan, world)
        for mine in self.ranks:
            if mine.rank >= 0 and plan is not None and mine.rank in plan.sources:
                self._restoring.begin(mine)
            else:
                mine.record[Word.RESTORE] = Restore.ELSEWHERE

    def _give_up_for(self, plan: Plan | None) -> None:
        """Only what is restored, and the newest that is safe, are still of use."""
        wanted = {self._committed} if plan is not None else set()
        if plan is not None:
            wanted.add((plan.attempt, plan.step))
            self._committed = (plan.attempt, plan.step)
        else:
            self._committed = (0, -1)
            self._replicas.stop()
        for copy in self.copies:
            unused = (copy.manifest.attempt, copy.manifest.step) not in wanted
            if (copy.tier == MEMORY and unused) or (copy.tier == PEER and plan is None):
                self.drop(copy, say=plan is not None)

    def look(self) -> None:
        """See what ranks have published or asked for since; cheap."""
        for mine in self.ranks:
            if mine.rank < 0:
                continue
            for slot in mine.slots:
                if slot.published:
                    self._take(mine, slot, 0.0)
            if not mine.growing and (want := mine.wish()):
                mine.growing = True
                self.spawn(self._grow(mine, want))

    def image_published(self, local_rank: int, slot: int, stall_s: float) -> None:
        """A rank says so; `stall_s`: how long its training stood still for it."""
        if 0 <= local_rank < len(self.ranks) and 0 <= slot < len(self.ranks[local_rank].slots):
            place = self.ranks[local_rank].slots[slot]
            place.stall_s = stall_s  # also when `look` saw the image first
            if place.published:
                self._take(self.ranks[local_rank], place, stall_s)

    def _take(self, mine: RankSlots, slot: Slot, stall_s: float) -> None:
        slot.state, slot.stall_s = State.TAKING, stall_s
        assert slot.buffer is not None
        self.spawn(self._hash(mine.rank, slot, slot.buffer))

    async def _hash(self, rank: int, slot: Slot, buffer: Buffer) -> None:
        words = slot.record
        size, step = words[SlotWord.IMAGE], words[SlotWord.STEP]
        copy, why = None, ""
        try:
            copy = await in_thread(_read_image, buffer, size, words[SlotWord.MANIFEST], step, rank)
        except BadImage as error:
            why = str(error)
        if slot.buffer is not buffer:  # the slot was needed for a restore meanwhile
            self.recycle(buffer)
        elif copy is None or not self._counts(copy.manifest):
            slot.free()
            self._settle(slot)
            if why:
                bad = Manifest(step, self.attempt, rank, len(self.ranks), "", max(0, size), 0)
                self.tell(msg.Dropped(copy=Copy(bad, MEMORY, ALL, buffer).said(), why=why))
        else:
            slot.state = State.HELD
            slot.copy, copy.stall_s = copy, slot.stall_s
            self.hold(copy)

    def _counts(self, manifest: Manifest) -> bool:
        """False for an image of ranks that are dead, of a step that cannot be complete, or of one passed."""
        if manifest.attempt != self.attempt or (manifest.step, manifest.attempt) in self._void:
            return False
        return (manifest.attempt, manifest.step) >= self._committed

    # ---- memory for slots

    async def _grow(self, mine: RankSlots, want: int) -> None:
        """Two slots of the size that the rank wants, or what lacks of them."""
        attempt, lacking = self.attempt, mine.lacking(want)
        active = [one for one in self.ranks if one.rank >= 0]
        # What the others will want as well: better to refuse now than half-way.
        unserved = [one for one in active if one is not mine and not one.growing and one.lacking(1)]
        each = f" for each of {len(active)} ranks" if len(active) > 1 else ""
        asked = f"two slots of {limits.size(want)}{each}{self._besides()}"
        taken: list[Buffer] = []
        try:
            also = sum(len(one.lacking(1)) for one in unserved) * want
            taken = await self.memory.take(len(lacking), want, asked, also=also)
            for buffer in taken:
                await self.memory.reserve(buffer)
            if attempt == self.attempt:
                for slot in mine.lacking(want):
                    if taken:
                        old, slot.following = slot.following, taken.pop()
                        if old is not None:
                            self.recycle(old)
                        self._settle(slot)
        except Refused as refused:
            if attempt == self.attempt:
                mine.refused = want
                mine.record[Word.REFUSED] = 1
            self.tell(msg.Refused(why=f"{refused}. Until then all ranks save to shared storage"))
        finally:
            mine.growing = False
            for buffer in taken:
                self.recycle(buffer)

    def _besides(self) -> str:
        held = sum(copy.place.allocated for copy in self.copies if isinstance(copy.place, Buffer))
        return f" (besides {limits.size(held)} of checkpoints held here)" if held else ""

    def _settle(self, slot: Slot) -> None:
        """A larger buffer that was waiting for this slot gets in, if it is free."""
        if slot.following is None or slot.state not in (State.EMPTY, State.FREE):
            return
        old = None
        if slot.state is State.FREE:
            old = slot.withdraw()
            if old is None:
                return  # the rank is writing: when that image goes
        slot.offer(slot.following)
        slot.following = None
        if old is not None:
            self.recycle(old)

    def recycle(self, buffer: Buffer) -> None:
        """Nobody uses it any more, except maybe readers."""
        held = sum(copy.tier != LOCAL for copy in self.copies)
        self.copies.when_idle(buffer, lambda: self.memory.give_back(buffer, max(held, len(self.ranks))))

    # ---- what is held

    def hold(self, copy: Copy) -> Copy:
        """It counts from now on."""
        copy.verified_at = scrub.now()
        self.copies.add(copy)
        self.tell(msg.Held(copies=(copy.said(),)))
        return copy

    def drop(self, copy: Copy, why: str = "", *, say: bool = True) -> None:
        """It counts no more; its memory is free when the last reader is done."""
        self.copies.remove(copy)
        slot = self.slot_of(copy)
        if slot is not None:
            slot.state, slot.copy, buffer = State.LEAVING, None, slot.buffer
            assert buffer is not None
            self.copies.when_idle(buffer, lambda: self._left(slot, buffer))
        elif isinstance(copy.place, Buffer) and copy.place not in self.filling:
            self.recycle(copy.place)
        if say:
            self.tell(msg.Dropped(copy=copy.said(), why=why))

    def _left(self, slot: Slot, buffer: Buffer) -> None:
        if slot.buffer is buffer and slot.state is State.LEAVING:
            slot.free()
            self._settle(slot)
        elif slot.buffer is not buffer:
            self.recycle(buffer)

    def slot_of(self, copy: Copy) -> Slot | None:
        return next((slot for mine in self.ranks for slot in mine.slots if slot.copy is copy), None)

    def distrust(self, copy: Copy, why: str) -> None:
        """Its bytes are not what they were when it was taken: then it is no copy."""
        if copy in self.copies:
            self.drop(copy, why)

    def doubt(self, copy: Copy) -> None:
        """Another agent got bytes from it that were wrong, or became so on the way: read it again."""
        self.spawn(scrub.read_again(self.copies, copy, self.distrust))

    def committed(self, step: int, attempt: int) -> None:
        """This state is safe: older ones, and those of earlier attempts, may go."""
        self._committed = max(self._committed, (attempt, step))
        for copy in self.copies:
            if copy.tier != LOCAL and (copy.manifest.attempt, copy.manifest.step) < self._committed:
                self.drop(copy, say=False)

    def void(self, step: int, attempt: int) -> None:
        """Some rank could not save this step, so it will never be complete."""
        self._void.add((step, attempt))
        for copy in self.copies:
            if copy.tier != LOCAL and copy.key[:2] == (step, attempt):
                self.drop(copy, say=False)

    def forget(self, step: int, attempt: int, ranks: Iterable[int]) -> None:
        """Drop replicas of these images."""
        for rank in ranks:
            key = (step, attempt, rank)
            self._replicas.stop(key)
            for copy in self.copies.find(key, (PEER,)):
                self.drop(copy, say=False)

    def forget_newer(self, step: int) -> None:
        """The run goes back to `step`: nothing newer is restored, from wherever."""
        for copy in self.copies:
            if copy.manifest.step > step:
                self._unwanted.add(copy.key)
                self.drop(copy, say=False)
        if self._committed[1] > step:
            self._committed = (0, -1)

    def replicate(self, order: msg.Replicate) -> None:
        """Hold a part of another node's image here."""
        self._replicas.order(order)

    # ---- the drainer

    async def lend(self, step: int, attempt: int, rank: int) -> Loan | None:
        """The whole image for the drainer; None when it is not here."""
        return await lend(self, (step, attempt, rank))

    def scan_local(self, root: Path) -> None:
        """See what has come to the local disk, or gone from it, and tell."""
        self.spawn(self._scan(root))

    async def _scan(self, root: Path) -> None:
        try:
            found = {copy.key: copy for copy in await in_thread(local_copies, root)}
        except OSError:
            return  # the disk is in trouble: what is known of it will show when it is used
        known = {copy.key: copy for copy in self.copies if copy.tier == LOCAL}
        for key in known.keys() - found.keys():
            self.drop(known[key])
        fresh = [found[key] for key in sorted(found.keys() - known.keys() - self._unwanted)]
        for copy in fresh:
            self.copies.add(copy)
        if fresh:
            self.tell(msg.Held(copies=tuple(copy.said() for copy in fresh)))

    # ---- helpers

    async def fill(
        self, filling: Filling, extent: tuple[int, int], key: Key, sources: Sequence[Source]
    ) -> None:
        """Take the memory for `extent` of the buffer, and at the same time fetch into it. Raises Refused,
        when nobody writes into the buffer any more."""
        reserving = asyncio.ensure_future(self.memory.reserve(filling.buffer, extent))
        try:
            await self.gathering.fill(filling, key, sources)
        except BaseException:
            reserving.cancel()
            raise
        await reserving

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the keeper is at fault", "exception": error, "task": task}
            )

    def _in_loop(self, then: Callable[[], None]) -> None:
        """From any thread."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(then)
            except RuntimeError:
                pass  # the loop is closed, and the agent with it

    def _buffers(self) -> set[Buffer]:
        found = {copy.place for copy in self.copies if isinstance(copy.place, Buffer)} | self.filling
        for mine in self.ranks:
            for slot in mine.slots:
                found |= {one for one in (slot.buffer, slot.following) if one is not None}
        return found


def _read_image(buffer: Buffer, size: int, manifest_size: int, step: int, rank: int) -> Copy:
    """An image and the manifest that lies behind it, with hashes made now. Raises BadImage."""
    if size < 0 or manifest_size < 0 or size + manifest_size > buffer.capacity:
        raise BadImage("it does not fit into its slot")
    manifest = Manifest.from_bytes(bytes(buffer.view(size, size + manifest_size)))
    if (manifest.step, manifest.rank, manifest.size_bytes) != (step, rank, size):
        raise BadImage("its manifest is another image's")
    if not 0 <= manifest.common_bytes <= size:
        raise BadImage("its manifest is damaged: a part is larger than the whole")
    return Copy(manifest.with_blocks(buffer.view(0, size)), MEMORY, ALL, buffer)
