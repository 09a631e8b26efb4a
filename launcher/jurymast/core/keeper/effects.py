"""What a keeper's machine wants done. What takes time says which event brings its answer.

Buffers have numbers, from 1 on, and so has work that takes several steps. `local` is a local rank, `slot` the
number of one of its slots. Sizes and places in a buffer are bytes.
"""

from __future__ import annotations

from msgspec import Struct

from jurymast.core import messages as msg
from jurymast.core.keeper.copies import KeptCopy


class Tell(Struct, frozen=True):
    """The supervisor."""

    message: msg.FromKeeper


# Memory.


class Measure(Struct, frozen=True):
    """See how much memory can be had. Answered by `measured`."""


class Make(Struct, frozen=True):
    """Buffers of this size, that take no memory yet. Answered by `made`, before anything else happens."""

    buffers: tuple[int, ...]
    capacity: int


class Reserve(Struct, frozen=True):
    """Take the memory for all of this buffer. Answered by `reserved`."""

    buffer: int


class Unmake(Struct, frozen=True):
    """Nobody uses it any more."""

    buffer: int


class Lend(Struct, frozen=True):
    """To whoever has asked for it by this `number`. `buffer` is 0, and `why` says why, if it is refused."""

    number: int
    buffer: int
    why: str = ""


# What is held.


class Serve(Struct, frozen=True):
    """Whoever asks for it finds it from now on."""

    copy: KeptCopy


class Unserve(Struct, frozen=True):
    """Nobody finds it any more; who reads it goes on."""

    copy: KeptCopy


class AwaitReaders(Struct, frozen=True):
    """Answered by `unread`, once nobody reads in it."""

    buffer: int


# What ranks see of their slots.


class Begin(Struct, frozen=True):
    """A new attempt: forget what the last rank here has said. It waits for what it is to restore."""

    local: int


class Mend(Struct, frozen=True):
    """The rank is dead: what it began in this free slot, or published unseen, is nothing."""

    local: int
    slot: int


class Offer(Struct, frozen=True):
    """The rank may write into this buffer."""

    local: int
    slot: int
    buffer: int


class Install(Struct, frozen=True):
    """The rank finds an image in this buffer that it has not written, and cannot write."""

    local: int
    slot: int
    buffer: int


class Free(Struct, frozen=True):
    """The rank may write into it again."""

    local: int
    slot: int


class Withdraw(Struct, frozen=True):
    """Take this free buffer away, unless the rank has begun to write. Answered by `withdrawn`."""

    local: int
    slot: int
    buffer: int


class Detach(Struct, frozen=True):
    """There is no buffer any more."""

    local: int
    slot: int


class Hash(Struct, frozen=True):
    """See what `rank` has published there. Answered by `hashed` or `unhashed`."""

    local: int
    slot: int
    buffer: int
    rank: int


class Refuse(Struct, frozen=True):
    """This node has not the memory that the rank wants."""

    local: int


class SlotReady(Struct, frozen=True):
    """What the rank restores is in this slot, its manifest of `behind` bytes after it."""

    local: int
    slot: int
    report: msg.CopyReport
    behind: int


class Elsewhere(Struct, frozen=True):
    """The rank restores nothing from memory."""

    local: int


class FailRestore(Struct, frozen=True):
    """What the rank restores cannot be brought: it waits, for the supervisor decides."""

    local: int


# Work.


class FindImages(Struct, frozen=True):
    """What these ranks' images of a state are like, from whoever has them. Answered by `found`."""

    number: int
    step: int
    attempt: int
    wanted: tuple[msg.Member, ...]


class Verify(Struct, frozen=True):
    """Whether what this copy has is intact. Answered by `verified`."""

    number: int
    copy: KeptCopy


class Fetch(Struct, frozen=True):
    """Take the memory for [start, end) of the buffer, and bring this part of the image that was found or
    verified into it, or what it lacks of it; with `behind` its manifest as well. Answered by `fetched`."""

    number: int
    image: tuple[int, int, int]
    tier: str
    part: str
    buffer: int
    start: int
    end: int
    sources: tuple[msg.Source, ...]
    behind: bool


class Mix(Struct, frozen=True):
    """Take the memory for `size` bytes of the buffer, and make there the XOR of this part of the images that
    were found. Answered by `fetched`."""

    number: int
    part: str
    buffer: int
    size: int
    members: tuple[msg.Member, ...]


class Hurry(Struct, frozen=True):
    """Nobody wants this work any more: answer soon."""

    number: int


class EndWork(Struct, frozen=True):
    """This work is over."""

    number: int


ForMemory = Measure | Make | Reserve | Unmake | Lend
ForReaders = Serve | Unserve | AwaitReaders
ForRanks = (
    Begin | Mend | Offer | Install | Free | Withdraw | Detach | Hash | Refuse | SlotReady | Elsewhere
    | FailRestore
)  # fmt: skip
ForWork = FindImages | Verify | Fetch | Mix | Hurry | EndWork
Effect = Tell | ForMemory | ForReaders | ForRanks | ForWork
