"""The slots of a node's ranks, and what each contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from jurymast.core.keeper.copies import KeptCopy
from jurymast.core.keeper.memory import Buffer

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
