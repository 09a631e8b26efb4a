"""What a keeper's machine wants done. What takes time says which event brings its answer.

Buffers have numbers, from 1 on, and so has work that takes several steps. `local` is a local rank, `slot` the
number of one of its slots. Sizes and places in a buffer are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.keeper.copies import Copy


@dataclass(frozen=True)
class Tell:
    """The supervisor."""

    message: msg.FromKeeper


# Memory.


@dataclass(frozen=True)
class Measure:
    """See how much memory can be had. Answered by `measured`."""


@dataclass(frozen=True)
class Make:
    """Buffers of this size, that take no memory yet. Answered by `made`, before anything else happens."""

    buffers: tuple[int, ...]
    capacity: int


@dataclass(frozen=True)
class Reserve:
    """Take the memory for all of this buffer. Answered by `reserved`."""

    buffer: int


@dataclass(frozen=True)
class Unmake:
    """Nobody uses it any more."""

    buffer: int


@dataclass(frozen=True)
class Lend:
    """To whoever has asked for it by this `number`. `buffer` is 0, and `why` says why, if it is refused."""

    number: int
    buffer: int
    why: str = ""


# What is held.


@dataclass(frozen=True)
class Serve:
    """Whoever asks for it finds it from now on."""

    copy: Copy


@dataclass(frozen=True)
class Unserve:
    """Nobody finds it any more; who reads it goes on."""

    copy: Copy


@dataclass(frozen=True)
class AwaitReaders:
    """Answered by `unread`, once nobody reads in it."""

    buffer: int


# What ranks see of their slots.


@dataclass(frozen=True)
class Begin:
    """A new attempt: forget what the last rank here has said. It waits for what it is to restore."""

    local: int


@dataclass(frozen=True)
class Mend:
    """The rank is dead: what it began in this free slot, or published unseen, is nothing."""

    local: int
    slot: int


@dataclass(frozen=True)
class Offer:
    """The rank may write into this buffer."""

    local: int
    slot: int
    buffer: int


@dataclass(frozen=True)
class Install:
    """The rank finds an image in this buffer that it has not written, and cannot write."""

    local: int
    slot: int
    buffer: int


@dataclass(frozen=True)
class Free:
    """The rank may write into it again."""

    local: int
    slot: int


@dataclass(frozen=True)
class Withdraw:
    """Take this free buffer away, unless the rank has begun to write. Answered by `withdrawn`."""

    local: int
    slot: int
    buffer: int


@dataclass(frozen=True)
class Detach:
    """There is no buffer any more."""

    local: int
    slot: int


@dataclass(frozen=True)
class Hash:
    """See what `rank` has published there. Answered by `hashed` or `unhashed`."""

    local: int
    slot: int
    buffer: int
    rank: int


@dataclass(frozen=True)
class Refuse:
    """This node has not the memory that the rank wants."""

    local: int


@dataclass(frozen=True)
class Ready:
    """What the rank restores is in this slot, its manifest of `behind` bytes after it."""

    local: int
    slot: int
    report: msg.CopyReport
    behind: int


@dataclass(frozen=True)
class Elsewhere:
    """The rank restores nothing from memory."""

    local: int


@dataclass(frozen=True)
class Fail:
    """What the rank restores cannot be brought: it waits, for the supervisor decides."""

    local: int


# Work.


@dataclass(frozen=True)
class Find:
    """What these ranks' images of a state are like, from whoever has them. Answered by `found`."""

    number: int
    step: int
    attempt: int
    wanted: tuple[msg.Member, ...]


@dataclass(frozen=True)
class Verify:
    """Whether what this copy has is intact. Answered by `verified`."""

    number: int
    copy: Copy


@dataclass(frozen=True)
class Fetch:
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


@dataclass(frozen=True)
class Mix:
    """Take the memory for `size` bytes of the buffer, and make there the XOR of this part of the images that
    were found. Answered by `fetched`."""

    number: int
    part: str
    buffer: int
    size: int
    members: tuple[msg.Member, ...]


@dataclass(frozen=True)
class Hurry:
    """Nobody wants this work any more: answer soon."""

    number: int


@dataclass(frozen=True)
class End:
    """This work is over."""

    number: int


ForMemory = Measure | Make | Reserve | Unmake | Lend
ForReaders = Serve | Unserve | AwaitReaders
ForRanks = (
    Begin | Mend | Offer | Install | Free | Withdraw | Detach | Hash | Refuse | Ready | Elsewhere | Fail
)  # fmt: skip
ForWork = Find | Verify | Fetch | Mix | Hurry | End
Effect = Tell | ForMemory | ForReaders | ForRanks | ForWork
