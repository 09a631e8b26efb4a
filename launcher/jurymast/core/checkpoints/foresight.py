"""Foresees before a run's first step whether checkpoints will fit into the nodes' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jurymast.core.checkpoints.parity import Protection

# An image or replica stays until a newer one is whole and safe.
AT_ONCE = 2


@dataclass(frozen=True)
class Room:
    """`free` bytes are available, after subtracting a reserve; `limit`: the file that limits them."""

    free: int
    limit: str


@dataclass(frozen=True)
class NodeForesight:
    """The sizes for one active node: of its ranks' images together, and of what no other node has of
    these."""

    image_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class Need:
    """What checkpoints will take on one node: its own ranks' slots, and replicas of other nodes' states."""

    slots_bytes: int = 0
    replicas_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.slots_bytes + self.replicas_bytes


def needs(
    foreseen: Mapping[str, NodeForesight], placement: Sequence[str], ranks_per_node: int, kept: Protection
) -> dict[str, Need]:
    """Return the needs by node. `foreseen` has every node of the placement. What ranks share counts as
    replicated."""
    held: dict[str, int] = {}
    for node, holders in kept.whole.items():
        for holder in holders:
            held[holder] = held.get(holder, 0) + foreseen[node].own_bytes
    for group, holder in kept.parity.items():
        longest = max(foreseen[placement[rank // ranks_per_node]].own_bytes for rank in group)
        held[holder] = held.get(holder, 0) + longest // ranks_per_node
    return {
        node: Need(
            AT_ONCE * foreseen[node].image_bytes if node in foreseen else 0, AT_ONCE * held.get(node, 0)
        )
        for node in dict.fromkeys([*placement, *held])
    }
