"""Before ranks read: what an attempt restores comes into their slots, whole and verified, or not at all."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, MEMORY, PEER
from jurymast.keeper import limits
from jurymast.keeper.buffers import Buffer
from jurymast.keeper.copies import Copy, Key
from jurymast.keeper.fetch import Filling
from jurymast.keeper.gathering import Source
from jurymast.keeper.limits import Refused
from jurymast.keeper.page import Restore, Word
from jurymast.keeper.replicas import slot_bytes
from jurymast.keeper.slots import RankSlots, Slot, State
from jurymast.keeper.threads import in_thread

if TYPE_CHECKING:
    from jurymast.keeper.keeper import Keeper


@dataclass(frozen=True)
class Plan:
    """One state of the run, and for each rank of this node where to get it."""

    step: int
    attempt: int
    sources: dict[int, list[Source]]

    @classmethod
    def of(cls, told: msg.Restore) -> Plan:
        sources = {rank: [Source.of(one) for one in found] for rank, found in told.ranks.items()}
        return cls(told.step, told.attempt, sources)


@dataclass
class _Job:
    """One rank's restore. `base`: what this node has of the image in memory; `why`: sources passed over."""

    mine: RankSlots
    slot: Slot
    key: Key
    base: Copy | None
    sources: list[Source]
    why: list[str] = field(default_factory=list)
    filling: Filling | None = None
    copy: Copy | None = None  # what comes of it, once it is whole
    behind: int = 0  # size of the manifest behind it


