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

Functions that need torch import it, because only the process of one node calls them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.checkpoint.contents import Contents, Described
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    hash_file,
    remove_trees,
)
from jurymast.checkpoint.layout import Layout, Stored, decide, extents, file_name
from jurymast.checkpoint.owner import Owner, claim, is_foreign
from jurymast.core.checkpoints.writes import GIVEN_UP_S
from jurymast.core.state.messages import WritePhase
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.rundir import make_durable_folder, write_atomically, write_json
from jurymast.storage.local import ImageSource, Range, merged
from jurymast.storage.orders import Done, Job, StorageFailure, WriteShared, explain


def ranges(image: Described, numbers: Sequence[int]) -> list[Range]:
    """Return the ranges of the image that a rank writes, ascending."""
    found = extents(image)
    return merged(sorted(found[number] for number in numbers))


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
        except (BadCheckpoint, BadImage, CheckpointError, OSError) as error:
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
