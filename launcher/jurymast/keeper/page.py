"""The words that a rank and its agent exchange about memory: one record per local rank, in shared memory.

Every word has one writer. A slot is a buffer of the agent (a memfd, opened through /proc/<agent>/fd/N) that
holds one image with its manifest right after it. The rank may write into a slot only while `freed == seq`; it
makes `seq` odd when it begins and even when image and manifest are whole. From then on the slot is the
agent's, until the agent sets `freed = seq` again. If a rank dies in between, `seq` stays odd and nobody reads
what it wrote.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

from jurymast.worker.schedule import fence

PAGE_VARIABLE = "JURYMAST_KEEPER"


class Word(IntEnum):
    """The words of a rank's record. Sizes are in bytes."""

    # the agent's
    REFUSED = 0  # 1: this node cannot give the memory that the rank asked for
    RESTORE = 1  # a value of `RestoreStatus`
    RESTORE_SLOT = 2
    RESTORE_STEP = 3
    RESTORE_ATTEMPT = 4  # the attempt that saved it
    RESTORE_IMAGE = 5  # size of the image in that slot
    RESTORE_MANIFEST = 6  # size of the manifest after it
    # the rank's
    WANT = 8  # largest expected size of image and manifest; asks the agent for slots of that size


class SlotWord(IntEnum):
    """The words of one slot; a record has `SLOTS` of them."""

    # the agent's
    FD = 0  # the agent's descriptor; 0: there is no buffer yet
    GENERATION = 1  # changes whenever the buffer does
    CAPACITY = 2
    FREED = 3
    # the rank's
    SEQ = 4
    STEP = 5
    IMAGE = 6  # size of the image
    MANIFEST = 7  # size of the manifest after it


class RestoreStatus(IntEnum):
    PENDING = 0  # the agent is still fetching
    READY = 1  # the image is in the slot, verified
    ELSEWHERE = 2  # nothing in memory: the ranks restore from the shared tier
    FAILED = 3  # it cannot be brought: the rank waits while the supervisor decides about the attempt


_SLOT_WORDS = len(SlotWord)
_FIRST_SLOT = 16
RANK_WORDS = 64
RANK_BYTES = 8 * RANK_WORDS


class _Words:
    """Single aligned 8-byte words that another process reads or writes. Whoever reads a word also sees what
    its writer wrote before it, above all the image that the word refers to."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, word: int) -> int:
        value = int(self._words[word])
        fence()
        return value

    def __setitem__(self, word: int, value: int) -> None:
        fence()
        self._words[word] = value


class RankRecord(_Words):
    """One rank's words."""

    def __init__(self, page: mmap.mmap | memoryview[int], local_rank: int) -> None:
        start = local_rank * RANK_BYTES
        super().__init__(memoryview(page)[start : start + RANK_BYTES].cast("q"))

    def slot(self, number: int) -> SlotRecord:
        start = _FIRST_SLOT + number * _SLOT_WORDS
        return SlotRecord(self._words[start : start + _SLOT_WORDS])


class SlotRecord(_Words):
    """One slot's words."""

    @property
    def writable(self) -> bool:
        """Whether the rank may write into the slot."""
        return self[SlotWord.FD] != 0 and self[SlotWord.FREED] == self[SlotWord.SEQ]


def create_page(ranks: int) -> tuple[int, mmap.mmap]:
    """Create the agent's page, with a record for each local rank. Return (memfd's descriptor, mapping)."""
    descriptor = os.memfd_create("jurymast-keeper", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, max(1, ranks) * RANK_BYTES)
    return descriptor, mmap.mmap(descriptor, 0)
