"""Everything that a node's keeper decides, as one machine.

A rank writes an image into a free slot; it is hashed and held, served to other nodes, lent to whoever writes
it to storage, and goes when the supervisor says that a newer state is safe. The keeper holds replicas of
other nodes' images, in case one of those nodes is lost. Before an attempt starts, it brings what its ranks
restore into their slots. If another number of ranks saved that, its ranks read the images where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.effects import KeptCopy
from jurymast.core.keeper.holding import (
    Buffer,
    BufferPool,
    Claim,
    Growth,
    Holding,
    LoanGrowth,
    RankSlots,
    SlotState,
    kernel_refusal,
)
from jurymast.core.keeper.restores import Filled, Found, Restores, Work, Works
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, COMMON, MEMORY, PEER, ImageId, StateId, age
from jurymast.core.state.messages import Room
from jurymast.core.state.texts import memory_size
from jurymast.errors import never

AT_ONCE = 2
Name = tuple[ImageId, str]


class Replica(Work):
    """One order. It waits for its turn, finds the image's manifest, takes memory, and fills it."""

    def __init__(self, replicas: OwnReplicas, order: msg.Replicate) -> None:
        super().__init__(replicas.works)
        self._replicas = replicas
        self.order = order
        self.image: ImageId = ImageId(order.step, order.attempt, order.rank)
        self.name: Name = (self.image, order.part)
        self._extent = (0, 0)

    def begin(self) -> None:
        self.do(do.FindImage(self.number, self.image, self.order.sources))

    def on_source_found(self, found: Found) -> None:
        self.why += found.passed_over
        if found.report is None:
            self.why.append(f"no node has the image of rank {self.image.rank}")
        if self.stopped or found.report is None:
            self._over()
            return
        # It may become a slot, but for now memory is taken only for this part.
        self._extent = start, end = extent(found.report, self.order.part)
        asked = f"a replica of rank {self.image.rank}, {memory_size(end - start)}"
        self.memory.claim(Claim(self, asked, 1, found.slot_bytes, self._extent))

    def on_memory_granted(self, buffers: list[Buffer]) -> None:
        self.own(buffers[0])
        order, (start, end), buffer = self.order, self._extent, buffers[0].number
        if self.stopped:
            self._over()
        else:
            self.do(
                do.Fetch(
                    self.number, self.image, PEER, order.part, buffer, start, end, order.sources, behind=False
                )
            )

    def on_memory_refused(self, why: str) -> None:
        self.tell(msg.Refused(why=why))
        self.why.append(why)
        self._over()

    def on_image_fetched(self, fetched: Filled, now: float) -> None:
        self.took(fetched)
        if fetched.refused:
            self.on_memory_refused(kernel_refusal(fetched.refused))
            return
        if fetched.copy is not None and not self.stopped:
            self.holding.hold(fetched.copy)
        self._over()

    def _over(self) -> None:
        self.end()
        self._replicas.ended(self)
        if not self.stopped and not self._replicas.here(self.name):
            step, attempt, rank = self.image
            why = "; ".join(self.why) or "no node has all of it"
            self.tell(msg.Unreplicated(step=step, attempt=attempt, rank=rank, part=self.order.part, why=why))


