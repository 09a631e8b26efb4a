"""What nodes say they saw, before anybody judges it: where ranks stand, and how tests went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """How far `rank` is in `group`: the number of the newest collective that it entered (0: none), what that
    was, and whether it still waits there."""

    rank: int
    group: str
    number: int
    collective: str
    waits: bool


class SparedRank(NamedTuple):
    """A rank that has left its step and waits in its process for the next attempt. `local`: its number on its
    node; its state is that after `step`, or of no step (-1)."""

    local: int
    pid: int
    step: int


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
