"""Decides which rank writes which items of its image, so that all files together are one DCP checkpoint, and
has torch write the `.metadata` file that completes it.

Functions that need torch import it, because only the process of one node calls them.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jurymast.checkpoint.directory import FileRecord, hash_file
from jurymast.keeper.manifest import Item, Manifest
from jurymast.storage.orders import StorageFailure
from jurymast.storage.source import Range, merged

Holder = tuple[int, int]  # a rank, and the number of the item in its manifest
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

    manifests: dict[int, Manifest]
    writes: dict[int, list[int]]
    entries: dict[str, dict[str, Any]]

    def stored(self) -> Iterator[Stored]:
        for rank, numbers in self.writes.items():
            offset = 0
            extents = _extents(self.manifests[rank])
            for number in numbers:
                item = self.manifests[rank].items[number]
                if self.entries.get(str(item.path[0]), {}).get("per_rank"):
                    path = (item.path[0], f"rank-{rank:05d}", *item.path[1:])
                    item = replace(item, name=".".join(map(str, path)), path=path)
                yield Stored(item, file_name(rank), offset)
                offset += extents[number][1] - extents[number][0]


def file_name(rank: int) -> str:
    """Return the name that torch's writer gives to a rank's first file."""
    return f"__{rank}_0.distcp"


def ranges(manifest: Manifest, numbers: Sequence[int]) -> list[Range]:
    """Return the ranges of the image that a rank writes, ascending."""
    extents = _extents(manifest)
    return merged(sorted(extents[number] for number in numbers))


def _extents(manifest: Manifest) -> list[Range]:
    """Return (start, end) of each item with the padding after it, so that alignment is kept."""
    order = sorted(range(len(manifest.items)), key=lambda number: manifest.items[number].at)
    ends = [manifest.items[number].at for number in order[1:]] + [manifest.size_bytes]
    found: list[Range] = [(0, 0)] * len(order)
    for number, end in zip(order, ends, strict=True):
        found[number] = (manifest.items[number].at, end)
    return found


def decide(manifests: dict[int, Manifest]) -> Layout:
    """Decide from all ranks' manifests who writes what. Raises StorageFailure if they do not fit together.

    Every rank writes entries that differ between ranks; everything else is written once. Items of equal
    common parts are spread over the ranks that have them; the lowest rank writes other items.
    """
    entries = _entries(manifests)
    writes: dict[int, list[int]] = {rank: [] for rank in sorted(manifests)}
    holders: Holders = defaultdict(list)
    for rank in sorted(manifests):
        for number, item in enumerate(manifests[rank].items):
            if entries.get(str(item.path[0]), {}).get("per_rank"):
                if item.sizes != item.shape:
                    raise StorageFailure(
                        f"the entry {item.path[0]!r} differs between ranks and has sharded tensors: "
                        "make what differs an entry of its own"
                    )
                writes[rank].append(number)
            elif not item.is_tensor or 0 not in item.sizes or 0 in item.shape:
                holders[item.name, item.offsets].append((rank, number))
    _check(manifests, holders)
    _assign(manifests, holders, writes)
    ordered = {
        rank: sorted(numbers, key=lambda number, rank=rank: manifests[rank].items[number].at)  # type: ignore[misc]
        for rank, numbers in writes.items()
    }
    return Layout(manifests, ordered, entries)


def _entries(manifests: dict[int, Manifest]) -> dict[str, dict[str, Any]]:
    """Return how each entry is saved: once per rank if digests differ, or if some ranks lack the entry."""
    keys = {key: None for rank in sorted(manifests) for key in manifests[rank].entries}
    found = {}
    for key in keys:
        first = next(manifest.entries[key] for manifest in manifests.values() if key in manifest.entries)
        digests = {manifest.entries.get(key, {}).get("digest") for manifest in manifests.values()}
        plain = {name: value for name, value in first.items() if name != "digest"}
        found[key] = {**plain, "per_rank": len(digests) > 1}
    return found


def _assign(manifests: dict[int, Manifest], holders: Holders, writes: dict[int, list[int]]) -> None:
    # Ranks whose common parts have equal bytes: each has every item of the common part, at the same place.
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(manifests):
        groups[manifests[rank].common_id].append(rank)
    common: list[Holder] = []
    load: Counter[int] = Counter()
    for theirs in holders.values():
        rank, number = theirs[0]
        item = manifests[rank].items[number]
        if item.at + item.length <= manifests[rank].common_bytes:
            common.append((rank, number))
        else:
            writes[rank].append(number)
            load[rank] += item.length
    queues = {name: [(load[rank], rank) for rank in ranks] for name, ranks in groups.items()}
    for queue in queues.values():
        heapq.heapify(queue)
    for first, number in sorted(common, key=lambda one: -manifests[one[0]].items[one[1]].length):
        queue = queues[manifests[first].common_id]
        size, rank = queue[0]
        heapq.heapreplace(queue, (size + manifests[first].items[number].length, rank))
        writes[rank].append(number)


def _check(manifests: dict[int, Manifest], holders: Holders) -> None:
    """Check that a name means the same on all ranks, and that the chunks of each tensor cover it."""
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    covered: Counter[str] = Counter()
    for (name, _), theirs in holders.items():
        sizes = manifests[theirs[0][0]].items[theirs[0][1]].sizes
        for rank, number in theirs:
            item = manifests[rank].items[number]
            dtype, shape, other = kinds.setdefault(name, (item.dtype, item.shape, rank))
            if (dtype, shape) != (item.dtype, item.shape) or sizes != item.sizes:
                raise StorageFailure(
                    f"ranks {other} and {rank} do not agree on {name}: it is {_kind(dtype, shape)} "
                    f"and {_kind(item.dtype, item.shape)}"
                )
        if any(
            at + size > whole for at, size, whole in zip(item.offsets, item.sizes, item.shape, strict=True)
        ):
            raise StorageFailure(f"rank {theirs[0][0]} has a part of {name} outside its shape")
        covered[name] += math.prod(sizes)
    for name, (dtype, shape, rank) in kinds.items():
        if dtype and covered[name] != math.prod(shape):
            raise StorageFailure(
                f"{name}, of which rank {rank} has a part, has {covered[name]} of {math.prod(shape)} elements"
                ": its parts overlap, or some are missing"
            )


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}" if dtype else "not a tensor"


METADATA = ".metadata"


def preload() -> None:
    """Import torch, which takes seconds, once in a process. Without garbage collection it is a fifth
    faster."""
    gc.disable()
    import torch.distributed.checkpoint  # noqa: F401

    gc.enable()


def write_metadata(directory: Path, stored: Iterable[Stored]) -> FileRecord:
    """Write DCP's metadata for the items `stored` in the files of `directory`. Raises OSError.

    It is what DefaultSavePlanner and FileSystemWriter would have written for the same state.
    """
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from jurymast.checkpoint.tree import add_metadata

    metadata = Metadata({}, planner_data={})
    results: list[Any] = []
    for one in stored:
        place = _StorageInfo(one.file, one.offset, one.item.length)
        index = add_metadata(metadata, one.item)
        results.append(WriteResult(index=index, size_in_bytes=one.item.length, storage_data=place))
    FileSystemWriter(directory, sync_files=True).finish(metadata, [results])
    size, digest = hash_file(directory / METADATA)
    return FileRecord(METADATA, size, digest)
