"""The agents that hold images, and how one is told where to get what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import Member, Source


@dataclass
class Holder:
    """How other agents reach this one's data. `incarnation` is new with every agent process. `full`: it has
    refused memory; `packed`: for parity as well, which is asked of it once more (until `retried`) when it has
    given older replicas up. `slotless`: it was told that ranks save no more."""

    address: str
    port: int
    incarnation: str
    full: bool = False
    packed: bool = False
    retried: bool = False
    slotless: bool = False


def spelled(sources: Iterable[Source], holders: Mapping[str, Holder]) -> tuple[msg.Source, ...]:
    """With addresses, for a message. A node that has left is no source."""
    return tuple(
        msg.Source(
            tier=source.tier, node=source.node, hosts=(known.address,), port=known.port, part=source.part,
            rank=source.rank, group=source.group,
            members=spelled_members(source.members, holders) if source.members else (),
        )
        for source in sources
        if (known := holders.get(source.node)) is not None
    )  # fmt: skip


def spelled_members(members: Iterable[Member], holders: Mapping[str, Holder]) -> tuple[msg.Member, ...]:
    """Of a group, likewise."""
    return tuple(msg.Member(rank=one.rank, sources=spelled(one.sources, holders)) for one in members)
