"""The agents that hold images, and how to tell one where to get what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import Member, Source


@dataclass
class Holder:
    """How other agents reach this one's data. `incarnation` is new with every agent process. `full`: it
    refused memory for a replica; `packed`: for parity as well, which is requested once more (until `retried`)
    when it has given up older replicas. `slotless`: it was told that ranks save no more."""

    address: str
    port: int
    incarnation: str
    full: bool = False
    packed: bool = False
    retried: bool = False
    slotless: bool = False


def spelled(sources: Iterable[Source], holders: Mapping[str, Holder]) -> tuple[msg.Source, ...]:
    """Return the sources with addresses, for a message. A node that has left is no source."""
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
    """Return the members of a group with addresses."""
    return tuple(msg.Member(rank=one.rank, sources=spelled(one.sources, holders)) for one in members)
