"""From whom a keeper fetches an image: one source after another, best first, until the image is complete.

Only bytes whose hashes match count, so a source that dies or sends wrong bytes only leaves more for the next.
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
    """Compute the part from an XOR and the same part of the other images in it: see `ingredients`."""

    source: msg.Source


Fetch = FromHere | FromPeer | Rebuild


class Gathering:
    """`node`: this one. `of_xor`: what is fetched is an XOR itself, which the sources hold."""

    def __init__(self, node: str, sources: Sequence[msg.Source], *, of_xor: bool = False) -> None:
        self._node, self._of_xor = node, of_xor
        self._sources = list(sources)

    def next(self, missing: Collection[str]) -> Fetch | None:
        """Return what to try for these parts, of which something is missing; None: no source is left, or
        nothing is missing."""
        while self._sources and missing:
            source = self._sources.pop(0)
            if set(missing).isdisjoint(parts_of(source.part)):
                continue
            if source.group and not self._of_xor:
                return Rebuild(source)
            return FromHere(source) if source.node == self._node else FromPeer(source)
        return None


class ManifestSearch:
    """Whom to ask for the manifest of `rank`'s image: each node that has some of that image once, except this
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
    """An image that goes into an XOR or is removed from it; with a `group` the XOR itself."""

    image: Image
    sources: tuple[msg.Source, ...]
    group: tuple[int, ...] = ()


def ingredients(image: Image, source: msg.Source) -> Iterator[Ingredient]:
    """Return what this image's part is computed from: the XOR at `source`, then each other member. If one is
    not available, all others are useless."""
    step, attempt, rank = image
    group = tuple(sorted(source.group))
    xor = (step, attempt, group[0])
    yield Ingredient(xor, (of_rank(source, group[0]),), group)
    yield from (one for one in members(step, attempt, source.members) if one.image[2] != rank)


def members(step: int, attempt: int, told: Sequence[msg.Member]) -> Iterator[Ingredient]:
    """Return the members of an XOR, with sources of whole images only: no XOR is computed from another
    one."""
    for member in told:
        plain = tuple(one for one in member.sources if not one.group)
        yield Ingredient((step, attempt, member.rank), plain)


def of_rank(source: msg.Source, rank: int) -> msg.Source:
    """Return this source for the image of `rank`. An XOR goes by its lowest rank."""
    return msg.Source(
        tier=source.tier, node=source.node, hosts=source.hosts, port=source.port, part=source.part, rank=rank,
        group=source.group,
    )  # fmt: skip
