"""A slot's words, as the agent writes them: see `page`."""

from __future__ import annotations

from jurymast.keeper.buffers import Buffer
from jurymast.keeper.page import SlotRecord, SlotWord


def published(words: SlotRecord) -> bool:
    """The rank has written an image into this free slot."""
    seq = words[SlotWord.SEQ]
    return seq % 2 == 0 and seq != words[SlotWord.FREED]


def discard_unpublished(words: SlotRecord) -> None:
    """The rank is dead: what it began or published unseen is nothing. The one time that we write its word."""
    words[SlotWord.SEQ] = words[SlotWord.FREED]


def offer(words: SlotRecord, buffer: Buffer) -> None:
    """The rank may write into it."""
    _show(words, buffer, words[SlotWord.SEQ])


def install(words: SlotRecord, buffer: Buffer) -> None:
    """An image that the rank has not written: it finds it here, and cannot write."""
    _show(words, buffer, words[SlotWord.SEQ] - 2)


def free(words: SlotRecord) -> None:
    """The buffer is the rank's again."""
    words[SlotWord.FREED] = words[SlotWord.SEQ]


def withdraw(words: SlotRecord) -> bool:
    """Take a free buffer away; False when the rank is just writing into it."""
    descriptor = words[SlotWord.FD]
    words[SlotWord.FD] = 0  # from here on the rank does not begin
    if words[SlotWord.SEQ] != words[SlotWord.FREED]:
        words[SlotWord.FD] = descriptor
        return False
    return True


def detach(words: SlotRecord) -> None:
    words[SlotWord.FD] = 0


def _show(words: SlotRecord, buffer: Buffer, freed: int) -> None:
    words[SlotWord.FREED] = freed
    words[SlotWord.CAPACITY] = buffer.capacity
    words[SlotWord.GENERATION] = buffer.number
    words[SlotWord.FD] = buffer.descriptor