class Restoring:
    """The restore of one attempt. `stop`: a newer attempt has begun, whose slots these are now."""

    def __init__(self, keeper: Keeper, attempt: int, plan: Plan | None, world: int) -> None:
        self._keeper = keeper
        self._attempt = attempt
        self._plan = plan
        self._world = world
        self.stop = threading.Event()

    def begin(self, mine: RankSlots) -> None:
        """For one rank; the plan names it."""
        assert self._plan is not None
        key = (self._plan.step, self._plan.attempt, mine.rank)
        found = self._keeper.copies.find(key, (MEMORY, PEER))
        base = next((copy for copy in found if copy.place not in self._keeper.filling), None)
        slot = next((one for one in mine.slots if base is not None and one.copy is base), None)
        job = _Job(mine, slot or self._vacate(mine), key, base, self._plan.sources[mine.rank])
        self._keeper.spawn(self._bring(job))

    def _vacate(self, mine: RankSlots) -> Slot:
        """The slot that is easiest to do without, now waiting for what comes."""
        ease = (State.FILLING, State.EMPTY, State.FREE, State.LEAVING, State.TAKING, State.HELD)
        slot = min(mine.slots, key=lambda one: ease.index(one.state))
        was_free = slot.state is State.FREE
        buffer = slot.detach()
        slot.state = State.FILLING
        if was_free and buffer is not None:
            self._keeper.recycle(buffer)  # else whoever is busy with it does that
        return slot

    async def _bring(self, job: _Job) -> None:
        started, (step, of, rank) = time.monotonic(), job.key
        try:
            if job.base is None or not await self._start_from_base(job, job.base):
                await self._start_afresh(job)
            if job.filling is not None:
                await self._fill(job.filling, job)
        except Refused as refused:
            self._keeper.tell(msg.Refused(why=str(refused)))
            job.why.append(str(refused))
        filling = job.filling
        if filling is not None:
            job.why += filling.passed_over
            self._keeper.filling.discard(filling.buffer)
            if job.copy is not None and not self._is_ours(job.slot, filling.buffer):
                job.copy, job.why = None, [*job.why, "it was dropped meanwhile"]
        if self.stop.is_set():
            self._abandon(filling)
        elif filling is not None and job.copy is not None and job.behind:
            self._ready(job, filling, job.copy)
            self._keeper.tell(
                msg.Prefetched(
                    step=step, attempt=of, rank=rank, tiers=filling.got,
                    seconds=round(time.monotonic() - started, 6), passed_over=tuple(job.why),
                )
            )  # fmt: skip
        else:
            self._abandon(filling)
            if job.slot.state is State.FILLING:
                job.slot.state = State.EMPTY
            job.mine.record[Word.RESTORE] = Restore.FAILED
            why = "; ".join(job.why) or "nobody has all of it"
            self._keeper.tell(msg.Unrestorable(attempt=self._attempt, rank=rank, step=step, of=of, why=why))

    async def _start_from_base(self, job: _Job, base: Copy) -> bool:
        """No copying: the buffer itself becomes the slot, and only what it lacks is fetched. False when it
        was dropped meanwhile. Raises Refused."""
        keeper, buffer = self._keeper, base.place
        assert isinstance(buffer, Buffer)
        if not keeper.copies.read(base):
            return False
        try:
            filling = Filling(base.manifest, buffer, stop=self.stop)
            if base.part != ALL:  # a newer attempt must not write into it at the same time
                keeper.filling.add(buffer)
            intact = await in_thread(filling.keep, base.part, MEMORY)
            if base not in keeper.copies or self.stop.is_set():
                keeper.filling.discard(buffer)
                return self.stop.is_set()
            job.filling = filling
            keeper.filling.add(buffer)
            if not intact:
                # What is good of it serves, but it is no copy, and nobody's slot until it is whole.
                holder = keeper.slot_of(base)
                if holder is not None:
                    holder.detach()
                    holder.state = State.FILLING if holder is job.slot else State.EMPTY
                keeper.distrust(base, "blocks are corrupt in memory")
                filling.passed_over.append(f"{keeper.node}, memory: blocks are corrupt")
        finally:
            keeper.copies.release(base)
        lacking = buffer.capacity - buffer.allocated
        await keeper.memory.take(0, 0, f"what rank {job.key[2]} restores", also=lacking)
        return True

    async def _start_afresh(self, job: _Job) -> None:
        """Raises Refused."""
        keeper, rank = self._keeper, job.key[2]
        if job.slot.state is not State.FILLING and not self.stop.is_set():
            job.slot = self._vacate(job.mine)
        found = await keeper.gathering.manifest(job.key, job.sources, job.why)
        if found is None or self.stop.is_set():
            return
        manifest, capacity = found
        size = slot_bytes(manifest, capacity)
        (buffer,) = await keeper.memory.take(1, size, f"what rank {rank} restores, {limits.size(size)}")
        keeper.filling.add(buffer)
        job.filling = Filling(manifest, buffer, stop=self.stop)

    async def _fill(self, filling: Filling, job: _Job) -> None:
        """Raises Refused."""
        start = filling.manifest.size_bytes if filling.complete else 0
        await self._keeper.fill(filling, (start, filling.buffer.capacity), job.key, job.sources)
        if filling.complete and filling.manifest.world != self._world:
            job.why.append(f"it is of {filling.manifest.world} ranks, these are {self._world}")
        elif filling.complete:
            job.copy = await in_thread(Copy, filling.manifest, MEMORY, ALL, filling.buffer)
            job.behind = await in_thread(_add_manifest, job.copy, filling.buffer)
            if not job.behind:
                job.why.append("there is no room behind it for its manifest")

    def _is_ours(self, slot: Slot, buffer: Buffer) -> bool:
        """False when the copy that the restore began with has been given up, and with it maybe its buffer."""
        slots = [one for mine in self._keeper.ranks for one in mine.slots if one.buffer is buffer]
        return slot.state in (State.FILLING, State.HELD) and all(one.copy is not None for one in slots)

    def _ready(self, job: _Job, filling: Filling, copy: Copy) -> None:
        keeper, manifest, slot = self._keeper, filling.manifest, job.slot
        if slot.copy is None or slot.copy.place is not filling.buffer:
            base = next((one for one in keeper.copies if one.place is filling.buffer), None)
            if base is not None:  # it moves: a replica, or what another local rank's slot had
                holder = keeper.slot_of(base)
                if holder is not None:
                    holder.detach()
                copy.stall_s = base.stall_s
                keeper.copies.remove(base)
            slot.install(copy, filling.buffer)
            keeper.hold(copy)
            if base is not None and base.tier == PEER:
                keeper.tell(msg.Dropped(copy=base.said()))
        for other in job.mine.slots:
            if other.copy is not None and other is not slot:
                keeper.drop(other.copy)  # the run goes on from here
        job.mine.restored(slot, manifest.step, manifest.attempt, manifest.size_bytes, job.behind)

    def _abandon(self, filling: Filling | None) -> None:
        """The buffer goes back, unless it is a copy's all the same."""
        keeper = self._keeper
        if filling is not None and not any(copy.place is filling.buffer for copy in keeper.copies):
            keeper.recycle(filling.buffer)


def _add_manifest(copy: Copy, buffer: Buffer) -> int:
    """The manifest goes behind the image, without hashes if those have no room. Its size; 0: no room."""
    start = copy.manifest.size_bytes
    for data in (copy.manifest_bytes, replace(copy.manifest, blocks={}).to_bytes()):
        if start + len(data) <= buffer.capacity:
            buffer.map[start : start + len(data)] = data
            return len(data)
    return 0
