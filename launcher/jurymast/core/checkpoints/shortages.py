"""Reports before the first step which nodes will be short of memory for checkpoints, and what to do about
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints.parity import Protection
from jurymast.core.effects import Effect, Record
from jurymast.core.texts import memory_size

# An image or replica stays until a newer one is whole and safe.
AT_ONCE = 2


@dataclass(frozen=True)
class Need:
    """What checkpoints will take on one node: its own ranks' slots, and replicas of other nodes' states."""

    slots_bytes: int = 0
    replicas_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.slots_bytes + self.replicas_bytes


def needs(
    foreseen: Mapping[str, msg.Foreseen], placement: Sequence[str], ranks_per_node: int, kept: Protection
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


class Shortages:
    """Reports shortages. What a node can give includes what checkpoints already use there."""

    def __init__(self) -> None:
        self._rooms: dict[str, msg.Room] = {}
        self._foreseen: dict[str, msg.Foreseen] = {}
        self._told: dict[str, Need] = {}

    def joined(self, node: str, room: msg.Room | None) -> None:
        self._foreseen.pop(node, None)
        if room is not None:
            self._rooms[node] = room

    def lost(self, node: str) -> None:
        self._foreseen.pop(node, None)
        self._rooms.pop(node, None)

    def hear(self, node: str, message: msg.Foreseen) -> None:
        """All ranks of a node have reported how large their states will be."""
        self.joined(node, message.room)
        self._foreseen[node] = message

    def complete(self, placement: Sequence[str]) -> bool:
        """Whether every node of the placement has reported."""
        return len(self._foreseen) >= len(placement) and all(node in self._foreseen for node in placement)

    def look(
        self, placement: Sequence[str], ranks_per_node: int, kept: Protection, now: float
    ) -> list[Effect]:
        """Report each shortage once, when the reports are complete."""
        theirs = {node: self._foreseen[node] for node in placement}
        effects: list[Effect] = []
        for node, need in needs(theirs, placement, ranks_per_node, kept).items():
            room = self._rooms.get(node)
            if room is not None and need.total_bytes > room.free and self._told.get(node) != need:
                self._told[node] = need
                effects.append(Record(ev.Noted(t=now, node=node, message=_shortage(need, room))))
        self._foreseen.clear()
        return effects


def _shortage(need: Need, room: msg.Room) -> str:
    parts = {"two images of each rank": need.slots_bytes, "replicas of other nodes": need.replicas_bytes}
    told = ", ".join(f"{what} {memory_size(count)}" for what, count in parts.items() if count)
    consequence = (
        "all ranks will save to shared storage"
        if need.slots_bytes > room.free
        else "replicas will be kept elsewhere, or as parity"
    )
    return (
        f"checkpoints will take {memory_size(need.total_bytes)} of memory here ({told}), but only "
        f"{memory_size(room.free)} available (limit: {room.limit}); "
        f"ask Slurm for more --mem, or {consequence}"
    )
