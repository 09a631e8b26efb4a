"""The agents that hold images, and how one is told where to get what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jurymast.core.copies import Member, Source


@dataclass
class Holder:
    """How other agents reach this one's data. `full`: it has refused memory; `packed`: for parity as well,
    which is asked of it once more (until `retried`) when it has given older replicas up."""

    address: str
    port: int
    full: bool = False
    packed: bool = False
    retried: bool = False


def spelled(sources: Iterable[Source], holders: Mapping[str, Holder]) -> list[dict[str, Any]]:
    """With addresses, for a message. A node that has left is no source."""
    found = []
    for source in sources:
        known = holders.get(source.node)
        if known is not None:
            one: dict[str, Any] = {
                "tier": source.tier, "node": source.node, "hosts": [known.address], "port": known.port,
                "part": source.part, "rank": source.rank,
            }  # fmt: skip
            if source.group:
                one["group"] = list(source.group)
                one["members"] = spelled_members(source.members, holders)
            found.append(one)
    return found


def spelled_members(members: Iterable[Member], holders: Mapping[str, Holder]) -> list[dict[str, Any]]:
    """Of a group, likewise."""
    return [{"rank": one.rank, "sources": spelled(one.sources, holders)} for one in members]
