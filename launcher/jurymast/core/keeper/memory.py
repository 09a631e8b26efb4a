"""The memory that a node gives to checkpoints: within its limits, and used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jurymast.core.checkpoints.foresight import Room
from jurymast.core.keeper.effects import Effect, Make, Measure, Reserve, Unmake
from jurymast.core.texts import memory_size

ROUND_BYTES = 2 << 20
Do = Callable[[Effect], None]


def round_up(count: int) -> int:
    return max(1, -(-count // ROUND_BYTES)) * ROUND_BYTES


@dataclass(eq=False)
class Buffer:
    """`capacity` bytes at most; `allocated`: the memory that it took when that was last seen."""

    number: int
    capacity: int
    allocated: int = 0


class Claimant(Protocol):
    """Who asks for memory hears one of these, maybe at once."""

    def granted(self, buffers: list[Buffer]) -> None: ...

    def refused(self, why: str) -> None: ...


class Reserver(Protocol):
    """Who has it reserved."""

    def reserved(self, buffer: Buffer, why: str) -> None: ...


@dataclass(eq=False)
class Claim:
    """`count` buffers in which [start, end) will be reserved. `also`: bytes that must be free besides."""

    who: Claimant
    asked: str
    count: int
    capacity: int
    start: int
    end: int
    also: int = 0
    taken: list[Buffer] = field(default_factory=list)  # that waited unused
    made: list[Buffer] = field(default_factory=list)
    again: bool = False

    @property
    def need(self) -> int:
        length = self.end - self.start
        return self.also + self.count * length - sum(min(one.allocated, length) for one in self.taken)


class BufferPool:
    """Buffers in use belong to whoever took them; those given back wait here for the next who asks, because
    the first touch of new memory is ten times slower than a copy into old. One claim after the other."""

    def __init__(self, do: Do) -> None:
        self._do = do
        self.buffers: dict[int, Buffer] = {}
        self.idle: list[Buffer] = []  # oldest first
        self.claims: deque[Claim] = deque()
        self._promised: dict[Buffer, tuple[int, int]] = {}  # granted, and maybe not seen by the limits yet
        self._reservers: dict[Buffer, Reserver] = {}
        self._numbers = 0

    def check(self) -> None:
        assert set(self._promised) <= set(self.buffers.values()), "memory of no buffer is promised"
        assert len(self.idle) == len(set(self.idle)), "a buffer waits twice"

    def claim(
        self,
        who: Claimant,
        asked: str,
        count: int,
        capacity: int,
        extent: tuple[int, int] | None = None,
        also: int = 0,
    ) -> None:
        """`extent`: where memory will be reserved, by default all; `asked` is for whoever is refused."""
        capacity = round_up(capacity)
        start, end = extent or (0, capacity)
        self.claims.append(Claim(who, asked, count, capacity, start, end, also))
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
        """`allocated`: by buffer, the memory that it takes now."""
        for number, count in allocated.items():
            if number in self.buffers:
                self.buffers[number].allocated = count
        claim = self.claims[0]
        lacking = (
            max(0, end - start - one.allocated) for one, (start, end) in self._promised.items()
        )  # fmt: skip
        free = room.free - sum(lacking)
        if claim.need <= free:
            self._make(claim)
        elif claim.again or not self.idle:
            self._refuse(claim, Room(max(0, free), room.limit))
        else:
            claim.again = True
            while self.idle:  # what nobody uses goes first
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
        """`why` not, if they were not."""
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
            self._promised[one] = claim.start, claim.end
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

    def reserve(self, buffer: Buffer, who: Reserver) -> None:
        """Take and touch the memory itself."""
        self._reservers[buffer] = who
        self._do(Reserve(buffer.number))

    def reserved(self, number: int, allocated: int, why: str) -> None:
        buffer = self.buffers[number]
        self.touched(buffer, allocated)
        self._reservers.pop(buffer).reserved(buffer, kernel_refusal(why))

    def touched(self, buffer: Buffer, allocated: int) -> None:
        """What was promised of it has been taken, or never will be."""
        buffer.allocated = allocated
        self._promised.pop(buffer, None)

    def give_back(self, buffer: Buffer, keep: int) -> None:
        """Nobody uses it any more. At most `keep` buffers wait for the next who asks, the newest ones."""
        self._promised.pop(buffer, None)
        self.idle.append(buffer)
        while len(self.idle) > keep:
            self._unmake(self.idle.pop(0))

    def _unmake(self, buffer: Buffer) -> None:
        del self.buffers[buffer.number]
        self._do(Unmake(buffer.number))


def refusal(asked: str, room: Room) -> str:
    """One line that says why and what to do."""
    return (
        f"no memory for {asked}: {memory_size(room.free)} available (limit: {room.limit}); "
        "ask Slurm for more --mem, or set checkpoint.tiers.memory: off"
    )


def kernel_refusal(why: str) -> str:
    """What was granted, and is not there all the same. "" for ""."""
    return refusal("a buffer that was granted", Room(0, f"the kernel: {why}")) if why else ""
