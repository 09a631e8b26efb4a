"""What a node holds of checkpoints, in which buffers, and what is removed when; the slots of its ranks; and
the memory for all of it, which is kept within limits and reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import msgspec

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.effects import Effect, Entry, KeptCopy, Make, Measure, Reserve, Unmake, best_first
from jurymast.core.state import messages as msg
from jurymast.core.state.images import LOCAL, MEMORY, PEER, ImageId, StateId
from jurymast.core.state.messages import Room
from jurymast.core.state.texts import memory_size

# ---- slots

SLOTS = 2


class SlotState(Enum):
    """In the order in which slots are given up when a restore needs one."""

    FILLING = auto()  # no buffer yet: a restore is to come into it
    EMPTY = auto()  # no buffer
    FREE = auto()  # the rank's: it may be writing
    LEAVING = auto()  # dropped, but somebody still uses it
    TAKING = auto()  # published; its hashes are being made
    HELD = auto()  # an image that counts


@dataclass(eq=False)
class Slot:
    """`following`: a larger buffer that replaces the present one as soon as it is free. `stall_s`: how long
    training stood still for what was published last."""

    local: int
    number: int
    state: SlotState = SlotState.EMPTY
    buffer: Buffer | None = None
    copy: KeptCopy | None = None
    following: Buffer | None = None
    stall_s: float = 0.0

    @property
    def capacity(self) -> int:
        """The capacity of the buffer that is here, or about to be."""
        return max((one.capacity for one in (self.buffer, self.following) if one is not None), default=0)

    def check(self) -> None:
        where = f"slot {self.number} of local rank {self.local} is {self.state.name}"
        without = self.state in (SlotState.EMPTY, SlotState.FILLING)
        assert (self.buffer is None) == without, f"{where}, and its buffer is {self.buffer}"
        assert (self.copy is not None) == (self.state is SlotState.HELD), f"{where}, with {self.copy}"
        if self.copy is not None and self.buffer is not None:
            assert self.copy.buffer == self.buffer.number, f"{where} by a copy that is elsewhere"


@dataclass(eq=False)
class RankSlots:
    """The slots of one local rank. `rank` is its present number in the run, -1 while it has none."""

    local: int
    rank: int = -1
    slots: list[Slot] = field(default_factory=list)
    growing: bool = False
    refused: int = 0  # the wish that this node could not fulfil
    restored: KeptCopy | None = None  # of this attempt

    def __post_init__(self) -> None:
        self.slots = [Slot(self.local, number) for number in range(SLOTS)]

    def lacking(self, want: int) -> list[Slot]:
        return [one for one in self.slots if one.state is not SlotState.FILLING and one.capacity < want]


# ---- memory

ROUND_BYTES = 2 << 20
EVERYWHERE = (0, -1)
Do = Callable[[Effect], None]


def round_up(count: int) -> int:
    return max(1, -(-count // ROUND_BYTES)) * ROUND_BYTES


@dataclass(eq=False)
class Buffer:
    """`capacity` is its maximum in bytes; `allocated` the memory that it used when last measured."""

    number: int
    capacity: int
    allocated: int = 0


class Claimant(Protocol):
    """Asks for memory, and receives one of these calls, possibly at once."""

    def on_memory_granted(self, buffers: list[Buffer]) -> None: ...

    def on_memory_refused(self, why: str) -> None: ...


@dataclass(eq=False)
class Claim:
    """A request for `count` buffers. `extent`: [start, end) in each where memory will be reserved; `also`:
    bytes that must be free in addition; `asked` describes the request in a refusal."""

    who: Claimant
    asked: str
    count: int
    capacity: int
    extent: tuple[int, int] = EVERYWHERE
    also: int = 0
    taken: list[Buffer] = field(default_factory=list)  # buffers that waited unused
    made: list[Buffer] = field(default_factory=list)
    again: bool = False

    def __post_init__(self) -> None:
        self.capacity = round_up(self.capacity)
        if self.extent == EVERYWHERE:
            self.extent = (0, self.capacity)

    @property
    def need(self) -> int:
        length = self.extent[1] - self.extent[0]
        return self.also + self.count * length - sum(min(one.allocated, length) for one in self.taken)


class BufferPool:
    """The buffers. Those in use belong to whoever took them; those given back wait here for the next claim,
    because the first use of new memory is ten times slower than a copy into used memory. Claims are served
    one after the other."""

    def __init__(self, do: Do) -> None:
        self._do = do
        self.buffers: dict[int, Buffer] = {}
        self.idle: list[Buffer] = []  # oldest first
        self.claims: deque[Claim] = deque()
        self._promised: dict[Buffer, tuple[int, int]] = {}  # granted, and maybe not seen by the limits yet
        self._reserving: dict[Buffer, Callable[[Buffer, str], None]] = {}
        self._numbers = 0

    def check(self) -> None:
        assert set(self._promised) <= set(self.buffers.values()), "memory of no buffer is promised"
        assert len(self.idle) == len(set(self.idle)), "a buffer waits twice"

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)
        if len(self.claims) == 1:
            self._begin()

    def _begin(self) -> None:
        claim = self.claims[0]
        # A much larger one would be wasted here.
        fitting = [one for one in self.idle if claim.capacity <= one.capacity <= 2 * claim.capacity]
        claim.taken = sorted(fitting, key=lambda one: one.capacity)[: claim.count]
        for buffer in claim.taken:
            self.idle.remove(buffer)
        if claim.need <= 0:
            self._make(claim)
        else:
            self._do(Measure())

    def on_memory_measured(self, room: Room, allocated: Mapping[int, int]) -> None:
        """Take in measurements. `allocated`: the memory that each buffer uses now."""
        for number, count in allocated.items():
            if number in self.buffers:
                self.buffers[number].allocated = count
        claim = self.claims[0]
        lacking = (max(0, end - start - one.allocated) for one, (start, end) in self._promised.items())
        free = room.free - sum(lacking)
        if claim.need <= free:
            self._make(claim)
        elif claim.again or not self.idle:
            self._refuse(claim, Room(max(0, free), room.limit))
        else:
            claim.again = True
            while self.idle:  # unused buffers are given up first
                self._unmake(self.idle.pop())
            self._do(Measure())

    def _make(self, claim: Claim) -> None:
        count = claim.count - len(claim.taken)
        if not count:
            self._grant(claim)
            return
        claim.made = [Buffer(self._numbers + one, claim.capacity) for one in range(1, count + 1)]
        self._numbers += count
        self._do(Make(tuple(one.number for one in claim.made), claim.capacity))

    def on_buffers_made(self, why: str) -> None:
        """The buffers were made, or (`why`) were not."""
        claim = self.claims[0]
        if why:
            claim.made = []
            self._refuse(claim, Room(0, f"the kernel: {why}"))
        else:
            self.buffers.update({one.number: one for one in claim.made})
            self._grant(claim)

    def _grant(self, claim: Claim) -> None:
        buffers = claim.taken + claim.made
        for one in buffers:
            self._promised[one] = claim.extent
        claim.who.on_memory_granted(buffers)
        self._next()

    def _refuse(self, claim: Claim, room: Room) -> None:
        self.idle += claim.taken
        claim.who.on_memory_refused(refusal(claim.asked, room))
        self._next()

    def _next(self) -> None:
        self.claims.popleft()
        if self.claims:
            self._begin()

    def reserve(self, buffer: Buffer, then: Callable[[Buffer, str], None]) -> None:
        """Take and touch the memory itself; `then` is called with the reason if there is none."""
        self._reserving[buffer] = then
        self._do(Reserve(buffer.number))

    def on_buffer_reserved(self, number: int, allocated: int, why: str) -> None:
        buffer = self.buffers[number]
        self.touched(buffer, allocated)
        self._reserving.pop(buffer)(buffer, kernel_refusal(why))

    def touched(self, buffer: Buffer, allocated: int) -> None:
        """The memory promised to a buffer has been taken, or never will be."""
        buffer.allocated = allocated
        self._promised.pop(buffer, None)

    def give_back(self, buffer: Buffer, keep: int) -> None:
        """Take back a buffer that is no longer used. At most `keep` buffers, the newest ones, wait for the
        next claim."""
        self._promised.pop(buffer, None)
        self.idle.append(buffer)
        while len(self.idle) > keep:
            self._unmake(self.idle.pop(0))

    def _unmake(self, buffer: Buffer) -> None:
        del self.buffers[buffer.number]
        self._do(Unmake(buffer.number))


def refusal(asked: str, room: Room) -> str:
    """Return one line with the reason and what to do."""
    return (
        f"no memory for {asked}: {memory_size(room.free)} available (limit: {room.limit}); "
        "ask Slurm for more --mem, or set checkpoint.tiers.memory: off"
    )


def kernel_refusal(why: str) -> str:
    """Describe memory that was granted but that the kernel does not give. "" for ""."""
    return refusal("a buffer that was granted", Room(0, f"the kernel: {why}")) if why else ""


class Growth:
    """Provides two slots of the size that a rank wants, or those that are missing."""

    def __init__(self, holding: Holding, mine: RankSlots, want: int) -> None:
        self._holding, self._mine, self._want, self._attempt = holding, mine, want, holding.attempt
        self.fresh: list[Buffer] = []  # not reserved yet
        self.ready: list[Buffer] = []
        active = [one for one in holding.ranks if one.rank >= 0]
        # Includes what the others will need as well: it is better to refuse now than half-way.
        unserved = [one for one in active if one is not mine and not one.growing and one.lacking(1)]
        also = sum(len(one.lacking(1)) for one in unserved) * want
        each = f" for each of {len(active)} ranks" if len(active) > 1 else ""
        asked = f"two slots of {memory_size(want)}{each}{self._besides()}"
        mine.growing = True
        holding.memory.claim(Claim(self, asked, len(mine.lacking(want)), want, also=also))

    def _besides(self) -> str:
        buffers = (self._holding.buffer_of(c) for c in self._holding.copies.values() if c.tier != LOCAL)
        held = sum(one.allocated for one in buffers if one is not None)
        return f" (besides {memory_size(held)} of checkpoints that this node holds)" if held else ""

    def on_memory_granted(self, buffers: list[Buffer]) -> None:
        self.fresh = buffers
        self._holding.busy |= set(buffers)
        self._next()

    def _next(self) -> None:
        if self.fresh:
            self._holding.memory.reserve(self.fresh[0], self.on_buffer_reserved)
            return
        if self._attempt == self._holding.attempt:
            for slot in self._mine.lacking(self._want):
                if self.ready:
                    old, slot.following = slot.following, self.ready.pop()
                    self._holding.busy.discard(slot.following)
                    if old is not None:
                        self._holding.leave(old)
                    self._holding.settle(slot)
        self._over()

    def on_buffer_reserved(self, buffer: Buffer, why: str) -> None:
        self.fresh.remove(buffer)
        self.ready.append(buffer)
        if why:
            self.on_memory_refused(why)
        else:
            self._next()

    def on_memory_refused(self, why: str) -> None:
        if self._attempt == self._holding.attempt:
            self._mine.refused = self._want
            self._holding.do(do.Refuse(self._mine.local))
        self._holding.tell(msg.Refused(why=f"{why}. Until then all ranks save to shared storage"))
        self._over()

    def _over(self) -> None:
        self._mine.growing = False
        for buffer in (*self.fresh, *self.ready):
            self._holding.release(buffer)
        self.fresh, self.ready = [], []


class LoanGrowth:
    """Provides a buffer for a copy of an image that will be read for long."""

    def __init__(self, holding: Holding, number: int, size: int, asked: str) -> None:
        self._holding, self._number = holding, number
        holding.memory.claim(Claim(self, asked, 1, size, (0, size)))

    def on_memory_granted(self, buffers: list[Buffer]) -> None:
        self._holding.busy |= set(buffers)
        self._holding.do(do.Lend(self._number, buffers[0].number))

    def on_memory_refused(self, why: str) -> None:
        self._holding.do(do.Lend(self._number, 0, why))


# ---- what is held

NOTHING = (0, -1)


class Holding:
    """The copies of a node. `committed`: (attempt, step) of the newest safe state; of two states the newer
    one is greater. `busy`: buffers that are being written or hashed; whoever does that returns them with
    `release`."""

    def __init__(self, do: Do, memory: BufferPool, ranks: Sequence[RankSlots]) -> None:
        self.do, self.memory, self.ranks = do, memory, ranks
        self.attempt = 0
        self.copies: dict[Entry, KeptCopy] = {}
        self.committed = NOTHING
        self.busy: set[Buffer] = set()
        self.leaving: set[Buffer] = set()  # until nobody reads them
        # States that this attempt may need: what it restores, and the newest safe one.
        self._wanted = {NOTHING}
        self._slots_go = False
        self.shows = False  # ranks read what another number of ranks saved
        self._void: set[StateId] = set()
        self._unwanted: set[ImageId] = set()  # rolled back: what the disk has of them is not looked at

    def tell(self, message: msg.FromKeeper) -> None:
        self.do(do.Tell(message))

    def check(self) -> None:
        for entry, copy in self.copies.items():
            assert copy.entry == entry
            assert (copy.buffer == 0) == (copy.tier == LOCAL), f"{entry} is in buffer {copy.buffer}"
            assert not copy.buffer or copy.buffer in self.memory.buffers, f"the memory of {entry} is gone"
        used = [copy.buffer for copy in self.copies.values() if copy.buffer]
        assert len(used) == len(set(used)), "two copies in one buffer"
        for slot in self._slots():
            slot.check()
            held = slot.copy is None or self.copies.get(slot.copy.entry) is slot.copy
            assert held, f"slot {slot.number} of local rank {slot.local} holds what is not held"

    def _slots(self) -> Iterable[Slot]:
        return (slot for mine in self.ranks for slot in mine.slots)

    # ---- what there is

    def has(self, copy: KeptCopy) -> bool:
        return self.copies.get(copy.entry) is copy

    def find(self, image: ImageId, tiers: Sequence[str]) -> list[KeptCopy]:
        """Return copies as `best_first` does."""
        return best_first(self.copies.values(), image, tiers)

    def buffer_of(self, copy: KeptCopy) -> Buffer | None:
        return self.memory.buffers.get(copy.buffer)

    def slot_of(self, copy: KeptCopy) -> Slot | None:
        return next((slot for slot in self._slots() if slot.copy is copy), None)

    def copy_in(self, buffer: Buffer) -> KeptCopy | None:
        return next((copy for copy in self.copies.values() if copy.buffer == buffer.number), None)

    def counts(self, copy: KeptCopy) -> bool:
        """Return False for an image of dead ranks, of a step that cannot be complete, or of one that has been
        passed."""
        step, attempt, _ = copy.image
        if attempt != self.attempt or StateId(step, attempt) in self._void:
            return False
        return copy.age >= self.committed

    # ---- what comes and goes

    def hold(self, copy: KeptCopy) -> None:
        """Hold a copy from now on."""
        older = self.copies.get(copy.entry)
        if older is not None:
            self.drop(older, say=False)
        self._serve(copy)
        self.tell(msg.Held(copies=(copy.report,)))

    def _serve(self, copy: KeptCopy) -> None:
        self.copies[copy.entry] = copy
        self.do(do.Serve(copy))

    def remove(self, copy: KeptCopy) -> None:
        """Stop holding a copy. The caller takes care of its buffer and slot."""
        del self.copies[copy.entry]
        self.do(do.Unserve(copy))

    def drop(self, copy: KeptCopy, why: str = "", *, say: bool = True) -> None:
        """Stop holding a copy; its memory is free when the last reader is done."""
        if not self.has(copy):
            return
        self.remove(copy)
        slot, buffer = self.slot_of(copy), self.buffer_of(copy)
        if slot is not None:
            slot.state, slot.copy = SlotState.LEAVING, None
        if buffer is not None and buffer not in self.busy:
            self.leave(buffer)
        if say:
            self.tell(msg.Dropped(copy=copy.report, why=why))

    def _drop_where(self, gone: Callable[[KeptCopy], bool]) -> None:
        for copy in [copy for copy in self.copies.values() if gone(copy)]:
            self.drop(copy, say=False)

    def leave(self, buffer: Buffer) -> None:
        """Give a buffer up: nothing in it is wanted any more."""
        self.leaving.add(buffer)
        self.do(do.AwaitReaders(buffer.number))

    def on_buffer_unread(self, number: int) -> None:
        buffer = self.memory.buffers.get(number)
        if buffer is None or buffer not in self.leaving:
            return
        self.leaving.discard(buffer)
        slot = next((slot for slot in self._slots() if slot.buffer is buffer), None)
        if slot is not None:
            self.free(slot)
        else:
            held = sum(copy.tier != LOCAL for copy in self.copies.values())
            self.memory.give_back(buffer, max(held, len(self.ranks)))

    def release(self, buffer: Buffer) -> None:
        """End the use of a busy buffer: give it back, unless it belongs to a copy by now."""
        self.busy.discard(buffer)
        if self.copy_in(buffer) is None:
            self.leave(buffer)

    # ---- slots

    def publish(self, slot: Slot) -> None:
        """Note that the rank has written an image."""
        assert slot.buffer is not None
        slot.state = SlotState.TAKING
        self.busy.add(slot.buffer)
        rank = self.ranks[slot.local].rank
        self.do(do.Hash(slot.local, slot.number, slot.buffer.number, rank))

    def on_image_hashed(self, slot: Slot, buffer: Buffer, copy: KeptCopy | None) -> None:
        self.busy.discard(buffer)
        if slot.buffer is not buffer:  # the slot was needed for a restore meanwhile
            self.leave(buffer)
        elif copy is None or not self.counts(copy):
            self.free(slot)
        else:
            copy.report = msgspec.structs.replace(copy.report, stall_s=slot.stall_s)
            slot.state, slot.copy = SlotState.HELD, copy
            self.hold(copy)

    def free(self, slot: Slot) -> None:
        """Let the rank write into the slot again."""
        slot.state, slot.copy = SlotState.FREE, None
        self.do(do.Free(slot.local, slot.number))
        self.settle(slot)

    def settle(self, slot: Slot) -> None:
        """Bring a slot up to date if it is free: install a larger buffer that waits for it, or remove it if
        it is to go."""
        if slot.following is not None and slot.state is SlotState.EMPTY:
            buffer, slot.following = slot.following, None
            slot.state, slot.buffer = SlotState.FREE, buffer
            self.do(do.Offer(slot.local, slot.number, buffer.number))
        elif (slot.following or self._slots_go) and slot.state is SlotState.FREE and slot.buffer is not None:
            self.do(do.Withdraw(slot.local, slot.number, slot.buffer.number))

    def on_slot_withdrawn(self, slot: Slot, number: int) -> None:
        old = slot.buffer
        if old is not None and old.number == number and slot.state is SlotState.FREE:
            slot.state, slot.buffer = SlotState.EMPTY, None
            self.leave(old)
            self.settle(slot)

    def give_slots_up(self) -> None:
        """Give slots up as soon as they are free; a rank that is writing keeps its slot."""
        self._slots_go = True
        for slot in self._slots():
            self.settle(slot)

    def detach(self, slot: Slot) -> Buffer | None:
        """Separate the buffer from its slot, which is then empty."""
        buffer, slot.buffer, slot.copy, slot.state = slot.buffer, None, None, SlotState.EMPTY
        self.do(do.Detach(slot.local, slot.number))
        return buffer

    def vacate(self, mine: RankSlots) -> Slot:
        """Empty the slot that is needed least, for what is to come, and return it."""
        slot = min(mine.slots, key=lambda one: (one.state.value, self._is_wanted(one)))
        if slot.copy is not None and not self._is_wanted(slot):
            self.drop(slot.copy)
        was_free = slot.state is SlotState.FREE
        buffer = self.detach(slot)
        slot.state = SlotState.FILLING
        if was_free and buffer is not None:
            self.leave(buffer)  # otherwise the user of the buffer does that
        return slot

    # ---- what is said of states

    def _is_wanted(self, slot: Slot) -> bool:
        return slot.copy is not None and slot.copy.age in self._wanted

    def on_launch(self, attempt: int, restore: msg.Restore | None) -> None:
        """Prepare for an attempt. Images in slots stay until the ranks have restored: nodes that were away
        may have the rest of a newer state, and an older one helps if the restored one turns out to be
        damaged. Other images stay if they belong to the restored state or to the newest safe one. Without
        `restore` (the ranks start from shared storage, or anew) no replica stays; the supervisor knows that
        without a report."""
        self.attempt, self._slots_go = attempt, False
        self.unshow()
        self._void.clear()
        restored = (restore.attempt, restore.step) if restore is not None else NOTHING
        self._wanted = {self.committed, restored}
        # The restored state may be on no other node yet, so the one before it stays until the supervisor says
        # otherwise.
        self.committed = min(self.committed, restored)
        for copy in list(self.copies.values()):
            if copy.tier == MEMORY and copy.age not in self._wanted and self.slot_of(copy) is None:
                self.drop(copy)
            elif copy.tier == PEER and restore is None:
                self.drop(copy, say=False)

    def begin(self, mine: RankSlots, rank: int) -> None:
        """Begin a new attempt of a local rank: repair what the last one left. Its images stay."""
        mine.rank, mine.refused, mine.restored = rank, 0, None
        self.do(do.Begin(mine.local))
        for slot in mine.slots:
            if slot.state is SlotState.FREE:
                self.do(do.Mend(slot.local, slot.number))
            elif slot.state is SlotState.FILLING:
                slot.state = SlotState.EMPTY
            elif slot.copy is not None and slot.copy.image.rank != rank:
                if self._is_wanted(slot):
                    self.detach(slot)  # another rank's now; it is held all the same, for that rank's node
                else:
                    self.drop(slot.copy)
            self.settle(slot)

    def unshow(self) -> None:
        """No rank reads any more what another number of ranks saved."""
        if self.shows:
            self.shows = False
            self.do(do.Unshow())

    def went_on(self, mine: RankSlots) -> None:
        """All ranks have restored. From now on no other image is needed, except a safe one."""
        self.unshow()
        for slot in mine.slots:
            copy = slot.copy
            kept = copy is None or copy is mine.restored or copy.image.attempt == self.attempt
            if copy is not None and not kept and copy.age != self.committed:
                self.drop(copy)

    def commit(self, step: int, attempt: int) -> None:
        """This state is safe: older states, and those of earlier attempts, may go."""
        self.committed = max(self.committed, (attempt, step))
        self._drop_where(lambda copy: copy.tier != LOCAL and copy.age < self.committed)

    def void(self, step: int, attempt: int) -> None:
        """Some rank could not save this step, so it will never be complete."""
        self._void.add(StateId(step, attempt))
        self._drop_where(lambda copy: copy.tier != LOCAL and copy.image[:2] == (step, attempt))

    def drop_replicas_before(self, step: int, attempt: int) -> bool:
        """Drop replicas of older states. Returns False if there is none that is not in use."""
        older = [copy for copy in self.copies.values() if copy.tier == PEER and copy.age < (attempt, step)]
        idle = [copy for copy in older if self.buffer_of(copy) not in self.busy]
        for copy in idle:
            self.drop(copy)
        return bool(idle)

    def forget_newer(self, step: int) -> None:
        """The run goes back to `step`: drop everything newer, so that nothing newer is restored."""
        self._unwanted |= {copy.image for copy in self.copies.values() if copy.image.step > step}
        self._drop_where(lambda copy: copy.image.step > step)
        if self.committed[1] > step:
            self.committed = NOTHING

    def on_disk_scanned(self, found: Sequence[KeptCopy]) -> None:
        """Take in what the local disk holds now."""
        there = {copy.image for copy in found}
        known = {copy.image: copy for copy in self.copies.values() if copy.tier == LOCAL}
        for image in sorted(known.keys() - there):
            self.drop(known[image])
        fresh = [one for one in found if one.image not in known and one.image not in self._unwanted]
        for copy in fresh:
            self._serve(copy)
        if fresh:
            self.tell(msg.Held(copies=tuple(copy.report for copy in fresh)))
