"""What nodes say they saw, before anybody judges it: where ranks stand, and how tests went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """How far `rank` is in `group`: the number of the newest collective that it entered (0: none), what that
    was, and whether it still waits there."""

    rank: int
    group: str
    number: int
    collective: str
    waits: bool


@dataclass(frozen=True)
class RankPlace:
    """A rank at one look: the `kind` of its place, a `mark` that changes when the rank moves, and the place
    for people: `text`."""

    kind: str
    mark: str
    text: str = field(default="", compare=False)


# A multiple of the median from which a node should be a spare.
MATTERS = 1.25


@dataclass(frozen=True)
class NodeTimes:
    """The result of testing a node by itself: seconds by measure, of its slowest device.

    `wrong` says which result was not exact, `error` what kept a test from finishing; "" for neither.
    """

    times: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
    error: str = ""
