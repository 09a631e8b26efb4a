"""What a keeper's machine wants done. An effect that takes time names the event that brings its answer.

Buffers have numbers, from 1 on, as does work that takes several steps. `local` is a local rank, `slot` the
number of one of its slots. Sizes and positions in a buffer are bytes.
"""

from __future__ import annotations

from msgspec import Struct

from jurymast.core import messages as msg
from jurymast.core.keeper.copies import KeptCopy


class Tell(Struct, frozen=True):
    """Send this to the supervisor."""

    message: msg.FromKeeper


# Memory.


class Measure(Struct, frozen=True):
    """Measure how much memory is available. Answered by `measured`."""


class Make(Struct, frozen=True):
    """Make buffers of this size that use no memory yet. Answered by `made`, before any other event."""

    buffers: tuple[int, ...]
    capacity: int


class Reserve(Struct, frozen=True):
    """Take the memory for this whole buffer. Answered by `reserved`."""

    buffer: int


class Unmake(Struct, frozen=True):
    """Release a buffer that nobody uses any more."""

    buffer: int


class Lend(Struct, frozen=True):
    """Lend this buffer to the borrower `number`. If that is refused, `buffer` is 0 and `why` gives the
    reason."""

    number: int
    buffer: int
    why: str = ""


# Copies held.


class Serve(Struct, frozen=True):
    """Let readers find this copy from now on."""

    copy: KeptCopy


class Unserve(Struct, frozen=True):
    """Let no new reader find this copy. Present readers continue."""

    copy: KeptCopy


class AwaitReaders(Struct, frozen=True):
    """Wait until nobody reads in this buffer. Answered by `unread`."""

    buffer: int


# The slots as ranks see them.


class Begin(Struct, frozen=True):
    """Start a new attempt: forget what the last rank here reported. The new rank waits for its restore."""

    local: int


class Mend(Struct, frozen=True):
    """Discard what a dead rank began in this free slot, or published there unnoticed."""

    local: int
    slot: int


class Offer(Struct, frozen=True):
    """Let the rank write into this buffer."""

    local: int
    slot: int
    buffer: int


class Install(Struct, frozen=True):
    """Let the rank find an image in this buffer that it did not write and must not overwrite."""

    local: int
    slot: int
    buffer: int


class Free(Struct, frozen=True):
    """Let the rank write into this slot again."""

    local: int
    slot: int


class Withdraw(Struct, frozen=True):
    """Take this free buffer away unless the rank has begun to write. Answered by `withdrawn`."""

    local: int
    slot: int
    buffer: int


class Detach(Struct, frozen=True):
    """Tell the rank that this slot has no buffer any more."""

    local: int
    slot: int


class Hash(Struct, frozen=True):
    """Hash what `rank` has published there. Answered by `hashed` or `unhashed`."""

    local: int
    slot: int
    buffer: int
    rank: int


class Refuse(Struct, frozen=True):
    """Tell the rank that this node lacks the memory that it wants."""

    local: int


class SlotReady(Struct, frozen=True):
    """Tell the rank that its state is in this slot, followed by its manifest of `behind` bytes."""

    local: int
    slot: int
    report: msg.CopyReport
    behind: int


class Elsewhere(Struct, frozen=True):
    """Tell the rank that it restores nothing from memory."""

    local: int


class FailRestore(Struct, frozen=True):
    """Tell the rank that its state cannot be brought here. The rank then waits for the supervisor's
    decision."""

    local: int


# Work.


class FindImages(Struct, frozen=True):
    """Find the manifests of these ranks' images of a state, from any holder. Answered by `found`."""

    number: int
    step: int
    attempt: int
    wanted: tuple[msg.Member, ...]


class Verify(Struct, frozen=True):
    """Verify this copy. Answered by `verified`."""

    number: int
    copy: KeptCopy


class Fetch(Struct, frozen=True):
    """Take the memory for [start, end) of the buffer, and fetch what it lacks of this part of the image,
    which was found or verified; with `behind` its manifest, too. Answered by `fetched`."""

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
    """Take the memory for `size` bytes of the buffer, and make the XOR of this part of the found images
    there. Answered by `fetched`."""

    number: int
    part: str
    buffer: int
    size: int
    members: tuple[msg.Member, ...]


class Hurry(Struct, frozen=True):
    """Answer soon: nobody wants this work any more."""

    number: int


class EndWork(Struct, frozen=True):
    """Release this work; it is over."""

    number: int


ForMemory = Measure | Make | Reserve | Unmake | Lend
ForReaders = Serve | Unserve | AwaitReaders
ForRanks = (
    Begin | Mend | Offer | Install | Free | Withdraw | Detach | Hash | Refuse | SlotReady | Elsewhere
    | FailRestore
)  # fmt: skip
ForWork = FindImages | Verify | Fetch | Mix | Hurry | EndWork
Effect = Tell | ForMemory | ForReaders | ForRanks | ForWork
