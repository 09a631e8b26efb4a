"""What ranks say, through a pipe to their agent: JSON lines, {"event": kind, "local_rank": ..., ...}."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jurymast.wire.messages.base import Strange, reader


class FromRank(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, omit_defaults=True):
    """What all of it has in common."""

    local_rank: int = 0


class Saved(FromRank, frozen=True, kw_only=True):
    """All ranks have saved `step` to a tier, or (not `ok`) could not; training stood still for `stall_s`
    seconds."""

    step: int
    tier: str
    ok: bool
    stall_s: float
    size_bytes: int = 0
    error: str = ""


class Restored(FromRank, frozen=True, kw_only=True):
    """All ranks go on from `step` (0: a fresh start), read from `tier` in so many seconds; `skipped`: what
    was newer, and why it did not serve."""

    step: int
    tier: str
    seconds: float
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()


class ColdStart(FromRank, frozen=True, kw_only=True):
    """What was loaded ahead is of no use to the script; loading it again took so many seconds."""

    why: str
    seconds: float


class Skipped(FromRank, frozen=True, kw_only=True):
    """This rank could not save `step` into its memory."""

    step: int
    why: str = ""


class Cadence(FromRank, frozen=True, kw_only=True):
    """How often the script wants to save: steps or seconds between two, or neither."""

    steps: int | None = None
    seconds: float | None = None


class Checkpoints(FromRank, frozen=True, kw_only=True):
    """Where the script has its checkpoints, and how many of them it keeps."""

    directory: str
    keep: int


class Foreseen(FromRank, frozen=True, kw_only=True):
    """How large this rank's image will be, and what of it no other node has."""

    image_bytes: int
    own_bytes: int


class Image(FromRank, frozen=True, kw_only=True):
    """An image lies in this slot; training stood still for `stall_s` seconds for it."""

    slot: int
    stall_s: float = 0.0


ForSupervisor = Saved | Restored | ColdStart | Skipped
ForKeeper = Checkpoints | Foreseen | Image
Event = ForSupervisor | ForKeeper | Cadence | Strange

read_event: Callable[[bytes], Event] = reader(ForSupervisor | ForKeeper | Cadence)
