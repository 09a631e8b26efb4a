"""Writes images to shared storage as a stock DCP directory, by all nodes together.

The nodes exchange files in the directory that they write, `.writing-STEP.aATTEMPT.NONCE`, in the phases that
`core.checkpoints.writes` orders: a file is read only after all who write such files have said that theirs is
there.

    layout-r00008        the manifests and contents of all images of a node; 8 is the first one's rank
    writes.json          from the lead (rank 0's node): who writes which items
    __8_0.distcp         what rank 8 writes, byte ranges of its image, each block checked against its hash
    done-r00008.json     all of the node's files are on disk: names, sizes, hashes

Then the lead has torch write `.metadata`, removes these files of ours, writes our manifest and renames the
directory. A lead that dies leaves a name that nobody reads, and the next lead removes it.

The layout decides which rank writes which items of its image, so that all files together are one checkpoint.
Functions that need torch import it, because only the process of one node calls them.
"""

from __future__ import annotations

import gc
import heapq
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.checkpoint.contents import Contents, Described, Item
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    hash_file,
    remove_trees,
)
from jurymast.checkpoint.owner import Owner, claim, is_foreign
from jurymast.core.checkpoints.writes import GIVEN_UP_S
from jurymast.core.state.messages import WritePhase
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.rundir import make_durable_folder, write_atomically, write_json
from jurymast.storage.local import ImageSource, Range, merged
from jurymast.storage.orders import Done, Job, StorageFailure, WriteShared, explain

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
        for rank, numbers in self.writes.items():
            offset = 0
            extents = _extents(self.images[rank])
            for number in numbers:
                item = self.images[rank].items[number]
                if self.entries.get(str(item.path[0]), {}).get("per_rank"):
                    path = (item.path[0], f"rank-{rank:05d}", *item.path[1:])
                    item = msgspec.structs.replace(item, name=".".join(map(str, path)), path=path)
                yield Stored(item, file_name(rank), offset)
                offset += extents[number][1] - extents[number][0]


def file_name(rank: int) -> str:
    """Return the name that torch's writer gives to a rank's first file."""
    return f"__{rank}_0.distcp"


def ranges(image: Described, numbers: Sequence[int]) -> list[Range]:
    """Return the ranges of the image that a rank writes, ascending."""
    extents = _extents(image)
    return merged(sorted(extents[number] for number in numbers))


def _extents(image: Described) -> list[Range]:
    """Return (start, end) of each item with the padding after it, so that alignment is kept."""
    items = image.items
    order = sorted(range(len(items)), key=lambda number: items[number].at)
    ends = [items[number].at for number in order[1:]] + [image.manifest.contents_at]
    found: list[Range] = [(0, 0)] * len(order)
    for number, end in zip(order, ends, strict=True):
        found[number] = (items[number].at, end)
    return found


