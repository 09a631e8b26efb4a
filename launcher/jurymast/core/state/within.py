"""Messages of ranks to their agent: JSON lines {"event": kind, "local_rank": ..., ...} through a pipe that
they share. This module is light to import because ranks import it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from jurymast.core.state.message import Unreadable, reader

# A restore that has waited this long for storage is reported, and again each time this much more has passed.
RESTORE_TOLD_S = 30.0
# The longest time-out that torch gives a process group by itself: gloo's.
TORCH_LIMIT_S = 1800.0
# Phases of a rank from which no steps are due: at the end of its script, and ended with exit code 0.
OVER = ENDING, DONE = "ending", "done"


class Skip(str, Enum):
    """Why a rank could not save into its memory."""

    NOT_READY = "memory is not ready yet"
    BUSY = "both memory slots are busy"
    # It cannot save any more, unless the attempt is restarted and saves to storage instead.
    REFUSED = "this node refused the memory"


class FromRank(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """A message of a rank. The link to the agent fills in which rank."""

    local_rank: int = 0


class Saved(FromRank, frozen=True, kw_only=True):
    """All ranks have saved `step` to a tier, or (not `ok`) could not. Training stood still for `stall_s`
    seconds."""

    step: int
    tier: str
    ok: bool
    stall_s: float
    size_bytes: int = 0
    error: str = ""


class Restored(FromRank, frozen=True, kw_only=True):
    """All ranks continue from `step` (0: a fresh start), read from `tier` in this many seconds. `skipped`:
    newer states, and why they could not be used. `why`: why ranks that live have no newer step that is whole,
    "" if none lives, or they have."""

    step: int
    tier: str
    seconds: float
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()
    why: str = ""


class BeganAt(FromRank, frozen=True, kw_only=True):
    """Rank 0 is about to do the first optimizer step of its attempt, and the script has numbered none.
    `step`: how many the optimizer has done before by its own count, None if it keeps none. `reads`: a file
    that the script read although the run had written it; "" for none, so the script began as in the run's
    first attempt. `given`: this is said once more, because the script has now told the number of a step, from
    which `step` follows."""

    step: int | None = None
    reads: str = ""
    given: bool = False


class GroupMade(FromRank, frozen=True, kw_only=True):
    """The script, a task, is about to make a process group with others."""


class Warned(FromRank, frozen=True, kw_only=True):
    """Ranks of this node got a signal of the job's or of the script's, and catch it: they may leave."""


class TimeOutSet(FromRank, frozen=True, kw_only=True):
    """The script gives a process group this time-out, longer than any that torch chooses by itself."""

    seconds: float


GRADIENT, NONE = "gradient", "none"


class LossNotFinite(FromRank, frozen=True, kw_only=True):
    """The script says that its loss at `step` is `loss`: nan, inf or -inf; or its backwards, or its gradients
    (`of` is GRADIENT), show that it is nan since then; or the optimizer has no gradients (`loss` is NONE).
    Said once by a rank."""

    step: int
    loss: str
    of: str = "loss"


class BatchDiffers(FromRank, frozen=True, kw_only=True):
    """A step's batch is not the one that it is with all `wanted` ranks, although the policy wants it kept,
    and `why`. Said once by rank 0 of an attempt."""

    ranks: int
    wanted: int
    why: str


class RestoreWaits(FromRank, frozen=True, kw_only=True):
    """The storage of `path`, from which this rank restores, has not answered for `seconds`."""

    path: str
    seconds: float


class Unrestored(FromRank, frozen=True, kw_only=True):
    """This rank cannot restore `step` from the image of attempt `of` (0: from the shared tier): it cannot be
    read now, which says nothing about it. The rank waits for its end."""

    step: int
    of: int
    why: str


class ColdStart(FromRank, frozen=True, kw_only=True):
    """The script cannot use the preloaded modules; loading them again took this many seconds."""

    why: str
    seconds: float


class Skipped(FromRank, frozen=True, kw_only=True):
    """This rank could not save `step` into its memory."""

    step: int
    why: Skip


class Cadence(FromRank, frozen=True, kw_only=True):
    """How often the script wants to save: steps or seconds between two saves, or neither."""

    steps: int | None = None
    seconds: float | None = None


class CheckpointsKept(FromRank, frozen=True, kw_only=True):
    """Where the script keeps its checkpoints, and how many of them."""

    directory: str
    keep: int


class SavesTo(FromRank, frozen=True, kw_only=True):
    """The ranks have claimed this directory, and save their checkpoints to it."""

    directory: str


class Foreseen(FromRank, frozen=True, kw_only=True):
    """How large this rank's image will be, and how much of it no other node has."""

    image_bytes: int
    own_bytes: int


class Image(FromRank, frozen=True, kw_only=True):
    """The image of `step` is in this slot; training stood still for `stall_s` seconds for it."""

    slot: int
    step: int
    stall_s: float = 0.0


ForSupervisor = (
    Saved
    | Restored
    | BeganAt
    | GroupMade
    | Warned
    | TimeOutSet
    | LossNotFinite
    | BatchDiffers
    | RestoreWaits
    | Unrestored
    | ColdStart
    | Skipped
    | SavesTo
)
ForKeeper = CheckpointsKept | Foreseen | Image
FromRanks = ForSupervisor | ForKeeper | Cadence | Unreadable

read_rank: Callable[[bytes], FromRanks] = reader(ForSupervisor | ForKeeper | Cadence)