class OwnReplicas:
    """The replicas on this node. One counts when all of it is here and verified; until then every older one
    stays."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self._holding: Holding = works.holding
        self.wanted: dict[Name, Replica] = {}  # and nobody has said otherwise
        self.waiting: list[Replica] = []
        self.running: list[Replica] = []

    def check(self) -> None:
        assert len(self.running) <= AT_ONCE, "too many replicas at a time"
        assert not self.waiting or len(self.running) == AT_ONCE, "a replica waits for nothing"
        going = {id(one) for one in (*self.waiting, *self.running)}
        assert {id(one) for one in self.wanted.values()} <= going, "an order is forgotten"
        assert not any(one.stopped for one in self.wanted.values())

    def here(self, name: Name) -> list[KeptCopy]:
        image, part = name
        found = self._holding.find(image, (MEMORY, PEER))
        return [copy for copy in found if copy.part in (ALL, part)]

    def order(self, order: msg.Replicate) -> None:
        name = (ImageId(order.step, order.attempt, order.rank), order.part)
        here = self.here(name)
        if here:
            self._holding.tell(msg.Held(copies=tuple(copy.report for copy in here)))
        elif name not in self.wanted:
            self.wanted[name] = one = Replica(self, order)
            self.waiting.append(one)
            self._next()

    def _next(self) -> None:
        while self.waiting and len(self.running) < AT_ONCE:
            one = self.waiting.pop(0)
            self.running.append(one)
            one.begin()

    def ended(self, one: Replica) -> None:
        self.running.remove(one)
        if self.wanted.get(one.name) is one:
            del self.wanted[one.name]
        self._next()

    def stop(self, gone: Callable[[Replica], bool]) -> None:
        """Stop making these replicas, without a report."""
        for one in [one for one in self.wanted.values() if gone(one)]:
            del self.wanted[one.name]
            if one in self.waiting:
                self.waiting.remove(one)
                one.end()
            else:
                one.stop()


def extent(report: msg.CopyReport, part: str) -> tuple[int, int]:
    """Return [start, end) of a part in its image."""
    if part == ALL:
        return 0, report.size_bytes
    return (0, report.common_bytes) if part == COMMON else (report.common_bytes, report.size_bytes)


class KeeperMachine:
    """Decides everything for a keeper. The caller reports events, one method each, and carries out the
    returned effects in order. `now` is monotonic, in seconds."""

    def __init__(self, node: str, ranks_per_node: int) -> None:
        self._effects: list[do.Effect] = []
        out = self._effects.append
        self.ranks = [RankSlots(local) for local in range(ranks_per_node)]
        self.memory = BufferPool(out)
        self.holding = Holding(out, self.memory, self.ranks)
        self._works = Works(self.holding)
        self.replicas = OwnReplicas(self._works)
        self.restores = Restores(self._works, node)

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        for part in (self.memory, self.holding, self.replicas, self.restores):
            part.check()
        self._check_buffers()

    def _check_buffers(self) -> None:
        """Check that each buffer has exactly one user."""
        free = [slot.buffer for mine in self.ranks for slot in mine.slots if slot.state is SlotState.FREE]
        following = [slot.following for mine in self.ranks for slot in mine.slots]
        claimed = [one for claim in self.memory.claims for one in claim.taken]
        alone = [one for one in (*self.memory.idle, *free, *following, *claimed) if one is not None]
        assert len(alone) == len(set(alone)), "a buffer is in two places"
        held = {self.holding.buffer_of(copy) for copy in self.holding.copies.values()} - {None}
        used = held | self.holding.busy | self.holding.leaving
        assert not used & set(alone), "a buffer that is in use is free for others"
        assert not held & self.holding.leaving, "what is held is about to go"
        lost = set(self.memory.buffers.values()) - used - set(alone)
        assert not lost, f"nobody has {lost}"
        places = [slot.buffer for mine in self.ranks for slot in mine.slots if slot.buffer is not None]
        assert len(places) == len(set(places)), "a buffer is in two slots"
        works = [one.buffer for one in self._works.going.values() if one.buffer is not None]
        assert len(works) == len(set(works)), "a buffer is filled twice"
        assert set(works) <= self.holding.busy, "somebody fills what may go"

    def _out(self) -> list[do.Effect]:
        effects = [*self._effects]
        self._effects.clear()
        return effects

    def inventory(self) -> tuple[msg.CopyReport, ...]:
        """Reports of all copies held, for the supervisor."""
        return tuple(copy.report for copy in self.holding.copies.values())

    # An attempt.

    def on_launch(
        self, attempt: int, ranks: Sequence[int], world: int, restore: msg.Restore | None, now: float
    ) -> list[do.Effect]:
        """Prepare for an attempt whose `ranks`, by local rank, are about to start. The ranks of earlier
        attempts are dead."""
        self.restores.stop()
        self.holding.on_launch(attempt, restore)
        if restore is None:
            self.replicas.stop(lambda one: True)
        for local, mine in enumerate(self.ranks):
            self.holding.begin(mine, ranks[local] if local < len(ranks) else -1)
        resharded = restore is not None and restore.world > 0
        for mine in self.ranks:
            if mine.rank < 0 or restore is None or mine.rank not in restore.ranks:
                self._effects.append(do.Elsewhere(mine.local))
            elif not resharded:
                self.restores.begin(mine, restore, world, now)
        if restore is not None and resharded:
            self.restores.collected([mine for mine in self.ranks if mine.rank in restore.ranks], restore)
        return self._out()

    # Ranks, and their slots.

    def on_image_published(self, local: int, number: int, stall_s: float = 0.0) -> list[do.Effect]:
        """The rank has written an image; `stall_s`: how long its training stood still for it."""
        slot = self.ranks[local].slots[number]
        if slot.state is SlotState.FREE and self.ranks[local].rank >= 0:
            slot.stall_s = stall_s
            self.holding.publish(slot)
        return self._out()

    def on_stall_told(self, local: int, number: int, stall_s: float) -> None:
        """Training stood still this long, in seconds, for an image that was seen before the rank reported
        it."""
        self.ranks[local].slots[number].stall_s = stall_s

    def on_memory_wanted(self, local: int, want: int) -> list[do.Effect]:
        """The rank asks for slots of this many bytes. It has restored, and so have all others."""
        mine = self.ranks[local]
        if mine.rank >= 0 and want > 0:
            self.holding.went_on(mine)
            if not mine.growing and want != mine.refused and mine.lacking(want):
                Growth(self.holding, mine, want)
        return self._out()

    def on_image_hashed(self, local: int, number: int, buffer: int, copy: KeptCopy) -> list[do.Effect]:
        self.holding.on_image_hashed(self.ranks[local].slots[number], self.memory.buffers[buffer], copy)
        return self._out()

    def on_image_unhashed(
        self, local: int, number: int, buffer: int, rank: int, step: int, size: int, why: str
    ) -> list[do.Effect]:
        """The published bytes are not an image."""
        slot = self.ranks[local].slots[number]
        there = slot.buffer is not None and slot.buffer.number == buffer
        self.holding.on_image_hashed(slot, self.memory.buffers[buffer], None)
        if there:
            bad = msg.CopyReport(
                tier=MEMORY, step=step, attempt=self.holding.attempt, rank=rank, world=len(self.ranks),
                part=ALL, size_bytes=max(0, size),
            )  # fmt: skip
            self._effects.append(do.Tell(msg.Dropped(copy=bad, why=why)))
        return self._out()

    def on_slot_withdrawn(self, local: int, number: int, buffer: int) -> list[do.Effect]:
        self.holding.on_slot_withdrawn(self.ranks[local].slots[number], buffer)
        return self._out()

    # Memory.

    def on_memory_measured(self, room: Room, allocated: Mapping[int, int]) -> list[do.Effect]:
        self.memory.on_memory_measured(room, allocated)
        return self._out()

    def on_buffers_made(self, why: str = "") -> list[do.Effect]:
        """The buffers were made, or (`why`) none was."""
        self.memory.on_buffers_made(why)
        return self._out()

    def on_buffer_reserved(self, buffer: int, allocated: int, why: str = "") -> list[do.Effect]:
        self.memory.on_buffer_reserved(buffer, allocated, why)
        return self._out()

    def on_buffer_unread(self, buffer: int) -> list[do.Effect]:
        self.holding.on_buffer_unread(buffer)
        return self._out()

    def on_loan_wanted(self, number: int, size: int, asked: str) -> list[do.Effect]:
        """A borrower wants a buffer for a while. Answered by Lend."""
        LoanGrowth(self.holding, number, size, asked)
        return self._out()

    def on_loan_returned(self, buffer: int) -> list[do.Effect]:
        self.holding.release(self.memory.buffers[buffer])
        return self._out()

    # Copies held.

    def on_disk_scanned(self, found: Sequence[KeptCopy]) -> list[do.Effect]:
        """Take in what the local disk holds now."""
        self.holding.on_disk_scanned(found)
        return self._out()

    def on_copy_distrusted(self, copy: KeptCopy, why: str) -> list[do.Effect]:
        """Drop a copy whose bytes have changed since it was made."""
        self.holding.drop(copy, why)
        return self._out()

    def on_order(self, order: msg.KeeperOrder) -> list[do.Effect]:
        match order:
            case msg.Committed():
                self.holding.commit(order.step, order.attempt)
                self.replicas.stop(lambda one: age(one.image.state) < self.holding.committed)
            case msg.Void():
                self.holding.void(order.step, order.attempt)
                state = StateId(order.step, order.attempt)
                self.replicas.stop(lambda one: one.image[:2] == state)
            case msg.Replicate():
                self.replicas.order(order)
            case msg.Sources():
                self.restores.sources(order)
            case msg.ForgetNewer():
                self.holding.forget_newer(order.step)
                self.replicas.stop(lambda one: one.image.step > order.step)
            case msg.GiveSlotsUp():
                self.holding.give_slots_up()
            case _:
                never(order)
        return self._out()

    # Work.

    def on_source_found(self, number: int, found: Found) -> list[do.Effect]:
        self._works.going[number].on_source_found(found)
        return self._out()

    def on_copy_verified(self, number: int, intact: bool | None) -> list[do.Effect]:
        """Handle the result of Verify; None: it could not be determined."""
        self._works.going[number].on_copy_verified(intact)
        return self._out()

    def on_shown(self, number: int, why: str = "") -> list[do.Effect]:
        """Ranks see the images of Show from now on, or cannot (`why`)."""
        self._works.going[number].on_shown(why)
        return self._out()

    def on_image_fetched(self, number: int, fetched: Filled, now: float) -> list[do.Effect]:
        self._works.going[number].on_image_fetched(fetched, now)
        return self._out()
