"""What is saved: states, images, their parts and copies, and the tiers that hold them.

An image is one rank's bytes of a state, that is, of one step of one attempt.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

MEMORY, PEER, LOCAL, SHARED, OBJECT = "memory", "peer", "local", "shared", "object"
# No tier: ranks that live gave their state to the others.
LIVE = "live"

ALL, COMMON, OWN = "all", "common", "own"

Part = Annotated[str, msgspec.Meta(pattern=f"^({ALL}|{COMMON}|{OWN})$")]


class StateId(NamedTuple):
    """What all ranks hold at one step of one attempt. The same step of another attempt is another state."""

    step: int
    attempt: int


class ImageId(NamedTuple):
    """One rank's bytes of a state."""

    step: int
    attempt: int
    rank: int

    @property
    def state(self) -> StateId:
        return StateId(self.step, self.attempt)


Place = tuple[str, str, str]  # node, tier, part


def age(key: StateId) -> tuple[int, int]:
    """Return (attempt, step): of two states of a run, the one reached later compares greater."""
    return key.attempt, key.step


def parts_of(part: str) -> tuple[str, ...]:
    return (COMMON, OWN) if part == ALL else (part,)


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A verified copy of (a `part` of) one rank's image on one node, in the memory, peer or local tier.

    `size_bytes` is the size of the whole image; `common_bytes` and `common_id` are its common part's size and
    hash.
    """

    node: str
    tier: str
    step: int
    attempt: int
    rank: int
    world: int
    part: str
    size_bytes: int
    common_bytes: int = 0
    common_id: str = ""

    @property
    def place(self) -> Place:
        return (self.node, self.tier, self.part)

    @property
    def key(self) -> StateId:
        return StateId(self.step, self.attempt)

    def has(self, part: str) -> bool:
        return self.part in (ALL, part)

    @property
    def part_bytes(self) -> int:
        """The size of what is copied."""
        own = self.size_bytes - self.common_bytes
        return {ALL: self.size_bytes, COMMON: self.common_bytes, OWN: own}[self.part]


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a node can get `part` of an image: from `rank`'s image on `node`, which is reached at one of its
    `hosts`, to try in this order, and the `port` there. It counts as `tier`."""

    tier: str
    node: str
    hosts: tuple[str, ...]
    port: int
    part: Part
    rank: int

    def has(self, part: str) -> bool:
        return self.part in (ALL, part)
