"""Messages about images: who holds which, who copies what where, and what an attempt restores.

A state is named by `step` and `attempt`, an image by these and a `rank`. Sizes are bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.foresight import Room
from jurymast.core.message import ToAgent, ToSupervisor

Part = Annotated[str, msgspec.Meta(pattern=f"^({cp.ALL}|{cp.COMMON}|{cp.OWN})$")]
HeldTier = Annotated[str, msgspec.Meta(pattern=f"^({cp.MEMORY}|{cp.PEER}|{cp.LOCAL})$")]


class MemberReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's image that is part of an XOR."""

    rank: int
    size_bytes: int
    common_bytes: int = 0
    common_id: str = ""


class CopyReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A verified copy of (a `part` of) an image on the reporting node; with `members` the XOR of that part of
    their images. `size_bytes` is the whole image's size; training stood still for `stall_s` seconds for
    it."""

    tier: HeldTier
    step: int
    attempt: int
    rank: int
    world: int
    part: Part
    size_bytes: int
    common_bytes: int = 0
    common_id: str = ""
    members: tuple[MemberReport, ...] = ()
    stall_s: float = 0.0

    def on(self, node: str) -> tuple[cp.Copy, ...]:
        """Return it as the supervisor counts it: one copy, or for an XOR one for each member."""
        if not self.members:
            return (self._copy(node, self, ()),)
        group = tuple(one.rank for one in self.members)
        return tuple(self._copy(node, one, group) for one in self.members)

    def _copy(self, node: str, of: CopyReport | MemberReport, group: tuple[int, ...]) -> cp.Copy:
        return cp.Copy(
            node, self.tier, self.step, self.attempt, of.rank, self.world, self.part,
            of.size_bytes, of.common_bytes, of.common_id, group,
        )  # fmt: skip


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `core.checkpoints.copies.Source` with the address of its node: `hosts` to try in this order, and the
    port there."""

    tier: str
    node: str
    hosts: tuple[str, ...]
    port: int
    part: Part
    rank: int
    group: tuple[int, ...] = ()
    members: tuple[Member, ...] = ()


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a group, and where its image is available."""

    rank: int
    sources: tuple[Source, ...]


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The state from which an attempt continues, and for each rank of the node where to get its image, best
    first; () if the node has it in its own memory: see `AskSources`."""

    step: int
    attempt: int
    ranks: dict[int, tuple[Source, ...]]


class Held(ToSupervisor, frozen=True, kw_only=True):
    """A copy is verified and held from now on."""

    copies: tuple[CopyReport, ...]


class Dropped(ToSupervisor, frozen=True, kw_only=True):
    """A copy is no longer held; `why` is "" unless it was corrupt. Copies dropped by order are not
    reported."""

    copy: CopyReport
    why: str = ""


class Refused(ToSupervisor, frozen=True, kw_only=True):
    """This node cannot give the memory for a replica; with a `group` not even for that group's XOR."""

    why: str
    group: tuple[int, ...] = ()


class Foreseen(ToSupervisor, frozen=True, kw_only=True):
    """How large the images of this node's ranks will be together, how much of that no other node has, and the
    room there is."""

    image_bytes: int
    own_bytes: int
    room: Room


class Prefetched(ToSupervisor, frozen=True, kw_only=True):
    """A rank's image is whole in its slot. It lists the bytes by tier, and why sources were passed over."""

    step: int
    attempt: int
    rank: int
    tiers: dict[str, int]
    seconds: float
    passed_over: tuple[str, ...] = ()


class Unrestorable(ToSupervisor, frozen=True, kw_only=True):
    """The image that `rank` is to restore in `attempt`, of `step` and saved by the attempt `of`, cannot be
    brought here."""

    attempt: int
    rank: int
    step: int
    of: int
    why: str


class AskSources(ToSupervisor, frozen=True, kw_only=True):
    """The image that a rank is to restore from its own node's memory is missing or incomplete: who else has
    it? Answered by Sources."""

    step: int
    attempt: int
    rank: int


class Unreplicated(ToSupervisor, frozen=True, kw_only=True):
    """An order by Replicate could not be carried out."""

    step: int
    attempt: int
    rank: int
    part: Part
    why: str
    group: tuple[int, ...] = ()


class Written(ToSupervisor, frozen=True, kw_only=True):
    """A node's part of a write has ended; `why` if it is not `ok`."""

    id: str
    tier: str
    ok: bool
    size_bytes: int = 0
    why: str = ""


class Replicate(ToAgent, frozen=True, kw_only=True):
    """Hold this part of another node's image, from one of `sources`; with a `group` the XOR of that part of
    all `members`."""

    step: int
    attempt: int
    rank: int
    part: Part
    sources: tuple[Source, ...] = ()
    group: tuple[int, ...] = ()
    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        if self.group and not {member.rank for member in self.members} >= set(self.group):
            raise ValueError("a group of which some rank's image is nowhere")


class Sources(ToAgent, frozen=True, kw_only=True):
    """Where else a rank's image is, best first; () if nowhere."""

    step: int
    attempt: int
    rank: int
    sources: tuple[Source, ...]


class Committed(ToAgent, frozen=True, kw_only=True):
    """This state is safe: older states may go."""

    step: int
    attempt: int


class Void(ToAgent, frozen=True, kw_only=True):
    """This state will never be complete."""

    step: int
    attempt: int


class Forget(ToAgent, frozen=True, kw_only=True):
    """Drop replicas of these ranks' images."""

    step: int
    attempt: int
    ranks: tuple[int, ...]


class ForgetNewer(ToAgent, frozen=True, kw_only=True):
    """The run goes back to `step`."""

    step: int


class GiveSlotsUp(ToAgent, frozen=True, kw_only=True):
    """The nodes are about to be released, and ranks save no more: use the memory of free slots for other
    nodes' images."""


class Write(ToAgent, frozen=True, kw_only=True):
    """Copy the images of these `ranks`, of `world` in all, to a tier; `lead`: bring all nodes' parts
    together."""

    id: str
    tier: str
    step: int
    attempt: int
    ranks: tuple[int, ...]
    world: int
    lead: bool = False


class CancelWrite(ToAgent, frozen=True, kw_only=True):
    """Stop writing."""

    id: str


FromKeeper = Held | Dropped | Refused | Prefetched | AskSources | Unrestorable | Unreplicated
AboutCheckpoints = FromKeeper | Foreseen | Written
KeeperOrder = Replicate | Sources | Committed | Void | Forget | ForgetNewer | GiveSlotsUp
CheckpointOrder = KeeperOrder | Write | CancelWrite
