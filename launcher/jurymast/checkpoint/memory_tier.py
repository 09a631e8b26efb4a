"""The rank's side of the memory tier: its state as an image in a buffer of its node's agent.

`keeper.manifest` has the protocol between the two. Saving needs no other rank, and never waits.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from jurymast.checkpoint import image, stock
from jurymast.checkpoint.group import Candidate, Group, RankFailed, SaveResult
from jurymast.checkpoint.names import no_collections
from jurymast.checkpoint.state import ScriptState
from jurymast.core.keeper.holding import SLOTS
from jurymast.core.state import within
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import (
    HEADROOM_BYTES,
    PAGE_VARIABLE,
    Manifest,
    RankRecord,
    RestoreStatus,
    SlotWord,
    Word,
)
from jurymast.processes import leave_out_of_cores
from jurymast.worker import link

log = logging.getLogger("jurymast.checkpoint")

POLL_S = 0.002
LATER_POLL_S = 0.05
# How often a rank says that it waits for the image to restore, at first; then half as often each time.
SAY_SO_S = 10.0
_MADV_POPULATE_READ = 22  # Linux 5.14


# In the order of the fields of `ReadySlot`.
READY_WORDS = (
    Word.RESTORE_STEP, Word.RESTORE_ATTEMPT, Word.RESTORE_SLOT, Word.RESTORE_IMAGE, Word.RESTORE_MANIFEST,
)  # fmt: skip


@dataclass(frozen=True)
class ReadySlot:
    """An image that the agent has ready for this rank; sizes in bytes. `collected`: what another number of
    ranks saved; see `RestoreStatus.COLLECTED` for the other fields."""

    step: int
    attempt: int
    slot: int
    image_bytes: int
    manifest_bytes: int
    collected: bool = False


@dataclass(frozen=True, eq=False)
class _Mapped:
    """One slot's buffer, mapped into this process; outdated once the agent replaces it."""

    generation: int
    window: image.Window

    @property
    def capacity(self) -> int:
        return len(self.window.data)


