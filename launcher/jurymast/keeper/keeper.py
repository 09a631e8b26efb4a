"""The keeper holds a node's images in the agent's memory, which outlives the ranks.

`core.keeper` decides; this module turns what happens to images into events, and carries out effects. All of
it runs in the agent's event loop. Slow work runs in threads, which touch only what they are given. What it
needs of the world comes from `io`, so that the simulator runs this very code.

Images are lent to storage processes, perhaps for minutes. If memory allows, a copy is lent, so that the rank
gets its slot back as soon as a newer step is safe.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurymast import background
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import SlotState
from jurymast.core.keeper.machine import KeeperMachine
from jurymast.core.keeper.restores import Filled, Found
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, MEMORY, ImageId
from jurymast.core.state.messages import Room
from jurymast.core.state.texts import memory_size
from jurymast.errors import never
from jurymast.keeper import memory
from jurymast.keeper.copies import CopyTable, StoredCopy, local_copies
from jurymast.keeper.gathering import Gatherer, Going
from jurymast.keeper.io import KeeperIo
from jurymast.keeper.manifest import (
    BadImage,
    Manifest,
    RankRecord,
    RestoreStatus,
    ShownImage,
    ShownImages,
    SlotRecord,
    SlotWord,
    Word,
)
from jurymast.keeper.memory import ImageBuffer


@dataclass(frozen=True)
class Loan:
    """Files that do not change until `give_back`. One file begins with the image. If it has only the image's
    own part, at the same offset, the file at `common_path` begins with the common part. `doubt`: who reads it
    has found it damaged."""

    path: str
    manifest: Manifest
    manifest_bytes: bytes
    give_back: Callable[[], None]
    doubt: Callable[[], None]
    common_path: str = ""


# The path of a lent file, and what gives it back.
_File = tuple[str, Callable[[], None]]


SCAN_LIMIT_S = 5.0

Tell = Callable[[msg.FromKeeper], None]


class Keeper:
    """Holds a node's images. `tell` sends a message to the supervisor. Call `start` before anything else."""

    # Gets the errors of what goes on in the background.
    failed: background.Failed = staticmethod(background.logged)

    def __init__(self, io: KeeperIo, tell: Tell, *, local_root: Path | None = None) -> None:
        self.io, self.tell = io, tell
        self.machine = KeeperMachine(io.node, len(io.records))
        self.copies = CopyTable(self._in_loop)
        self.buffers: dict[int, ImageBuffer] = {}
        self._local_root = local_root
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()  # of these
        self.gathering = Gatherer(io, self.copies, self.distrust)
        self._going = defaultdict[int, Going](Going)
        self._borrowers: dict[int, asyncio.Future[ImageBuffer | None]] = {}
        self.shown: list[StoredCopy] = []  # they do not change
        self._index: ImageBuffer | None = None  # what ranks read of them
        self._numbers = itertools.count(1)
        self._due: deque[do.Effect] = deque()
        self._acting = self._closed = False
        io.serve(self.copies, lambda copy: self._in_loop(lambda: self.doubt(copy)))

    async def start(self) -> None:
        """Find the images on the local disk, and begin to verify all held images repeatedly."""
        self._loop = asyncio.get_running_loop()
        self.spawn(self.gathering.scrub())
        if self._local_root is not None:
            try:
                await asyncio.wait_for(self._scan(self._local_root), SCAN_LIMIT_S)
            except asyncio.TimeoutError:
                pass  # images on a disk that hangs do not count

    def listen_at(self, address: str) -> None:
        """Serve other agents at this address as well. Raises OSError."""
        self.io.listen_at(address)

    async def close(self) -> None:
        tasks = list(self._tasks)
        self._closed = True
        for going in self._going.values():
            going.stop.set()
        for task in tasks:
            if task not in self._freeing:  # a task that is cancelled before its first step frees nothing
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._unshow()
        self.io.close()
        for buffer in self.buffers.values():
            buffer.close()

    @property
    def port(self) -> int:
        return self.io.port

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def inventory(self) -> tuple[msg.CopyReport, ...]:
        """Return reports of all copies held, for the supervisor."""
        return self.machine.inventory()

    def room(self) -> Room:
        """Return how much memory this node can give to checkpoints, including what it gives already."""
        taken = sum(buffer.allocated for buffer in self.buffers.values())
        room = self.io.room()
        return Room(room.free + taken, room.limit)

    # ---- events

    def launch(self, attempt: int, ranks: list[int], world: int, restore: msg.Restore | None) -> None:
        """Prepare for an attempt whose `ranks`, by local rank, are about to start. The ranks of earlier
        attempts are dead."""
        self.act(self.machine.on_launch(attempt, ranks, world, restore, self._now))

    def obey(self, order: msg.KeeperOrder) -> None:
        self.act(self.machine.on_order(order))

    def look(self) -> None:
        """Handle what ranks have published or requested since the last call; costs little."""
        for local, mine in enumerate(self.machine.ranks):
            for slot in mine.slots:
                if slot.state is SlotState.FREE and memory.published(self._words(local, slot.number)):
                    self.act(self.machine.on_image_published(local, slot.number))
            if (want := self.io.records[local][Word.WANT]) > 0:
                self.act(self.machine.on_memory_wanted(local, want))

    def image_published(self, local_rank: int, slot: int, stall_s: float) -> None:
        """Handle that a rank has published an image; its training stood still for `stall_s` seconds."""
        ranks = self.machine.ranks
        if 0 <= local_rank < len(ranks) and 0 <= slot < len(ranks[local_rank].slots):
            there = ranks[local_rank].slots[slot]
            if there.state is SlotState.FREE and memory.published(self._words(local_rank, slot)):
                self.act(self.machine.on_image_published(local_rank, slot, stall_s))
            else:
                self.machine.on_stall_told(local_rank, slot, stall_s)

    def distrust(self, copy: StoredCopy, why: str) -> None:
        """Drop a copy whose bytes have changed since it was made."""
        self.act(self.machine.on_copy_distrusted(copy, why))

    def doubt(self, copy: StoredCopy) -> None:
        """Verify a copy again: another agent, or a storage process, got wrong bytes from it, or they changed
        on the way."""
        self.spawn(self.gathering.read_again(copy))

    def scan_local(self, root: Path) -> None:
        """Report the images that have appeared on the local disk or disappeared from it."""
        self.spawn(self._scan(root))

    async def _scan(self, root: Path) -> None:
        try:
            found = await self.io.in_thread(local_copies, root)
        except OSError:
            return  # the disk fails; images known from it fail when they are used
        self.act(self.machine.on_disk_scanned(found))

    # ---- the storage processes

    async def lend(self, step: int, attempt: int, rank: int) -> Loan | None:
        """Lend an image to a storage process; None if this node does not have all of it."""
        copies = self.copies.acquire_image(ImageId(step, attempt, rank))
        if not copies:
            return None
        lent, whole, files = [*copies], copies[-1], list[_File]()

        def doubt() -> None:
            for copy in lent:
                if copy.memory is None:  # it was read where it is
                    self.distrust(copy, "its bytes on disk are not what was hashed")
                else:
                    self.doubt(copy)

        def give_back() -> None:
            for _, return_it in files:
                return_it()

        try:
            while copies:
                files.append(await self._lend_copy(copies.pop(0)))
        except BaseException:
            give_back()
            for copy in copies:
                self.copies.release(copy)
            raise
        *common, (path, _) = files
        common_path = common[0][0] if common else ""
        return Loan(path, whole.manifest, whole.manifest_bytes, give_back, doubt, common_path)

    async def _lend_copy(self, copy: StoredCopy) -> _File:
        """Lend this copy, of which we are a reader until it is given back, or a copy of it."""
        memory, size = copy.memory, copy.manifest.size_bytes

        def release() -> None:
            self.copies.release(copy)

        in_slot = self.machine.holding.slot_of(copy) is not None
        if not in_slot or memory is None:
            return copy.path, release
        asked = f"a copy for storage of rank {copy.image.rank}, {memory_size(size)}"
        making = background.start(self._copied(memory, size, asked), background.to_its_awaiter)

        def give_up(_: object) -> None:
            made = None if making.cancelled() or making.exception() else making.result()
            if made is not None:
                self.give_back(made)
            release()

        try:
            buffer = await asyncio.shield(making)
        except BaseException:  # when cancelled: the copying thread goes on, and still needs both buffers
            making.add_done_callback(give_up)
            raise
        if buffer is None:
            return copy.path, release
        release()
        return buffer.path, lambda: self.give_back(buffer)

    async def _copied(self, source: ImageBuffer, size: int, asked: str) -> ImageBuffer | None:
        """Copy the image to a new buffer; None if there is no memory for it."""
        buffer = await self.borrow(size, asked)
        if buffer is None:
            return None
        try:
            await self.io.in_thread(buffer.reserve, 0, size)
            await self.io.in_thread(buffer.copy, source, 0, size)
        except OSError:
            self.give_back(buffer)
            return None
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    async def borrow(self, size: int, asked: str) -> ImageBuffer | None:
        """Return a buffer that is used until `give_back`, or None if there is not enough memory."""
        number = next(self._numbers)
        borrower: asyncio.Future[ImageBuffer | None] = asyncio.get_running_loop().create_future()
        self._borrowers[number] = borrower
        self.act(self.machine.on_loan_wanted(number, size, asked))
        return await borrower

    def give_back(self, buffer: ImageBuffer) -> None:
        self.act(self.machine.on_loan_returned(buffer.number))

    def _lend(self, effect: do.Lend) -> None:
        borrower = self._borrowers.pop(effect.number)
        if not borrower.done():
            borrower.set_result(self.buffers.get(effect.buffer))
        elif effect.buffer:
            self.act(self.machine.on_loan_returned(effect.buffer))

    # ---- effects

    def act(self, effects: list[do.Effect]) -> None:
        """Carry these effects out in order, together with those that follow from them at once."""
        self._due += effects
        if self._acting or self._closed:
            return
        self._acting = True
        try:
            while self._due:
                self._one(self._due.popleft())
        finally:
            self._acting = False

    def _one(self, effect: do.Effect) -> None:
        match effect:
            case do.Tell():
                self.tell(effect.message)
            case do.Measure():
                self.spawn(self._measure())
            case do.Make():
                self.act(self.machine.on_buffers_made(self._make(effect)))
            case do.Reserve():
                self.spawn(self._reserve(effect.buffer))
            case do.Unmake():
                self._free(self.buffers.pop(effect.buffer))
            case do.Lend():
                self._lend(effect)
            case do.Serve():
                assert isinstance(effect.copy, StoredCopy)
                effect.copy.verified_at = self._now
                self.copies.add(effect.copy)
            case do.Unserve():
                assert isinstance(effect.copy, StoredCopy)
                self.copies.remove(effect.copy)
            case do.AwaitReaders():
                number = effect.buffer
                self.copies.when_idle(
                    self.buffers[number], lambda: self.act(self.machine.on_buffer_unread(number))
                )
            case do.FindImage() | do.Verify() | do.Fetch():
                self.spawn(self._work(effect))
            case do.Show():
                self.act(self.machine.on_shown(effect.number, self._show(effect)))
            case do.Unshow():
                self._unshow()
            case do.Hurry():
                self._going[effect.number].stop.set()
            case do.EndWork():
                self._going.pop(effect.number, None)
            case _:
                self._for_ranks(effect)

    def _for_ranks(self, effect: do.ForRanks) -> None:
        record = self.io.records[effect.local]
        match effect:
            case do.Begin():
                record[Word.WANT] = record[Word.REFUSED] = 0
                record[Word.RESTORE] = RestoreStatus.PENDING
            case do.Mend():
                memory.discard_unpublished(self._words(effect.local, effect.slot))
            case do.Offer():
                memory.offer(self._words(effect.local, effect.slot), self.buffers[effect.buffer])
            case do.Install():
                memory.install(self._words(effect.local, effect.slot), self.buffers[effect.buffer])
            case do.Free():
                memory.free(self._words(effect.local, effect.slot))
            case do.Withdraw():
                if memory.withdraw(self._words(effect.local, effect.slot)):
                    self.act(self.machine.on_slot_withdrawn(effect.local, effect.slot, effect.buffer))
            case do.Detach():
                self._words(effect.local, effect.slot)[SlotWord.FD] = 0
            case do.Hash():
                self.spawn(self._hash(effect))
            case do.Refuse():
                record[Word.REFUSED] = 1
            case do.SlotReady():
                self._ready(record, effect)
            case do.Elsewhere():
                record[Word.RESTORE] = RestoreStatus.ELSEWHERE
            case do.FailRestore():
                record[Word.RESTORE] = RestoreStatus.FAILED
            case _:
                never(effect)

    def _ready(self, record: RankRecord, effect: do.SlotReady) -> None:
        report = effect.report
        words = {
            Word.RESTORE_SLOT: effect.slot, Word.RESTORE_STEP: report.step,
            Word.RESTORE_ATTEMPT: report.attempt, Word.RESTORE_IMAGE: report.size_bytes,
            Word.RESTORE_MANIFEST: effect.behind,
        }  # fmt: skip
        _answer(record, words, RestoreStatus.READY)

    def _show(self, effect: do.Show) -> str:
        """Let ranks read these images. Return why that is not possible, or ""."""
        entries, size = list[ShownImage](), 0
        for own, common in effect.images:
            for copy in (own, common):
                if copy is not None:
                    assert isinstance(copy, StoredCopy)
                    if not self.copies.read(copy):
                        self._unshow()
                        return f"rank {copy.image.rank}'s image was dropped meanwhile"
                    self.shown.append(copy)
            entries.append(_shown(own, common))
            size += own.report.size_bytes
        text = ShownImages(tuple(entries)).to_bytes()
        try:
            self._index = self.io.make(len(text), 0)
            self._index.reserve(0, len(text))
            self._index.write(0, text)
        except Exception as error:  # any: the ranks wait for the answer
            self._unshow()
            return str(error) or type(error).__name__
        step, attempt, _ = effect.images[0][0].image
        words = {
            Word.RESTORE_SLOT: self._index.descriptor, Word.RESTORE_STEP: step, Word.RESTORE_ATTEMPT: attempt,
            Word.RESTORE_IMAGE: size, Word.RESTORE_MANIFEST: len(text),
        }  # fmt: skip
        for record in self.io.records:
            _answer(record, words, RestoreStatus.COLLECTED)
        return ""

    def _unshow(self) -> None:
        for copy in self.shown:
            self.copies.release(copy)
        self.shown.clear()
        if self._index is not None:
            self._index.close()
            self._index = None

    def _words(self, local: int, slot: int) -> SlotRecord:
        return self.io.records[local].slot(slot)

    # ---- what takes time

    async def _hash(self, effect: do.Hash) -> None:
        local, slot, number, rank = effect.local, effect.slot, effect.buffer, effect.rank
        words, buffer = self._words(local, slot), self.buffers[number]
        size, step = words[SlotWord.IMAGE], words[SlotWord.STEP]
        try:
            copy = await self.io.in_thread(_read_image, buffer, size, words[SlotWord.MANIFEST], step, rank)
        except Exception as error:  # any: otherwise the rank would never get its slot back
            if not isinstance(error, BadImage | RuntimeError):
                background.logged(error)
            why = str(error) or type(error).__name__
            self.act(self.machine.on_image_unhashed(local, slot, number, rank, step, size, why))
        else:
            self.act(self.machine.on_image_hashed(local, slot, number, copy))

    def _free(self, buffer: ImageBuffer) -> None:
        """Free the buffer's memory in a thread, because the kernel takes a second for some gigabytes."""
        task = self.spawn(self.io.in_thread(buffer.close))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _measure(self) -> None:
        if self._freeing:  # otherwise memory that is nobody's any more would count as taken
            await asyncio.wait(set(self._freeing))
        try:
            room = await self.io.in_thread(self.io.room)
        except Exception as error:  # any, such as that no thread can be started: who asked for memory waits
            room = Room(0, str(error) or type(error).__name__)
        allocated = {number: buffer.allocated for number, buffer in self.buffers.items()}
        self.act(self.machine.on_memory_measured(room, allocated))

    def _make(self, effect: do.Make) -> str:
        made: dict[int, ImageBuffer] = {}
        try:
            for number in effect.buffers:
                made[number] = self.io.make(effect.capacity, number)
        except Exception as error:  # any, such as for a size that no mapping can have
            for buffer in made.values():
                buffer.close()
            return str(error) or type(error).__name__
        self.buffers |= made
        return ""

    async def _reserve(self, number: int) -> None:
        buffer, why = self.buffers[number], ""
        try:
            await self.io.in_thread(buffer.reserve, 0, buffer.capacity)
        except Exception as error:  # any: who asked for the memory waits for the answer
            why = str(error) or type(error).__name__
        self.act(self.machine.on_buffer_reserved(number, buffer.allocated, why))

    async def _work(self, effect: do.FindImage | do.Verify | do.Fetch) -> None:
        """Do slow work and give the machine its answer. An error is an answer as well, because other work
        waits for its turn."""
        number, going = effect.number, self._going[effect.number]
        answer: Any = None
        failure: Exception | None = None
        why: tuple[str, ...] = ()
        try:
            answer = await self._answer(effect, going)
        except Exception as error:
            failure, why = error, (f"{type(error).__name__}: {error}",)
        match effect:
            case do.FindImage():
                self.act(self.machine.on_source_found(number, answer or Found(None, passed_over=why)))
            case do.Verify():
                self.act(self.machine.on_copy_verified(number, answer))
            case do.Fetch():
                allocated = self.buffers[effect.buffer].allocated
                answer = answer or Filled(None, passed_over=why, allocated=allocated)
                self.act(self.machine.on_image_fetched(number, answer, self._now))
        if failure is not None:
            raise failure

    async def _answer(
        self, effect: do.FindImage | do.Verify | do.Fetch, going: Going
    ) -> Found | Filled | bool:
        match effect:
            case do.FindImage():
                return await self.gathering.find(going, effect)
            case do.Verify():
                return await self.gathering.verify(going, effect)
            case do.Fetch():
                return await self.gathering.fetch(going, effect, self.buffers[effect.buffer])

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = background.start(work, self.failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _in_loop(self, then: Callable[[], None]) -> None:
        """Call `then` in the loop; may be called from any thread."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(then)
            except RuntimeError:
                pass  # the loop is closed, and the agent with it


def _answer(record: RankRecord, words: dict[Word, int], status: RestoreStatus) -> None:
    for word, value in words.items():
        record[word] = value
    record[Word.RESTORE] = status  # written last, because the rank waits for it


def _shown(own: do.KeptCopy, common: do.KeptCopy | None) -> ShownImage:
    assert isinstance(own, StoredCopy)
    places = [copy.memory for copy in (own, common) if isinstance(copy, StoredCopy) and copy.memory]
    descriptor, *more = (place.descriptor for place in places)
    return ShownImage(own.manifest_bytes, descriptor, *(more or (0,)))


def _read_image(buffer: ImageBuffer, size: int, manifest_size: int, step: int, rank: int) -> StoredCopy:
    """Return the image and the manifest after it, with hashes made now. Raises BadImage."""
    if size < 0 or manifest_size < 0 or size + manifest_size > buffer.capacity:
        raise BadImage("it does not fit into its slot")
    manifest = Manifest.from_bytes(bytes(buffer[size : size + manifest_size]))
    if (manifest.step, manifest.rank, manifest.size_bytes) != (step, rank, size):
        raise BadImage("its manifest is another image's")
    return StoredCopy(manifest.with_blocks(buffer), MEMORY, ALL, buffer)
