"""A local rank's slots as the agent sees them: what is in each, and the agent's words about it."""

from __future__ import annotations

from enum import Enum, auto

from jurymast.keeper.buffers import Buffer
from jurymast.keeper.copies import Copy
from jurymast.keeper.page import SLOTS, RankRecord, Restore, SlotRecord, SlotWord, Word


class State(Enum):
    EMPTY = auto()  # no buffer
    FREE = auto()  # the rank's: it may be writing
    TAKING = auto()  # published; its hashes are being made
    HELD = auto()  # an image that counts
    LEAVING = auto()  # dropped, but somebody still reads it
    FILLING = auto()  # no buffer yet: a restore is to come into it


class Slot:
    """`following`: a larger buffer that takes the place of this one as soon as it is free."""

    def __init__(self, record: SlotRecord, number: int) -> None:
        self.record = record
        self.number = number
        self.state = State.EMPTY
        self.buffer: Buffer | None = None
        self.copy: Copy | None = None
        self.following: Buffer | None = None
        self.stall_s = 0.0

    @property
    def published(self) -> bool:
        """The rank has written an image that nobody has looked at."""
        seq = self.record[SlotWord.SEQ]
        return self.state is State.FREE and seq % 2 == 0 and seq != self.record[SlotWord.FREED]

    def capacity(self) -> int:
        """Of the buffer that is here, or about to be."""
        return max((one.capacity for one in (self.buffer, self.following) if one is not None), default=0)

    def mend(self) -> None:
        """The rank is dead: what it began or published unseen is nothing. The one time that we write its
        word."""
        if self.state is State.FREE:
            self.record[SlotWord.SEQ] = self.record[SlotWord.FREED]
        elif self.state is State.FILLING:
            self.state = State.EMPTY

    def offer(self, buffer: Buffer) -> None:
        """An empty slot gets a buffer that the rank may write into."""
        self._show(buffer, self.record[SlotWord.SEQ])
        self.state, self.copy = State.FREE, None

    def install(self, copy: Copy, buffer: Buffer) -> None:
        """An image that the rank has not written: it finds it here, and cannot write."""
        self._show(buffer, self.record[SlotWord.SEQ] - 2)
        self.state, self.copy = State.HELD, copy

    def free(self) -> None:
        """The buffer is the rank's again."""
        self.state, self.copy = State.FREE, None
        self.record[SlotWord.FREED] = self.record[SlotWord.SEQ]

    def withdraw(self) -> Buffer | None:
        """Take a free buffer away; None when the rank is just writing into it."""
        if self.state is not State.FREE:
            return None
        descriptor = self.record[SlotWord.FD]
        self.record[SlotWord.FD] = 0  # from here on the rank does not begin
        if self.record[SlotWord.SEQ] != self.record[SlotWord.FREED]:
            self.record[SlotWord.FD] = descriptor
            return None
        return self.detach()

    def detach(self) -> Buffer | None:
        """The buffer goes its own way; the slot is empty."""
        self.record[SlotWord.FD] = 0
        buffer, self.buffer, self.copy, self.state = self.buffer, None, None, State.EMPTY
        return buffer

    def _show(self, buffer: Buffer, freed: int) -> None:
        self.buffer = buffer
        self.record[SlotWord.FREED] = freed
        self.record[SlotWord.CAPACITY] = buffer.capacity
        self.record[SlotWord.GENERATION] = buffer.generation
        self.record[SlotWord.FD] = buffer.descriptor


class RankSlots:
    """One local rank: its words, and its slots. `rank` is its number in the run now, -1 while it has none."""

    def __init__(self, record: RankRecord, local_rank: int) -> None:
        self.record = record
        self.local_rank = local_rank
        self.rank = -1
        self.slots = [Slot(record.slot(number), number) for number in range(SLOTS)]
        self.growing = False
        self.refused = 0  # the wish that this node could not fulfil

    def begin(self, rank: int) -> None:
        """A new attempt: forget what the last rank here said. Its images stay."""
        self.rank = rank
        self.refused = 0
        for slot in self.slots:
            slot.mend()
        for word in (Word.WANT, Word.REFUSED, Word.SKIPPED, Word.SKIPPED_STEP):
            self.record[word] = 0
        self.record[Word.RESTORE] = Restore.PENDING

    def wish(self) -> int:
        """Capacity that the rank wants and at least one slot lacks; 0: none, or it was refused already."""
        want = self.record[Word.WANT]
        return want if want > 0 and want != self.refused and self.lacking(want) else 0

    def lacking(self, want: int) -> list[Slot]:
        return [one for one in self.slots if one.state is not State.FILLING and one.capacity() < want]

    def restored(self, slot: Slot, step: int, attempt: int, image: int, manifest: int) -> None:
        words = {
            Word.RESTORE_SLOT: slot.number, Word.RESTORE_STEP: step, Word.RESTORE_ATTEMPT: attempt,
            Word.RESTORE_IMAGE: image, Word.RESTORE_MANIFEST: manifest,
        }  # fmt: skip
        for word, value in words.items():
            self.record[word] = value
        self.record[Word.RESTORE] = Restore.READY  # the last: the rank goes by it
