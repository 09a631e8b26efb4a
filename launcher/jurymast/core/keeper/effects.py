"""What a keeper's machine sees of what it holds, and what it wants done. An effect that takes time names the
event that brings its answer.

Buffers have numbers, from 1 on, as does work that takes several steps. `local` is a local rank, `slot` the
number of one of its slots. Sizes and positions in a buffer are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from msgspec import Struct

from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, LOCAL, MEMORY, PEER, ImageId, age

# The order in which a reader is served.
TIERS = (MEMORY, PEER, LOCAL)

Entry = tuple[ImageId, str, str]


class KeptCopy:
    """One image or part of one. `buffer`: the number of the buffer that contains it; 0: it is on the node's
    own disk. The machine's caller adds what it needs itself."""

    def __init__(self, report: msg.CopyReport, buffer: int) -> None:
        self.report = report
        self.buffer = buffer
        self.image = ImageId(report.step, report.attempt, report.rank)
        self.tier, self.part = report.tier, report.part

    @property
    def entry(self) -> Entry:
        """The key of a copy; no two copies with the same key are held."""
        return self.image, self.tier, self.part

    @property
    def age(self) -> tuple[int, int]:
        """Of two states the newer one's age is greater."""
        return age(self.image.state)


# One image: the copy with its own part, and the one with the same common part, if another has it.
Shown = tuple[KeptCopy, KeptCopy | None]

Kept = TypeVar("Kept", bound=KeptCopy)


def best_first(copies: Iterable[Kept], image: ImageId, tiers: Collection[str] = TIERS) -> list[Kept]:
    """Return the copies of this image or parts of it, best first."""
    found = [one for one in copies if one.image == image and one.tier in tiers]
    return sorted(found, key=lambda one: (one.part != ALL, TIERS.index(one.tier)))


class Tell(Struct, frozen=True):
    """Send this to the supervisor."""

    message: msg.FromKeeper


# Memory.


class Measure(Struct, frozen=True):
    """Measure how much memory is available. Answered by `on_memory_measured`."""


class Make(Struct, frozen=True):
    """Make buffers of this size that use no memory yet. Answered by `on_buffers_made`, before all else."""

    buffers: tuple[int, ...]
    capacity: int


class Reserve(Struct, frozen=True):
    """Take the memory for this whole buffer. Answered by `on_buffer_reserved`."""

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
    """Wait until nobody reads in this buffer. Answered by `on_buffer_unread`."""

    buffer: int


# The slots as ranks see them.


class ForRank(Struct, frozen=True):
    local: int


class ForSlot(ForRank, frozen=True):
    slot: int


class ForSlotBuffer(ForSlot, frozen=True):
    buffer: int


class Begin(ForRank, frozen=True):
    """Start a new attempt: forget what the last rank here reported. The new rank waits for its restore."""


class Mend(ForSlot, frozen=True):
    """Discard what a dead rank began in this free slot, or published there unnoticed."""


class Offer(ForSlotBuffer, frozen=True):
    """Let the rank write into this buffer."""


class Install(ForSlotBuffer, frozen=True):
    """Let the rank find an image in this buffer that it did not write and must not overwrite."""


class Free(ForSlot, frozen=True):
    """Let the rank write into this slot again."""


class Withdraw(ForSlotBuffer, frozen=True):
    """Take this free buffer away unless the rank has begun to write. Answered by `on_slot_withdrawn`."""


class Detach(ForSlot, frozen=True):
    """Tell the rank that this slot has no buffer any more."""


class Hash(ForSlotBuffer, frozen=True):
    """Hash what `rank` has published there. Answered by `on_image_hashed` or `on_image_unhashed`."""

    rank: int


class Refuse(ForRank, frozen=True):
    """Tell the rank that this node lacks the memory that it wants."""


class SlotReady(ForSlot, frozen=True):
    """Tell the rank that its state is in this slot, followed by its manifest of `behind` bytes."""

    report: msg.CopyReport
    behind: int


class Elsewhere(ForRank, frozen=True):
    """Tell the rank that it restores nothing from memory."""


class FailRestore(ForRank, frozen=True):
    """Tell the rank that its state cannot be brought here. The rank then waits for the supervisor's
    decision."""


# Work.


class ForWork(Struct, frozen=True):
    number: int


class FindImage(ForWork, frozen=True):
    """Find the manifest of this image, here or from one of `sources`. Answered by `on_source_found`."""

    image: ImageId
    sources: tuple[msg.Source, ...]


class Verify(ForWork, frozen=True):
    """Verify this copy. Answered by `on_copy_verified`."""

    copy: KeptCopy


class Fetch(ForWork, frozen=True):
    """Take the memory for [start, end) of the buffer, and fetch what it lacks of this part of the image,
    which was found or verified; with `behind` its manifest, too. Answered by `on_image_fetched`."""

    image: ImageId
    tier: str
    part: str
    buffer: int
    start: int
    end: int
    sources: tuple[msg.Source, ...]
    behind: bool


class Show(ForWork, frozen=True):
    """Let all ranks of this node read these images, which another number of ranks saved, as what they
    restore. No copy changes from now on until Unshow. Answered by `on_shown`, before all else."""

    images: tuple[Shown, ...]


class Hurry(ForWork, frozen=True):
    """Answer soon: nobody wants this work any more."""


class Unshow(Struct, frozen=True):
    """End Show: nobody reads these images any more."""


class EndWork(ForWork, frozen=True):
    """Release this work; it is over."""


ForMemory = Measure | Make | Reserve | Unmake | Lend
ForRanks = (
    Begin | Mend | Offer | Install | Free | Withdraw | Detach | Hash | Refuse | SlotReady | Elsewhere
    | FailRestore
)  # fmt: skip
Effect = (
    Tell | ForMemory | Serve | Unserve | AwaitReaders | ForRanks | FindImage | Verify | Fetch | Show
    | Unshow | Hurry | EndWork
)  # fmt: skip
