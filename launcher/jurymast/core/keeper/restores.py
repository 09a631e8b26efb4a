"""Brings what an attempt restores into its ranks' slots before they read it: whole and verified, or not at
all.

An image is fetched from one source after another, best first, until it is complete. Only bytes whose hashes
match count, so a source that dies or sends wrong bytes only leaves more for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.effects import KeptCopy, Shown
from jurymast.core.keeper.holding import Buffer, Claim, Holding, RankSlots, Slot, SlotState, kernel_refusal
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, COMMON, LOCAL, MEMORY, OWN, PEER, ImageId, parts_of
from jurymast.core.state.texts import memory_size


@dataclass(frozen=True)
class Found:
    """The image that was looked for, or None if no node has it. `slot_bytes`: the size of a buffer for it as
    a slot; `passed_over`: why sources could not be used, one line each."""

    report: msg.CopyReport | None
    slot_bytes: int = 0
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filled:
    """The result of filling a buffer: the `copy` if it is whole, with its manifest of `behind` bytes after it
    if that was requested and has room. `got`: bytes by tier; `refused`: why the kernel has no memory for it;
    `allocated`: the memory that the buffer uses now."""

    copy: KeptCopy | None
    behind: int = 0
    got: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    refused: str = ""
    allocated: int = 0


class Works:
    """All work under way, by number."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.going: dict[int, Work] = {}
        self.numbers = 0


