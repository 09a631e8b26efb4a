"""Decides which rank's image gives which items, so that all together are one checkpoint. No torch here."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from jurymast.checkpoint.contents import Described, Item
from jurymast.keeper.manifest import BadImage

Holder = tuple[int, int]  # a rank, and the number of the item in its contents
Holders = dict[tuple[str, tuple[int, ...]], list[Holder]]  # of each item, by name and offsets


@dataclass(frozen=True)
class Stored:
    """One item, as the checkpoint names it, and its place [offset, offset + length) in `file`."""

    item: Item
    file: str
    offset: int


@dataclass(frozen=True)
class Layout:
    """Who writes what. `writes` has for each rank the numbers of its items, in the order of its image."""

    images: dict[int, Described]
    writes: dict[int, list[int]]
    entries: dict[str, dict[str, Any]]

    def stored(self) -> Iterator[Stored]:
        """Yield all items with their places in files that have only what each rank writes."""
        for rank, numbers in self.writes.items():
            offset = 0
            found = extents(self.images[rank])
            for number in numbers:
                yield Stored(self._named(rank, number), file_name(rank), offset)
                offset += found[number][1] - found[number][0]

    def in_images(self) -> Iterator[Stored]:
        """Yield all items with their places in files that are the ranks' whole images."""
        for rank, numbers in self.writes.items():
            for number in numbers:
                yield Stored(self._named(rank, number), file_name(rank), self.images[rank].items[number].at)

    def _named(self, rank: int, number: int) -> Item:
        """Return the item under its name in the checkpoint."""
        item = self.images[rank].items[number]
        if not self.entries.get(str(item.path[0]), {}).get("per_rank"):
            return item
        path = (item.path[0], f"rank-{rank:05d}", *item.path[1:])
        return msgspec.structs.replace(item, name=".".join(map(str, path)), path=path)


def file_name(rank: int) -> str:
    """Return the name that torch's writer gives to a rank's first file."""
    return f"__{rank}_0.distcp"


def extents(image: Described) -> list[tuple[int, int]]:
    """Return (start, end) of each item with the padding after it, so that alignment is kept."""
    items = image.items
    order = sorted(range(len(items)), key=lambda number: items[number].at)
    ends = [items[number].at for number in order[1:]] + [image.manifest.contents_at]
    found: list[tuple[int, int]] = [(0, 0)] * len(order)
    for number, end in zip(order, ends, strict=True):
        found[number] = (items[number].at, end)
    return found


def decide(images: dict[int, Described]) -> Layout:
    """Decide from all ranks' images who writes what. Raises BadImage if they do not fit together.

    Every rank writes entries that differ between ranks; everything else is written once. Items of equal
    common parts are spread over the ranks that have them; the lowest rank writes other items.
    """
    entries = _entries(images)
    writes: dict[int, list[int]] = {rank: [] for rank in sorted(images)}
    holders: Holders = defaultdict(list)
    for rank in sorted(images):
        for number, item in enumerate(images[rank].items):
            if entries.get(str(item.path[0]), {}).get("per_rank"):
                if item.sizes != item.shape:
                    raise BadImage(
                        f"the entry {item.path[0]!r} differs between ranks and has sharded tensors: "
                        "make what differs an entry of its own"
                    )
                writes[rank].append(number)
            elif not item.is_tensor or 0 not in item.sizes or 0 in item.shape:
                holders[item.name, item.offsets].append((rank, number))
    _check(images, holders)
    _assign(images, holders, writes)
    ordered = {
        rank: sorted(numbers, key=lambda number, rank=rank: images[rank].items[number].at)  # type: ignore[misc]
        for rank, numbers in writes.items()
    }
    return Layout(images, ordered, entries)


def _entries(images: dict[int, Described]) -> dict[str, dict[str, Any]]:
    """Return how each entry is saved: once per rank if digests differ, or if some ranks lack the entry."""
    of_ranks = [images[rank].contents.entries for rank in sorted(images)]
    keys = {key: None for theirs in of_ranks for key in theirs}
    found = {}
    for key in keys:
        first = next(theirs[key] for theirs in of_ranks if key in theirs)
        digests = {theirs.get(key, {}).get("digest") for theirs in of_ranks}
        plain = {name: value for name, value in first.items() if name != "digest"}
        found[key] = {**plain, "per_rank": len(digests) > 1}
    return found


def _assign(images: dict[int, Described], holders: Holders, writes: dict[int, list[int]]) -> None:
    # Ranks whose common parts have equal bytes: each has every item of the common part, at the same place.
    groups: dict[str, list[int]] = defaultdict(list)
    ids = {rank: images[rank].manifest.common_id for rank in sorted(images)}
    for rank, common_id in ids.items():
        groups[common_id].append(rank)
    common: list[Holder] = []
    load: Counter[int] = Counter()
    for theirs in holders.values():
        rank, number = theirs[0]
        item = images[rank].items[number]
        if item.at + item.length <= images[rank].manifest.common_bytes:
            common.append((rank, number))
        else:
            writes[rank].append(number)
            load[rank] += item.length
    queues = {name: [(load[rank], rank) for rank in ranks] for name, ranks in groups.items()}
    for queue in queues.values():
        heapq.heapify(queue)
    for first, number in sorted(common, key=lambda one: -images[one[0]].items[one[1]].length):
        queue = queues[ids[first]]
        size, rank = queue[0]
        heapq.heapreplace(queue, (size + images[first].items[number].length, rank))
        writes[rank].append(number)


def _check(images: dict[int, Described], holders: Holders) -> None:
    """Check that a name means the same on all ranks, and that the chunks of each tensor cover it."""
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    covered: Counter[str] = Counter()
    for (name, _), theirs in holders.items():
        sizes = images[theirs[0][0]].items[theirs[0][1]].sizes
        for rank, number in theirs:
            item = images[rank].items[number]
            dtype, shape, other = kinds.setdefault(name, (item.dtype, item.shape, rank))
            if (dtype, shape) != (item.dtype, item.shape) or sizes != item.sizes:
                raise BadImage(
                    f"ranks {other} and {rank} do not agree on {name}: it is {_kind(dtype, shape)} "
                    f"and {_kind(item.dtype, item.shape)}"
                )
        if any(
            at + size > whole for at, size, whole in zip(item.offsets, item.sizes, item.shape, strict=True)
        ):
            raise BadImage(f"rank {theirs[0][0]} has a part of {name} outside its shape")
        covered[name] += math.prod(sizes)
    for name, (dtype, shape, rank) in kinds.items():
        if dtype and covered[name] != math.prod(shape):
            raise BadImage(
                f"{name}, of which rank {rank} has a part, has {covered[name]} of {math.prod(shape)} elements"
                ": its parts overlap, or some are missing"
            )


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}" if dtype else "not a tensor"
