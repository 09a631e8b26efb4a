"""Writes images to shared storage as a stock DCP directory, by all nodes together.

The nodes exchange files in the directory that they write, `.writing-STEP.aATTEMPT.NONCE`, at the times that
`core.checkpoints.writes` decides.

    layout-r00008.json   the manifests of all images of a node; 8 is the first one's rank
    writes.json          from the lead (rank 0's node) once all manifests are there: who writes which items
    __8_0.distcp         what rank 8 writes, byte ranges of its image, each block checked against its hash
    done-r00008.json     all of the node's files are on disk: names, sizes, hashes
    failed-r00008.txt    why they are not; and an empty file `failed`, which is found without listing all

Then the lead has torch write `.metadata`, removes the messages, writes our manifest and renames the
directory. A lead that dies leaves a name that nobody reads, and the next lead removes it.

The layout decides which rank writes which items of its image, so that all files together are one checkpoint.
Functions that need torch import it, because only the process of one node calls them.
"""

from __future__ import annotations

import gc
import heapq
import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    Owner,
    claim,
    hash_file,
    remove_trees,
)
from jurymast.core.checkpoints import writes
from jurymast.core.checkpoints.copies import StateId
from jurymast.core.checkpoints.writes import Do, Next
from jurymast.errors import CheckpointError
from jurymast.keeper import manifest as keeper
from jurymast.keeper.manifest import Item, Manifest
from jurymast.rundir import write_atomically, write_json
from jurymast.storage.local import ImageSource, Range, merged
from jurymast.storage.orders import Done, Job, StorageFailure, WriteShared, explain

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


WRITES, FAILED = "writes.json", "failed"


def write(order: WriteShared, job: Job) -> Done:
    """Take part in writing one step. A step that exists already is not changed. Raises StorageFailure."""
    with ExitStack() as stack:
        return _Part(order, job, stack).take()