class Work:
    """`buffer`: the buffer that it fills; `why`: what it had to pass over; `stopped`: nobody wants it any
    more."""

    def __init__(self, works: Works) -> None:
        works.numbers += 1
        self.number = works.numbers
        works.going[self.number] = self
        self._works = works
        self.holding, self.memory = works.holding, works.holding.memory
        self.do, self.tell = works.holding.do, works.holding.tell
        self.buffer: Buffer | None = None
        self.why: list[str] = []
        self.stopped = False

    def on_source_found(self, found: Found) -> None:
        raise NotImplementedError

    def on_copy_verified(self, intact: bool | None) -> None:
        raise NotImplementedError

    def on_image_fetched(self, fetched: Filled, now: float) -> None:
        raise NotImplementedError

    def on_shown(self, why: str) -> None:
        raise NotImplementedError

    def own(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.holding.busy.add(buffer)

    def took(self, fetched: Filled) -> None:
        self.why += fetched.passed_over
        if self.buffer is not None:
            self.memory.touched(self.buffer, fetched.allocated)

    def stop(self) -> None:
        self.stopped = True
        self.do(do.Hurry(self.number))

    def end(self) -> None:
        """End the work, and give its buffer back unless it belongs to a copy."""
        if self.buffer is not None:
            self.holding.release(self.buffer)
            self.buffer = None
        del self._works.going[self.number]
        self.do(do.EndWork(self.number))


def usable(sources: Sequence[msg.Source], missing: Callable[[], set[str]]) -> Iterator[msg.Source]:
    """Yield what to try: each source once that has some of the parts that are `missing` by then, until
    nothing is."""
    for source in sources:
        lacking = missing()
        if not lacking:
            return
        if not lacking.isdisjoint(parts_of(source.part)):
            yield source


def whom_to_ask(node: str, rank: int, sources: Sequence[msg.Source]) -> Iterator[msg.Source]:
    """Yield whom to ask for the manifest of `rank`'s image: each node that has some of that image once,
    except this `node`, which would know."""
    asked = {node}
    for source in sources:
        if source.rank == rank and source.node not in asked:
            asked.add(source.node)
            yield source


class RankRestore(Work):
    """One rank's restore. If this node has all or part of the image in memory, that is not copied: its buffer
    (the `base`) becomes the slot, and only what it lacks is fetched."""

    def __init__(
        self, works: Works, node: str, mine: RankSlots, restore: msg.Restore, world: int, now: float
    ) -> None:
        super().__init__(works)
        self._node, self._mine, self._world, self._began_at = node, mine, world, now
        self.attempt = self.holding.attempt
        self.image: ImageId = ImageId(restore.step, restore.attempt, mine.rank)
        self._sources = restore.ranks[mine.rank]
        self._then: Callable[[], None] | None = None  # once it is known where else the image is
        self.next: Callable[[], None] | None = None  # the same image for a newer attempt, after this
        self._start = self._slot_bytes = 0
        busy, found = self.holding.busy, self.holding.find(self.image, (MEMORY, PEER))
        self._base = next((one for one in found if self.holding.buffer_of(one) not in busy), None)
        base = next((one for one in mine.slots if self._base is not None and one.copy is self._base), None)
        self.slot: Slot = base or self.holding.vacate(mine)

    def begin(self) -> None:
        base = self._base
        if base is None:
            self._afresh()
            return
        buffer = self.holding.buffer_of(base)
        if base.part != ALL and buffer is not None:
            self.own(buffer)  # a newer attempt must not write into it at the same time
        self.do(do.Verify(self.number, base))

    def on_copy_verified(self, intact: bool | None) -> None:
        base = self._base
        assert base is not None
        if self.stopped:
            self._over()
        elif intact is None or not self.holding.has(base):  # dropped meanwhile
            if self.buffer is not None:
                self.holding.release(self.buffer)
                self.buffer = None
            self._afresh()
        else:
            buffer = self.holding.buffer_of(base)
            assert buffer is not None
            self.own(buffer)
            if not intact:
                self._distrust(base)
            whole = intact and base.part == ALL
            self._start = base.report.size_bytes if whole else 0
            if whole:
                self._claim()
            else:
                self._from_others(self._claim)

    def _distrust(self, base: KeptCopy) -> None:
        """Stop treating the base as a copy or slot until it is whole; its good bytes are still used."""
        holder = self.holding.slot_of(base)
        if holder is not None:
            self.holding.detach(holder)
            holder.state = SlotState.FILLING if holder is self.slot else SlotState.EMPTY
        self.holding.drop(base, "blocks are corrupt in memory")
        self.why.append(f"{self._node}, memory: blocks are corrupt")

    def _afresh(self) -> None:
        if self.slot.state is not SlotState.FILLING:
            self.slot = self.holding.vacate(self._mine)
        self._from_others(self._find)

    def _from_others(self, then: Callable[[], None]) -> None:
        """Ask which other nodes have the image, because it is not here, or not whole."""
        if self._sources:
            then()
            return
        self._then = then
        step, of, rank = self.image
        self.tell(msg.AskSources(step=step, attempt=of, rank=rank))

    def sources(self, sources: tuple[msg.Source, ...]) -> None:
        then, self._then = self._then, None
        if then is None:
            return
        self._sources = sources
        if sources:
            then()
        else:
            self._over("no other node has it")

    def stop(self) -> None:
        super().stop()
        if self._then is not None:
            self._then = None
            self._over()

    def end(self) -> None:
        super().end()
        if self.next is not None:
            self.next()

    def _find(self) -> None:
        self.do(do.FindImage(self.number, self.image, self._sources))

    def on_source_found(self, found: Found) -> None:
        self.why += found.passed_over
        if self.stopped or found.report is None:
            self._over()
        else:
            self._slot_bytes = found.slot_bytes
            self._claim()

    def _claim(self) -> None:
        """Claim a buffer, or the memory that the present one lacks."""
        asked = f"what rank {self.image.rank} restores"
        if self.buffer is None:
            asked = f"{asked}, {memory_size(self._slot_bytes)}"
            self.memory.claim(Claim(self, asked, 1, self._slot_bytes))
        else:
            also = self.buffer.capacity - self.buffer.allocated
            self.memory.claim(Claim(self, asked, 0, 0, also=also))

    def on_memory_granted(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self.own(buffer)
        assert self.buffer is not None
        if self.stopped:
            self._over()
        else:
            self.do(
                do.Fetch(
                    self.number, self.image, MEMORY, ALL, self.buffer.number, self._start,
                    self.buffer.capacity, self._sources, behind=True,
                )
            )  # fmt: skip

    def on_memory_refused(self, why: str) -> None:
        step, attempt, _ = self.image
        if not self.stopped and self.holding.drop_replicas_before(step, attempt):
            self._claim()  # without it the run stands still, with them it only would have been safer
            return
        self.tell(msg.Refused(why=why))
        self.why.append(why)
        self._over()

    def on_image_fetched(self, fetched: Filled, now: float) -> None:
        self.took(fetched)
        copy = fetched.copy
        if fetched.refused:
            self.on_memory_refused(kernel_refusal(fetched.refused))
        elif self.stopped or copy is None:
            self._over()
        elif copy.report.world != self._world:
            self._over(f"it was saved by {copy.report.world} ranks, and this attempt has {self._world}")
        elif not fetched.behind:
            self._over("its slot has no room for its manifest")
        elif not self._is_ours():
            self._over("it was dropped meanwhile")
        else:
            self._ready(copy, fetched, now)

    def _is_ours(self) -> bool:
        """Return False if the copy with which the restore began has been given up, and with it its slot."""
        slots = [one for one in self._mine.slots if one.buffer is self.buffer]
        return self.slot.state in (SlotState.FILLING, SlotState.HELD) and all(
            one.copy is not None for one in slots
        )

    def _ready(self, copy: KeptCopy, fetched: Filled, now: float) -> None:
        buffer, holding = self.buffer, self.holding
        assert buffer is not None
        base = holding.copy_in(buffer)
        if base is not None and self.slot.copy is base:
            copy = base
        else:
            if base is not None:  # it moves: a replica, or what another local rank's slot had
                holder = holding.slot_of(base)
                if holder is not None:
                    holding.detach(holder)
                copy.report = msgspec.structs.replace(copy.report, stall_s=base.report.stall_s)
                holding.remove(base)
            self.slot.state, self.slot.buffer, self.slot.copy = SlotState.HELD, buffer, copy
            self.do(do.Install(self.slot.local, self.slot.number, buffer.number))
            holding.hold(copy)
            if base is not None and base.tier == PEER:
                self.tell(msg.Dropped(copy=base.report))
        self._mine.restored = copy
        self.end()
        self.do(do.SlotReady(self.slot.local, self.slot.number, copy.report, fetched.behind))
        step, attempt, rank = self.image
        seconds = round(now - self._began_at, 6)
        self.tell(
            msg.Prefetched(
                step=step, attempt=attempt, rank=rank, tiers=dict(fetched.got), seconds=seconds,
                passed_over=tuple(self.why),
            )
        )  # fmt: skip

    def _over(self, *why: str) -> None:
        self.end()
        if self.stopped:
            return
        if self.slot.state is SlotState.FILLING:
            self.slot.state = SlotState.EMPTY
            self.holding.settle(self.slot)
        self.do(do.FailRestore(self._mine.local))
        step, of, rank = self.image
        said = "; ".join((*self.why, *why)) or "no node has all of it"
        self.tell(msg.Unrestorable(attempt=self.attempt, rank=rank, step=step, of=of, why=said))


class Collected(Work):
    """The restore of all ranks of a node from what another number of ranks saved. The supervisor has had
    every image brought here; each is verified, and then shown to the ranks."""

    def __init__(self, works: Works, ranks: Sequence[RankSlots], restore: msg.Restore) -> None:
        super().__init__(works)
        self._ranks, self._restore = ranks, restore
        self._images: list[Shown] = []
        self._unverified: list[KeptCopy] = []

    def begin(self) -> None:
        step, of, world = self._restore.step, self._restore.attempt, self._restore.world
        for rank in range(world):
            image = self._find(ImageId(step, of, rank))
            if image is None:
                self._over(f"not all of rank {rank}'s image is here")
                return
            self._images.append(image)
        copies = [copy for image in self._images for copy in image if copy is not None]
        self._unverified = list(dict.fromkeys(copies))
        self._next()

    def _find(self, image: ImageId) -> Shown | None:
        """Return the image as it is in the memory of this node."""
        for own in self.holding.find(image, (MEMORY, PEER)):
            if own.part == ALL:
                return own, None
            if own.part != OWN:
                continue
            if not own.report.common_bytes:
                return own, None
            same = image.state, own.report.common_id
            for common in self.holding.copies.values():
                fits = (common.image.state, common.report.common_id) == same
                if fits and common.part in (ALL, COMMON) and common.tier != LOCAL:
                    return own, common
        return None

    def _next(self) -> None:
        if self._unverified:
            self.do(do.Verify(self.number, self._unverified[-1]))
        elif all(self.holding.has(copy) for image in self._images for copy in image if copy is not None):
            self.do(do.Show(self.number, tuple(self._images)))
        else:
            self._over("some of it was dropped meanwhile")

    def on_copy_verified(self, intact: bool | None) -> None:
        copy = self._unverified.pop()
        if self.stopped:
            self.end()
        elif intact:
            self._next()
        else:
            if intact is False:
                self.holding.drop(copy, "blocks are corrupt in memory")
            self._over(f"rank {copy.image.rank}'s image cannot be verified here")

    def on_shown(self, why: str) -> None:
        if why:
            self._over(why)
            return
        shown = {copy for image in self._images for copy in image if copy is not None}
        for mine in self._ranks:
            held = (slot.copy for slot in mine.slots if slot.copy is not None)
            mine.restored = next((copy for copy in held if copy in shown), None)
        self.holding.shows = True
        self.end()

    def _over(self, why: str) -> None:
        self.end()
        step, of = self._restore.step, self._restore.attempt
        for mine in self._ranks:
            self.do(do.FailRestore(mine.local))
        first, attempt = min(mine.rank for mine in self._ranks), self.holding.attempt
        self.tell(msg.Unrestorable(attempt=attempt, rank=first, step=step, of=of, why=why))


class Restores:
    """The restores of one attempt at a time."""

    def __init__(self, works: Works, node: str) -> None:
        self._works, self._node = works, node

    @property
    def _going(self) -> list[RankRestore]:
        going = self._works.going.values()
        return [one for one in going if isinstance(one, RankRestore) and not one.stopped]

    def check(self) -> None:
        slots = [one.slot for one in self._going]
        assert len(slots) == len(set(slots)), "two restores into one slot"
        for one in self._going:
            assert one.attempt == self._works.holding.attempt, "the restore of an attempt that is over"

    def stop(self) -> None:
        """Stop all restores, because a newer attempt has begun and owns these slots now."""
        for work in self._works.going.values():
            if isinstance(work, RankRestore):
                work.next = None
        for work in self._going:
            work.stop()
        for work in list(self._works.going.values()):
            if isinstance(work, Collected):
                work.stop()

    def collected(self, ranks: Sequence[RankSlots], restore: msg.Restore) -> None:
        """Begin the restore of these ranks from what another number of ranks saved."""
        Collected(self._works, ranks, restore).begin()

    def begin(self, mine: RankSlots, restore: msg.Restore, world: int, now: float) -> None:
        """Begin a restore; after the stopped one of the same image, which still works on this node's copy."""

        def start() -> None:
            RankRestore(self._works, self._node, mine, restore, world, now).begin()

        image = ImageId(restore.step, restore.attempt, mine.rank)
        for work in self._works.going.values():
            if isinstance(work, RankRestore) and work.stopped and work.image == image:
                work.next = start
                return
        start()

    def sources(self, answer: msg.Sources) -> None:
        image = ImageId(answer.step, answer.attempt, answer.rank)
        for work in self._going:
            if work.image == image and not work.stopped:
                work.sources(answer.sources)
