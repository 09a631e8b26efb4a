"""The memory that a node gives to checkpoints: kept within limits, and reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jurymast.core.keeper.effects import Effect, Make, Measure, Reserve, Unmake
from jurymast.core.messages import Room
from jurymast.core.texts import memory_size

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

    def granted(self, buffers: list[Buffer]) -> None: ...

    def refused(self, why: str) -> None: ...


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

    def measured(self, room: Room, allocated: Mapping[int, int]) -> None:
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

    def made(self, why: str) -> None:
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
        claim.who.granted(buffers)
        self._next()

    def _refuse(self, claim: Claim, room: Room) -> None:
        self.idle += claim.taken
        claim.who.refused(refusal(claim.asked, room))
        self._next()

    def _next(self) -> None:
        self.claims.popleft()
        if self.claims:
            self._begin()

    def reserve(self, buffer: Buffer, then: Callable[[Buffer, str], None]) -> None:
        """Take and touch the memory itself; `then` is called with the reason if there is none."""
        self._reserving[buffer] = then
        self._do(Reserve(buffer.number))

    def reserved(self, number: int, allocated: int, why: str) -> None:
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
