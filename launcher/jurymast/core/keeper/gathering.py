"""From whom a keeper brings an image together: one source after the other, best first, until it is whole.

Of a source counts what its hashes prove, so that one which dies or lies only leaves something for the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, COMMON, OWN
from jurymast.core.keeper.copies import Image


def parts_of(part: str) -> tuple[str, ...]:
    return (COMMON, OWN) if part == ALL else (part,)


@dataclass(frozen=True)
class FromHere:
    """Read this node's own copies of `source.rank`'s image."""

    source: msg.Source


@dataclass(frozen=True)
class FromPeer:
    """Ask another node for that image's bytes."""

    source: msg.Source


@dataclass(frozen=True)
class Rebuild:
    """Out of an XOR, and the same part of the other images that are in it: see `ingredients`."""

    source: msg.Source


Fetch = FromHere | FromPeer | Rebuild


class Gathering:
    """`node`: this one. `of_xor`: what is fetched is an XOR itself, of which the sources have copies."""

    def __init__(self, node: str, sources: Sequence[msg.Source], *, of_xor: bool = False) -> None:
        self._node, self._of_xor = node, of_xor
        self._sources = list(sources)

    def next(self, missing: Collection[str]) -> Fetch | None:
        """What to try for these parts, of which something is missing; None: nobody is left, or nothing is."""
        while self._sources and missing:
            source = self._sources.pop(0)
            if set(missing).isdisjoint(parts_of(source.part)):
                continue
            if source.group and not self._of_xor:
                return Rebuild(source)
            return FromHere(source) if source.node == self._node else FromPeer(source)
        return None


class ManifestSearch:
    """Whom to ask what the image of `rank` is like: each node once that has some of that one, and not this
    node, which would know."""

    def __init__(self, node: str, rank: int, sources: Sequence[msg.Source]) -> None:
        self._sources = [one for one in sources if one.rank == rank and one.node != node]
        self._asked: set[str] = set()

    def next(self) -> msg.Source | None:
        source = next((one for one in self._sources if one.node not in self._asked), None)
        if source is not None:
            self._asked.add(source.node)
        return source


@dataclass(frozen=True)
class Ingredient:
    """An image to go into an XOR, or to come out of one; with a `group` that XOR itself."""

    image: Image
    sources: tuple[msg.Source, ...]
    group: tuple[int, ...] = ()


def ingredients(image: Image, source: msg.Source) -> Iterator[Ingredient]:
    """What this image's part is made of again: the XOR at `source`, then each other member. One that is not
    to be had makes all others useless."""
    step, attempt, rank = image
    group = tuple(sorted(source.group))
    xor = (step, attempt, group[0])
    yield Ingredient(xor, (of_rank(source, group[0]),), group)
    yield from (one for one in members(step, attempt, source.members) if one.image[2] != rank)


def members(step: int, attempt: int, told: Sequence[msg.Member]) -> Iterator[Ingredient]:
    """Nothing is made of one XOR to make another of it."""
    for member in told:
        plain = tuple(one for one in member.sources if not one.group)
        yield Ingredient((step, attempt, member.rank), plain)


def of_rank(source: msg.Source, rank: int) -> msg.Source:
    """The XOR goes by its lowest rank's name."""
    return msg.Source(
        tier=source.tier, node=source.node, hosts=source.hosts, port=source.port, part=source.part, rank=rank,
        group=source.group,
    )  # fmt: skip
