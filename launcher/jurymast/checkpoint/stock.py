"""Loads a stock torch.distributed.checkpoint directory, which any number of ranks may have saved; or images
in memory as if they were one, each as the file of its rank.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from jurymast.checkpoint.contents import Contents, Described
from jurymast.checkpoint.directory import one_line
from jurymast.checkpoint.group import Group, RankFailed, RankUnable, is_hidden, is_inability
from jurymast.checkpoint.layout import Stored, decide, file_name
from jurymast.checkpoint.state import ScriptState
from jurymast.checkpoint.tree import add_metadata, alone_is_fine
from jurymast.keeper.manifest import BadImage, Manifest, ShownImage, ShownImages

log = logging.getLogger("jurymast.checkpoint")


@dataclass(frozen=True)
class Opened:
    """A checkpoint that can be read. `entries` says how each entry was saved, by `world` ranks."""

    reader: FileSystemReader
    entries: dict[str, dict[str, Any]]
    world: int


def load(group: Group, state: ScriptState, opened: Callable[[ExitStack], Opened]) -> str:
    """Load what `opened` opens into the ranks' state. Return why that cannot be used, on one line, or "".
    Raises RankUnable on all ranks if it cannot be read now. Collective."""
    found: Opened | None = None
    template: dict[str, Any] = {}
    with ExitStack() as held:

        def prepare() -> None:
            nonlocal found
            found = opened(held)
            metadata = found.reader.read_metadata()
            template.update(state.template(metadata, found.entries, group.rank, found.world))

        try:
            group.on_all(prepare)
        except RankFailed as error:
            return str(error)
        assert found is not None
        _say_turns(found, group)
        try:
            with alone_is_fine():
                dcp.load(
                    template, storage_reader=found.reader, planner=DefaultLoadPlanner(),
                    process_group=group.process_group,
                )  # fmt: skip
        except CheckpointException as error:
            failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
            for rank, failure in failures.items():
                if is_inability(failure) or is_hidden(failure):
                    raise RankUnable(rank, one_line(failure)) from error
            rank, failure = min(failures.items())
            return f"rank {rank}: {one_line(failure)}"
    entries = found.entries
    try:
        group.on_all(lambda: state.apply(template, entries))
    except RankFailed as error:
        return str(error)
    return ""


def _say_turns(found: Opened, group: Group) -> None:
    if found.world == group.size or group.rank:
        return
    for key in (key for key, entry in found.entries.items() if entry.get("per_rank")):
        log.warning(
            "%r was saved by each of %d ranks; the present %d ranks take these states in turn",
            key,
            found.world,
            group.size,
        )


# ---- images in memory


@dataclass(frozen=True)
class _Image:
    """A rank's image: its first `common_bytes` are those of the map `common`."""

    manifest: Manifest
    own: mmap.mmap
    common: mmap.mmap

    def bytes_of(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), or as many as follow each other in one of the two maps."""
        if start < self.manifest.common_bytes:
            return self.common[start : min(end, self.manifest.common_bytes)]
        return self.own[start : min(end, self.manifest.size_bytes)]


class _ImageFile(io.RawIOBase):
    """An image as a file."""

    def __init__(self, image: _Image) -> None:
        self._image = image
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._image.manifest.size_bytes}
        self._at = max(0, base[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._image.bytes_of(self._at, self._at + len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _ImageFiles(FileSystem):
    def __init__(self, images: list[_Image]) -> None:
        self._images = {file_name(image.manifest.rank): image for image in images}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb", mode
        with io.BufferedReader(_ImageFile(self._images[Path(path).name]), 1 << 20) as file:
            yield file


class _ImagesReader(FileSystemReader):
    """Reads images as if they were files of one directory."""

    def __init__(self, images: list[_Image], metadata: Metadata) -> None:
        super().__init__("/")
        self.fs = _ImageFiles(images)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def open_images(lent: Callable[[int, int], mmap.mmap], text: bytes, step: int, attempt: int) -> Opened:
    """Open the images that an agent shows: `text` is its `ShownImages`, and `lent` maps so many bytes of one
    of its descriptors. Raises OSError, BadImage."""
    shown = ShownImages.from_bytes(text).images
    images = [_opened(lent, one) for one in shown]
    described: dict[int, Described] = {}
    for number, image in enumerate(images):
        one = image.manifest
        found, wanted = (one.step, one.attempt, one.rank, one.world), (step, attempt, number, len(shown))
        if found != wanted:
            raise BadImage(f"(step, attempt, rank, world) in memory are {found}, not {wanted}")
        described[number] = Described(one, Contents.from_bytes(image.own[one.contents_at : one.size_bytes]))
    layout = decide(described)
    return Opened(_ImagesReader(images, _metadata(layout.in_images())), layout.entries, len(shown))


def _opened(lent: Callable[[int, int], mmap.mmap], shown: ShownImage) -> _Image:
    manifest = Manifest.from_bytes(shown.manifest)
    own = lent(shown.descriptor, manifest.size_bytes)
    common = lent(shown.common, manifest.common_bytes) if shown.common else own
    return _Image(manifest, own, common)


def _metadata(stored: Iterator[Stored]) -> Metadata:
    """Return DCP's metadata of these items."""
    metadata = Metadata({}, planner_data={}, storage_data={}, storage_meta=StorageMeta())
    for one in stored:
        index = add_metadata(metadata, one.item)
        metadata.storage_data[index] = _StorageInfo(one.file, one.offset, one.item.length)
    return metadata