class _Part:
    """One node's part in writing a step. `stack` closes its images."""

    def __init__(self, order: WriteShared, job: Job, stack: ExitStack) -> None:
        self._order, self._job, self._stack = order, job, stack
        self._directory = CheckpointDirectory(order.root)
        self._step, self._attempt, self._world = order.step, order.attempt, order.world
        self._machine = writes.Meeting(StateId(order.step, order.attempt), order.world, leads=order.lead)
        self._place = self._directory.writing(self._step, self._attempt, order.nonce)
        self._sources: list[ImageSource] = []
        self._manifests: dict[int, keeper.Manifest] = {}  # by rank, as they come
        self._heard: set[str] = set()  # names of the files that had them
        self._shares: dict[int, list[int]] = {}  # by rank, the items to be written
        self._layout: Layout | None = None

    def take(self) -> Done:
        try:
            following = self._begin()
            while not isinstance(following, writes.Complete | writes.Fail):
                following = self._one(following)
                self._machine.check()
            if isinstance(following, writes.Fail):
                raise StorageFailure(following.why)
            if self._order.lead and not following.existing:
                self._directory.check_sizes(self._step, self._directory.manifest(self._step))
                if self._order.keep:
                    self._directory.retire_behind(self._order.keep, lambda why: sys.stderr.write(f"{why}\n"))
        except (BadCheckpoint, CheckpointError, OSError) as error:
            raise StorageFailure(_why(error, self._directory.root)) from error
        bytes = 0 if following.existing else self._job.bytes
        return Done(bytes=bytes, existing=following.existing, published=following.published)

    def _begin(self) -> Next:
        order = self._order
        following = self._machine.begin(
            unseen="" if Path(order.run_directory).is_dir() else order.run_directory,
            rolled_back=self._directory.void(self._step, self._attempt),
            existing=self._exists(),
        )
        if isinstance(following, Do):
            for image in order.images:
                source = ImageSource.of_order(image, self._step, self._attempt)
                self._sources.append(self._stack.enter_context(closing(source)))
        return following

    def _exists(self) -> bool:
        return self._directory.whole(self._step) is not None

    def _one(self, what: Next) -> Next:
        try:
            return self._carry_out(what)
        except _OthersFailure as failure:
            return self._machine.others_failed(failure.rank, failure.why)
        except (BadCheckpoint, CheckpointError, OSError, StorageFailure) as error:
            gone = isinstance(error, FileNotFoundError) and not self._place.exists()
            existing = self._order.lead and isinstance(error, OSError) and self._exists()
            return self._machine.failed(_why(error, self._place), gone=gone, existing=existing)
        except BaseException:
            if self._order.lead:
                remove_trees([self._place])
            raise

    def _carry_out(self, what: Next) -> Next:
        machine = self._machine
        match what:
            case Do.FIND_PLACE:
                return self._wait("the lead's directory", self._find_place, self._directory.root)
            case Do.READ_LAYOUTS:
                return self._wait("the image of some rank", self._read_layouts, self._place)
            case Do.FIND_SHARES:
                return self._wait("the lead's plan", self._find_shares, self._place)
            case Do.READ_PARTS:
                return self._wait("the part of some rank", self._read_parts, self._place)
            case Do.SEAL:
                self._seal()
                return machine.sealed(rolled_back=self._directory.void(self._step, self._attempt))
            case writes.ReadWhy(rank):
                return machine.others_failed(rank, self._why_failed(f"failed-r{rank:05d}.txt"))
            case Do.OPEN:
                self._open()
            case Do.ANNOUNCE:
                self._announce()
            case Do.SHARE_OUT:
                self._share_out()
            case Do.WRITE:
                self._write(self._shares)
            case Do.PUBLISH:
                self._directory.publish(self._place, self._step)
            case Do.CLEAN_UP:
                remove_trees([self._place])
            case writes.TellOthers(why):
                self._tell(why)
            case writes.Pause(seconds):
                self._job.cancelled.wait(seconds)
            case _:
                raise AssertionError(f"{what} cannot be carried out")
        return machine.done()

    def _wait(self, what: str, look: Callable[[], Next], place: Path) -> Next:
        def found() -> tuple[Next] | None:
            following = look()
            return None if isinstance(following, writes.Wait) else (following,)

        return self._job.wait(what, found, place, ranks=self._world)[0]

    # ---- steps

    def _open(self) -> None:
        self._directory.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        order = self._order
        claim(self._directory.root, Owner(order.run, order.run_directory) if order.run else None)
        self._directory.sweep_unfinished()
        if os.path.lexists(self._directory.path(self._step)):
            # Not complete, or the write would have ended; but it may be the last copy of something.
            self._directory.set_aside(self._step)
        self._place.mkdir(mode=0o700)

    def _find_place(self) -> Next:
        there = self._place.is_dir()
        return self._machine.saw_place(there=there, existing=not there and self._exists())

    def _announce(self) -> None:
        if not self._sources:
            return
        texts = [source.manifest.to_bytes().decode() for source in self._sources]
        write_json(self._message("layout"), texts, durable=False)

    def _read_layouts(self) -> Next:
        found = {}
        for name in self._listed().difference(self._heard):
            if name.startswith("layout-r") and name.endswith(".json"):
                manifests = self._read_layout(self._place / name)
                self._heard.add(name)
                self._manifests.update((one.rank, one) for one in manifests)
                found[name] = [
                    writes.Announced(one.rank, StateId(one.step, one.attempt), one.world) for one in manifests
                ]
        return self._machine.saw_layouts(found)

    def _read_layout(self, path: Path) -> list[keeper.Manifest]:
        try:
            return [keeper.Manifest.from_bytes(text.encode()) for text in foreign.load(path)]
        except (keeper.BadImage, ValueError) as error:
            raise StorageFailure(f"{path.name} was damaged in transit: {error}") from error

    def _share_out(self) -> None:
        self._layout = decide({rank: self._manifests[rank] for rank in range(self._world)})
        self._shares = self._layout.writes
        write_json(self._place / WRITES, self._shares, durable=False)

    def _find_shares(self) -> Next:
        """Look for the lead's file by name, because thousands of nodes may look among hundreds of thousands
        of files. Raises FileNotFoundError if the lead gave up."""
        if (self._place / FAILED).exists():
            self._listed()
        try:
            shares = foreign.load(self._place / WRITES)
        except FileNotFoundError:
            self._place.stat()
            return self._machine.saw_shares(there=False)
        self._shares = {int(rank): numbers for rank, numbers in shares.items()}
        return self._machine.saw_shares(there=True)

    def _write(self, writes: dict[int, list[int]]) -> None:
        written = self._job.each(lambda one: self._write_rank(one, writes[one.manifest.rank]), self._sources)
        records = [asdict(record) for record in written if record]
        if self._sources:
            write_json(self._message("done"), records, durable=False)

    def _write_rank(self, source: ImageSource, numbers: list[int]) -> FileRecord | None:
        if not numbers:
            return None
        name = file_name(source.manifest.rank)
        with NewFile(self._place / name) as file:
            for piece in source.read(ranges(source.manifest, numbers)):
                file.write(piece)
                self._job.wrote(len(piece))
        return FileRecord(name, file.size, file.hexdigest, source.manifest.rank)

    def _read_parts(self) -> Next:
        names = self._listed()
        return self._machine.saw_parts({one for one in self._heard if _done(one) in names})

    def _seal(self) -> None:
        layout = self._layout
        assert layout is not None, "it was shared out"
        texts = (foreign.read(self._place / _done(name)) for name in self._heard)
        records = [FileRecord(**record) for text in texts for record in json.loads(text)]
        records.append(write_metadata(self._place, layout.stored()))
        self._job.check()
        kept = {record.name for record in records}
        for name in self._listed():
            if name not in kept:
                (self._place / name).unlink()
        manifest = CheckpointManifest(
            step=self._step,
            attempt=self._attempt,
            world_size=self._world,
            torch=layout.manifests[0].torch,
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=layout.entries,
        )
        self._directory.seal(self._place, manifest)
        self._job.check()

    # ---- messages

    def _message(self, kind: str, ending: str = "json") -> Path:
        rank = self._sources[0].manifest.rank if self._sources else 0
        return self._place / f"{kind}-r{rank:05d}.{ending}"

    def _listed(self) -> set[str]:
        """List the names in the directory. Raises _OthersFailure if a node reports that it failed."""
        names = set(os.listdir(self._place))
        for name in sorted(names):
            if name.startswith("failed-r"):
                raise _OthersFailure(int(name[len("failed-r") :].partition(".")[0]), self._why_failed(name))
        return names

    def _why_failed(self, name: str) -> str:
        return foreign.read(self._place / name).decode()

    def _tell(self, why: str) -> None:
        path = self._message("failed", "txt")
        for source in self._sources:  # makes room for the message on a full disk
            (self._place / file_name(source.manifest.rank)).unlink(missing_ok=True)
        path.touch(mode=0o600)  # without room for more, others see an empty message or run into their limit
        (self._place / FAILED).touch(mode=0o600)
        write_atomically(path, why.encode(), durable=False)


class _OthersFailure(Exception):
    """The node of this rank has reported that it failed, and why; "" if that is not written yet, or there was
    no room for it."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


def _done(layout: str) -> str:
    """Return the name of the message that follows this layout."""
    return layout.replace("layout", "done", 1)


def _why(error: Exception, place: Path) -> str:
    if isinstance(error, CheckpointError):
        return f"shared storage: {error}; {error.hint}"
    if isinstance(error, OSError):
        return f"shared storage: {explain(error, place)}"
    return f"shared storage: {error}" if isinstance(error, BadCheckpoint) else str(error)