def decide(images: dict[int, Described]) -> Layout:
    """Decide from all ranks' images who writes what. Raises StorageFailure if they do not fit together.

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
                    raise StorageFailure(
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
_ANNOUNCED = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])
ANNOUNCED_BYTES_MAX = 4 << 30
# Who writes which items, by their numbers: some bytes for each of them.
SHARES_BYTES_MAX = 256 << 20


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
    FileSystemWriter(directory, sync_files=False).finish(metadata, [results])
    # torch's own way syncs the file before its buffer is written to it.
    with foreign.reading(directory / METADATA) as file:
        os.fsync(file.fileno())
    size, digest = hash_file(directory / METADATA)
    return FileRecord(METADATA, size, digest)


WRITES = "writes.json"


def write(order: WriteShared, job: Job) -> Done:
    """Take part in writing one step. A step that exists already is not changed. Raises StorageFailure."""
    with ExitStack() as stack:
        return _Part(order, job, stack).take()


class _Part:
    """One node's part in writing a step. `stack` closes its images."""

    def __init__(self, order: WriteShared, job: Job, stack: ExitStack) -> None:
        self._order, self._job, self._stack = order, job, stack
        self._us = Owner(order.run, order.run_directory) if order.run else None
        self._directory = CheckpointDirectory(order.root, order.run)
        self._step, self._attempt, self._world = order.step, order.attempt, order.world
        self._place = self._directory.writing(self._step, self._attempt, order.nonce)
        self._sources: list[ImageSource] = []
        self._images: dict[int, Described] = {}  # by rank

    def take(self) -> Done:
        try:
            self._see(Path(self._order.run_directory))
            return self._lead() if self._order.lead else self._follow()
        except (BadCheckpoint, CheckpointError, OSError) as error:
            raise StorageFailure(_why(error, self._place)) from error

    def _see(self, path: Path) -> None:
        if not path.is_dir():
            raise StorageFailure(f"{path} is not visible on this node: is the shared storage mounted?")

    def _hold(self) -> None:
        for image in self._order.images:
            source = ImageSource.of_order(image, self._step, self._attempt)
            self._sources.append(self._stack.enter_context(closing(source)))

    def _void(self) -> bool:
        return self._directory.void(self._step, self._attempt)

    def _exists(self) -> bool:
        return self._directory.whole(self._step) is not None

    # ---- a node that follows

    def _follow(self) -> Done:
        self._hold()
        try:
            self._job.turn(WritePhase.HOLD, WritePhase.ANNOUNCE)
            self._announce()
            self._job.turn(WritePhase.ANNOUNCE, WritePhase.WRITE)
            shares = foreign.load(self._place / WRITES, SHARES_BYTES_MAX)
            self._write({int(rank): numbers for rank, numbers in shares.items()})
        except OSError:
            if self._place.exists():
                raise
            self._see(self._directory.root)
            self._job.cancelled.wait(GIVEN_UP_S)
            raise StorageFailure("rank 0's node gave up: its directory is gone") from None
        return Done(bytes=self._job.bytes)

    def _announce(self) -> None:
        texts = [(source.manifest.to_bytes(), source.contents()) for source in self._sources]
        for source, (_, contents) in zip(self._sources, texts, strict=True):
            self._images[source.manifest.rank] = _described(source.manifest, contents)
        write_atomically(self._place / _layout(self._part), msgspec.msgpack.encode(texts), durable=False)

    @property
    def _part(self) -> int:
        return self._sources[0].manifest.rank

    def _write(self, shares: dict[int, list[int]]) -> None:
        written = self._job.each(lambda one: self._write_rank(one, shares[one.manifest.rank]), self._sources)
        records = [asdict(record) for record in written if record]
        write_json(self._place / _done(self._part), records, durable=False)

    def _write_rank(self, source: ImageSource, numbers: list[int]) -> FileRecord | None:
        if not numbers:
            return None
        name = file_name(source.manifest.rank)
        with NewFile(self._place / name) as file:
            for piece in source.read(ranges(self._images[source.manifest.rank], numbers)):
                file.write(piece)
                self._job.wrote(len(piece))
        return FileRecord(name, file.size, file.hexdigest, source.manifest.rank)

    # ---- the lead

    def _lead(self) -> Done:
        if self._void():
            raise StorageFailure(
                f"step {self._step} of attempt {self._attempt} was rolled back, so it is not written"
            )
        if self._exists():
            return Done(existing=True, published=True)
        self._hold()
        try:
            self._write_all()
        except BaseException as error:
            remove_trees([self._place])
            if isinstance(error, OSError) and self._exists():  # the ranks have saved it themselves meanwhile
                return Done(existing=True, published=True)
            raise
        self._directory.check_sizes(self._step, self._directory.manifest(self._step))
        if self._order.keep:
            self._directory.retire_behind(self._order.keep, lambda why: sys.stderr.write(f"{why}\n"))
        return Done(bytes=self._job.bytes, published=True)

    def _write_all(self) -> None:
        self._open()
        self._job.turn(WritePhase.OPEN, WritePhase.ANNOUNCE)
        self._announce()
        parts = self._job.turn(WritePhase.ANNOUNCE, WritePhase.SHARE_OUT).parts
        layout = self._share_out(parts)
        self._job.turn(WritePhase.SHARE_OUT, WritePhase.WRITE)
        self._write(layout.writes)
        self._job.turn(WritePhase.WRITE, WritePhase.SEAL)
        self._seal(parts, layout)
        if is_foreign(self._directory.root, self._us):
            raise StorageFailure(f"another training owns {self._directory.root} now: nothing is saved there")
        self._directory.publish(self._place, self._step)

    def _open(self) -> None:
        claim(self._directory.root, self._us)
        make_durable_folder(self._directory.root)
        self._directory.sweep_unfinished()
        if os.path.lexists(self._directory.path(self._step)):
            # Not complete, or the write would have ended; but it may be the last copy of something.
            self._directory.set_aside(self._step)
        self._place.mkdir(mode=0o700)

    def _share_out(self, parts: tuple[int, ...]) -> Layout:
        announced = self._job.each(self._read_layout, parts)
        images = {one.manifest.rank: one for theirs in announced for one in theirs}
        if missing := set(range(self._world)) - images.keys():
            raise StorageFailure(f"nobody has announced the image of rank {min(missing)}")
        layout = decide({rank: images[rank] for rank in range(self._world)})
        write_json(self._place / WRITES, layout.writes, durable=False)
        return layout

    def _read_layout(self, part: int) -> list[Described]:
        self._job.moved()
        name = _layout(part)
        try:
            texts = _ANNOUNCED.decode(foreign.read(self._place / name, ANNOUNCED_BYTES_MAX))
            images = [Described(Manifest.from_bytes(one), Contents.from_bytes(its)) for one, its in texts]
        except (BadImage, ValueError) as error:
            raise StorageFailure(f"{name} was damaged in transit: {error}") from error
        for one in (image.manifest for image in images):
            if (one.step, one.attempt, one.world) != (self._step, self._attempt, self._world):
                raise StorageFailure(f"rank {one.rank} has an image of another state, step {one.step}")
            if not 0 <= one.rank < self._world:
                raise StorageFailure(f"{name} names rank {one.rank}, and there are {self._world} ranks")
        return images

    def _read_done(self, part: int) -> list[FileRecord]:
        self._job.moved()
        return [
            FileRecord(**record)
            for record in foreign.load(self._place / _done(part), foreign.MANIFEST_BYTES_MAX)
        ]

    def _seal(self, parts: tuple[int, ...], layout: Layout) -> None:
        records = [record for theirs in self._job.each(self._read_done, parts) for record in theirs]
        records.append(write_metadata(self._place, layout.stored()))
        self._job.check()
        for name in (WRITES, *map(_layout, parts), *map(_done, parts)):
            (self._place / name).unlink()
        manifest = CheckpointManifest(
            step=self._step,
            attempt=self._attempt,
            world_size=self._world,
            torch=layout.images[0].manifest.torch,
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=layout.entries,
            run=self._order.run,
        )
        self._directory.seal(self._place, manifest)
        self._job.check()
        if self._void():
            raise StorageFailure(f"step {self._step} was rolled back meanwhile")


def _described(manifest: Manifest, contents: bytes) -> Described:
    try:
        return Described(manifest, Contents.from_bytes(contents))
    except BadImage as error:
        raise StorageFailure(f"the image of rank {manifest.rank} was refused: {error}") from error


def _layout(part: int) -> str:
    return f"layout-r{part:05d}"


def _done(part: int) -> str:
    return f"done-r{part:05d}.json"


def _why(error: Exception, place: Path) -> str:
    if isinstance(error, CheckpointError):
        return f"shared storage: {error}; {error.hint}"
    if isinstance(error, OSError):
        return f"shared storage: {explain(error, place)}"
    return f"shared storage: {error}" if isinstance(error, BadCheckpoint) else str(error)