class MemoryTier:
    """The images of one rank. `path` is the page, in the agent's directory of descriptors, /proc/<pid>/fd."""

    name = "memory"

    def __init__(
        self, page: mmap.mmap | memoryview[int], path: str, state: ScriptState, group: Group, attempt: int
    ) -> None:
        self._record = RankRecord(page, link.local_rank())
        self._slots = [self._record.slot(number) for number in range(SLOTS)]
        self._path = path
        self._state = state
        self._group = group
        self._attempt = attempt
        self._link = link.current()
        self._planner = image.ImagePlanner(state)
        self._mapped: list[_Mapped | None] = [None] * SLOTS
        self._mapping = threading.Lock()
        self._mapper: threading.Thread | None = None
        self._held: ReadySlot | None = None
        self._wrote = False
        self._copies: Any = None
        self._unpin: weakref.finalize[..., Any] | None = None
        self._closed = False

    @classmethod
    def open(cls, state: ScriptState, group: Group, attempt: int) -> MemoryTier | None:
        """Open this rank's memory tier; None if some rank has none. Collective among ranks of agents that
        keep images."""
        path = os.environ.get(PAGE_VARIABLE)
        if not path:
            return None
        page = link.open_page(path)
        without = [rank for rank, has in enumerate(group.gather(page is not None)) if not has]
        if page is None or without:
            log.warning("no checkpoints in memory: ranks %s cannot reach their agent", without)
            return None
        return cls(page, path, state, group, attempt)

    def take_slots(self, former: MemoryTier) -> None:
        """Go on with what this process has mapped, and pinned, of the same slots in an earlier attempt: doing
        that anew takes seconds. Those that the agent has replaced since are mapped anew."""
        former.stop_mapping()
        if former._path != self._path:
            return
        self._mapped, former._mapped = former._mapped, self._mapped
        self._copies, former._copies = former._copies, None
        if former._unpin is not None:
            former._unpin.detach()
            self._unpin_at_end()

    # ---- restoring

    def candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        """List the image to restore if all ranks have one of the same step and attempt, or nothing.
        Collective."""
        # Once this process has written into a slot, the image to restore may be gone from it.
        self._held = None if self._wrote else self.wait_restore()
        key = (self._held.step, self._held.attempt) if self._held else None
        gathered = self._group.gather(key)
        if any(one != key for one in gathered):
            found = ", ".join(f"rank {rank}: {one or 'nothing'}" for rank, one in enumerate(gathered))
            raise CheckpointError(f"images in memory are not all of one step and attempt: {found[:2000]}")
        if self._held is None:
            return [], {}
        held = self._held
        return [Candidate(held.step, held.image_bytes, self._group.size, attempt=held.attempt)], {}

    def wait_restore(self) -> ReadySlot | None:
        """Wait until the agent has the image to restore, or knows that there is none, however long that
        takes: it depends on the image's size. If it cannot be brought, the supervisor ends the attempt, as it
        does with one that does not start within the policy's `detect.start_within`."""
        started, say_after_s = time.monotonic(), SAY_SO_S
        while (answer := self._record[Word.RESTORE]) in (RestoreStatus.PENDING, RestoreStatus.FAILED):
            waited_s = time.monotonic() - started
            if waited_s > say_after_s:
                say_after_s *= 2.0
                log.warning("after %.0f s the agent still fetches the image to restore", waited_s)
            time.sleep(POLL_S)
        if answer not in (RestoreStatus.READY, RestoreStatus.COLLECTED):
            return None
        step, attempt, slot, image_bytes, manifest_bytes = (self._record[word] for word in READY_WORDS)
        collected = answer == RestoreStatus.COLLECTED
        return ReadySlot(step, attempt, slot, image_bytes, manifest_bytes, collected)

    def load(self, candidate: Candidate, state: ScriptState) -> str:
        """Load what `candidates` found. Return why it does not fit, on one line, or "". Raises RankUnable if
        some rank cannot read or hold it now. Collective."""
        held = self._held
        if held is not None and held.collected and held.step == candidate.step:
            return self._load_collected(held, state)
        try:
            self._group.on_all(lambda: self._load(candidate, state))
        except RankFailed as error:
            return str(error)
        return ""

    def _load(self, candidate: Candidate, state: ScriptState) -> None:
        held = self._held
        if held is None or held.step != candidate.step:
            raise CheckpointError("it is no longer in memory")
        end = held.image_bytes + held.manifest_bytes
        # A single thread copies to a GPU, and mapping pages at the same time would delay it.
        ahead = end if torch.cuda.is_initialized() else 0
        data = self._map(held.slot, ahead, wait=False).window.data
        manifest = Manifest.from_bytes(bytes(data[held.image_bytes : end]))
        found = (manifest.step, manifest.attempt, manifest.rank, manifest.world, manifest.size_bytes)
        expected = (held.step, held.attempt, self._group.rank, self._group.size, held.image_bytes)
        if found != expected:
            raise CheckpointError(f"(step, attempt, rank, world, size) in memory are {found}, not {expected}")
        self.wait_published()  # what is still being copied must not change
        image.load(data[: held.image_bytes], manifest, state)

    def _load_collected(self, held: ReadySlot, state: ScriptState) -> str:
        """Load what another number of ranks saved."""

        def opened(stack: ExitStack) -> stock.Opened:
            def lent(descriptor: int, size: int) -> mmap.mmap:
                return stack.enter_context(closing(self._lent(descriptor, size)))

            text = lent(held.slot, held.manifest_bytes)[: held.manifest_bytes]
            return stock.open_images(lent, text, held.step, held.attempt)

        return stock.load(self._group, state, opened)

    def _lent(self, number: int, size: int) -> mmap.mmap:
        """Map so many bytes of what the agent has under this descriptor, to read them."""
        descriptor = os.open(f"{os.path.dirname(self._path)}/{number}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            made = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        leave_out_of_cores(made)
        return made

    # ---- getting memory

    @property
    def refused(self) -> bool:
        return self._record[Word.REFUSED] != 0

    @property
    def ready(self) -> bool:
        """Whether a slot of the requested size is mapped into this process.

        One is enough: a restored image keeps its slot, however small, until a newer one is safe.
        """
        return any(self._fitting())

    def _fitting(self) -> list[bool]:
        wanted = self._record[Word.WANT]
        return [wanted > 0 and self._is_mapped(number, wanted) for number in range(SLOTS)]

    def request(self, trees: dict[str, Any]) -> None:
        """Ask the agent for slots that `trees` fits into, and map them in the background.

        Raises whatever pickling a value raises.
        """
        self._use_gpu()
        self._request(self._planner.plan_image(trees))

    def _use_gpu(self) -> None:
        if self._copies is None and torch.cuda.is_initialized():
            from jurymast.checkpoint.gpu_copies import GpuCopies

            self._copies = GpuCopies()
            self._unpin_at_end()

    def _unpin_at_end(self) -> None:
        """Also if nobody closes this: a script may make another Checkpointer in its place."""
        self._unpin = weakref.finalize(self, self._copies.close)
        self._unpin.atexit = False

    def wait_published(self) -> None:
        """Wait until what was saved is copied and published."""
        if self._copies is not None:
            self._copies.wait()

    def close(self) -> None:
        """Give the slots back; nothing is saved or restored afterwards."""
        self.stop_mapping()
        if self._unpin is not None:
            self._unpin()
        self._mapped = [None] * SLOTS

    def stop_mapping(self) -> None:
        self._closed = True
        if self._mapper is not None:
            self._mapper.join()

    def _request(self, image_plan: image.ImagePlan) -> None:
        wanted = image_plan.room()
        # What was requested before suffices, unless the state grew beyond it.
        if self._record[Word.WANT] < wanted - HEADROOM_BYTES // 2:
            self._record[Word.WANT] = wanted
        self._start_mapping()

    def _start_mapping(self) -> None:
        if not all(self._fitting()) and (self._mapper is None or not self._mapper.is_alive()):
            self._mapper = threading.Thread(target=self._map_all, name="jurymast-memory", daemon=True)
            self._mapper.start()

    def wait_ready(self, limit_s: float) -> bool:
        """Wait until one save after another can succeed; False after `limit_s` or if memory is refused."""
        self._wait(self._all_there, limit_s)
        return self.ready

    def wait_free(self, limit_s: float) -> None:
        """Wait until some slot can be written into, at most `limit_s` and not if memory is refused."""
        self._wait(lambda: any(slot.writable for slot in self._slots), limit_s)

    def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not done() and not self.refused and time.monotonic() < end:
            time.sleep(POLL_S)

    def _all_there(self) -> bool:
        """Return whether no further slot can be mapped until the agent frees one."""
        held = [slot[SlotWord.FD] != 0 and not slot.writable for slot in self._slots]
        return self.ready and all(a or b for a, b in zip(self._fitting(), held, strict=True))

    def _map_all(self) -> None:
        """Map each slot once it exists. This runs alongside the training, because mapping all pages takes a
        while."""
        started = time.monotonic()
        while not (all(self._fitting()) or self.refused or self._closed):
            for number, slot in enumerate(self._slots):
                if slot[SlotWord.FD] and not self._is_mapped(number, 0):
                    try:
                        self._map(number, self._record[Word.WANT])
                    except (OSError, ValueError):  # the agent is just replacing it
                        log.debug("slot %d cannot be mapped yet", number, exc_info=True)
            time.sleep(POLL_S if time.monotonic() - started < SAY_SO_S else LATER_POLL_S)

    def _is_mapped(self, number: int, size: int) -> bool:
        slot, mapped = self._slots[number], self._mapped[number]
        return (
            mapped is not None
            and slot[SlotWord.FD] != 0
            and mapped.generation == slot[SlotWord.GENERATION]
            and mapped.capacity >= size
        )

    def _map(self, number: int, used: int, *, wait: bool = True) -> _Mapped:
        """Return the slot's buffer, mapping it unless it is mapped. The pages of its first `used` bytes are
        mapped before this returns, or with `wait=False` by a thread while they are read already.

        Raises OSError or ValueError.
        """
        with self._mapping:
            slot = self._slots[number]
            mapped = self._mapped[number]
            if mapped is not None and mapped.generation == slot[SlotWord.GENERATION]:
                return mapped
            self._mapped[number] = None
            if mapped is not None and self._copies is not None:
                self._copies.unregister(mapped.window.bytes)
            del mapped  # the old buffer's memory is freed once nobody maps it
            generation, number_there = slot[SlotWord.GENERATION], slot[SlotWord.FD]
            capacity = slot[SlotWord.CAPACITY]
            descriptor = os.open(f"{os.path.dirname(self._path)}/{number_there}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if slot[SlotWord.FD] != number_there:  # then this may be another file
                    raise OSError("the agent has replaced the buffer")
                buffer = mmap.mmap(descriptor, capacity)
                leave_out_of_cores(buffer)
            finally:
                os.close(descriptor)
            fresh = _Mapped(generation, image.Window(buffer))
            entering = threading.Thread(
                target=_enter_pages, args=(fresh.window, min(used, capacity)), daemon=True
            )
            entering.start()
            if wait:
                entering.join()
            if self._copies is not None:
                self._copies.register(fresh.window.bytes)
            self._mapped[number] = fresh
            return fresh

    # ---- saving

    def save(self, step: int, trees: dict[str, Any], started: float) -> SaveResult:
        """Copy `trees` into a free slot and publish it. `started` is when the training stopped for it.

        The result says why if there is no room. Raises whatever pickling a value raises.
        """
        with no_collections():
            return self._save(step, trees, started)

    def _save(self, step: int, trees: dict[str, Any], started: float) -> SaveResult:
        self._use_gpu()
        self.wait_published()
        image_plan = self._planner.plan_image(trees)
        manifest = self._manifest(step, image_plan)
        self._start_mapping()
        begun = self._begin(image_plan.size_bytes + len(manifest))
        if isinstance(begun, within.Skip):
            self._request(image_plan)
            self._link.emit(within.Skipped(step=step, why=begun))
            return SaveResult(ok=False, error=begun.value)
        self._write(begun, step, image_plan, manifest, started)
        return SaveResult(ok=True, size_bytes=image_plan.size_bytes)

    def _manifest(self, step: int, image_plan: image.ImagePlan) -> bytes:
        return image_plan.manifest(step, self._attempt, self._group.rank, self._group.size)

    def _begin(self, size: int) -> int | within.Skip:
        """Begin to write `size` bytes into a slot; return its number, or why there is none."""
        why = within.Skip.REFUSED if self.refused else within.Skip.NOT_READY
        for number, slot in enumerate(self._slots):
            if not self._is_mapped(number, size):
                continue
            why = within.Skip.BUSY
            if slot.writable:
                freed = slot[SlotWord.FREED]
                slot[SlotWord.SEQ] = freed + 1 + freed % 2  # odd in any case
                # Checked again now that the agent can see that we write: it may have taken the slot away.
                if self._is_mapped(number, size):
                    self._wrote = True
                    return number
                slot[SlotWord.SEQ] = freed
        return why

    def _write(
        self, number: int, step: int, image_plan: image.ImagePlan, manifest: bytes, started: float
    ) -> None:
        mapped, slot = self._mapped[number], self._slots[number]
        assert mapped is not None
        writing, freed = slot[SlotWord.SEQ], slot[SlotWord.FREED]
        stall_s = 0.0

        def done(error: BaseException | None) -> None:
            if error is not None:
                slot[SlotWord.SEQ] = freed  # nobody has read the slot, so it can be written again
                return
            mapped.window.data[image_plan.size_bytes : image_plan.size_bytes + len(manifest)] = manifest
            slot[SlotWord.STEP] = step
            slot[SlotWord.IMAGE] = image_plan.size_bytes
            slot[SlotWord.MANIFEST] = len(manifest)
            slot[SlotWord.SEQ] = writing + 1
            stood_s = stall_s or _seconds_since(started)
            self._link.emit(within.Image(slot=number, step=step, stall_s=stood_s))

        try:
            if self._copies is not None:
                self._copies.register(mapped.window.bytes)
                places = mapped.window.frame(image_plan)
                self._copies.start(places, image_plan.tensors, self._state.objects.values(), done)
                stall_s = _seconds_since(started)
            else:
                mapped.window.stage(image_plan)
        except BaseException as error:
            done(error)
            raise
        if self._copies is None:
            done(None)


def _seconds_since(started: float) -> float:
    return round(time.monotonic() - started, 6)


def _enter_pages(window: image.Window, size: int) -> None:
    """Enter the first `size` bytes into this process's page table, so that a save takes no page faults.

    The agent has reserved the memory already, so entering it for reading, several pages at a time, is enough:
    a shared mapping can then be written too. Best effort: older kernels cannot do this.
    """
    # not mmap.madvise, which would hold the GIL
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(window.bytes.data_ptr()), ctypes.c_size_t(size), _MADV_POPULATE_READ
    )
