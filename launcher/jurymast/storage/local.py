"""Images on a node's own disk, which survive the agent and a reboot of the node; and images to be stored,
read block by block: each block is checked against its hash before any of it is written.

ROOT/step-00000100.a0003/rank-00007.image       the image's bytes
ROOT/step-00000100.a0003/rank-00007.manifest    written last: without it the image does not count

ROOT's parent directory must belong to this user and be closed to others.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from jurymast.checkpoint.directory import NewFile, names_in
from jurymast.core.state.images import COMMON, OWN, StateId, age
from jurymast.core.state.texts import size
from jurymast.foreign import NotOurs, exists, make_private, name_of, own_directory
from jurymast.keeper.manifest import BadImage, Block, Manifest, blocks_of, is_intact
from jurymast.rundir import sync_directory, write_atomically
from jurymast.storage.orders import (
    DamagedImage,
    Done,
    ImageAt,
    Job,
    StorageFailure,
    WriteLocal,
    explain,
    free_bytes,
)

Range = tuple[int, int]


class ImageSource:
    """One rank's image, in the agent's memory (`/proc/PID/fd/N`) or in a file.

    Nothing is copied: pieces are views of the image. A block is checked before its pieces are taken and again
    afterwards, so that the written bytes are the hashed ones even if the memory was reused meanwhile.
    """

    def __init__(self, path: str, manifest: Manifest, common_path: str = "") -> None:
        """Open the image. The file at `common_path` has the common part, unless the one at `path` does.
        Raises StorageFailure if a file is missing or too short, or the image was never hashed."""
        self.manifest = manifest
        if not manifest.hashed:
            raise StorageFailure(f"the image of rank {manifest.rank} has no hashes: it must not be stored")
        self._paths = {OWN: path, COMMON: common_path or path}
        own = _mapped(path, manifest.size_bytes, manifest.rank)
        common = _mapped(common_path, manifest.common_bytes, manifest.rank) if common_path else own
        self._images = {OWN: own, COMMON: common}

    @classmethod
    def of_order(cls, image: ImageAt, step: int, attempt: int) -> ImageSource:
        """Open the image that an order names. Raises StorageFailure."""
        try:
            manifest = Manifest.from_bytes(image.manifest.encode())
        except BadImage as error:
            raise StorageFailure(f"the image of rank {image.rank} was refused: {error}") from error
        if manifest.image != (step, attempt, image.rank):
            raise StorageFailure(
                f"{image.path} is of step {manifest.step}, attempt {manifest.attempt}, rank {manifest.rank}, "
                f"not of step {step}, attempt {attempt}, rank {image.rank}"
            )
        return cls(image.path, manifest, image.common_path)

    def contents(self) -> bytes:
        """Read the image's contents. Raises StorageFailure."""
        return b"".join(self.read([(self.manifest.contents_at, self.manifest.size_bytes)]))

    def close(self) -> None:
        self._images.clear()  # a mapping ends with its last view

    def read(self, wanted: list[Range]) -> Iterator[memoryview]:
        """Yield the bytes of the ranges `wanted`, ascending and disjoint, in pieces of at most a block.

        Raises StorageFailure if a block does not have its hash; pieces already taken from it do not count.
        """
        work = list(self._needed(wanted))
        after: Future[None] | None = None
        # In another thread, where the first check maps the next block's pages while this one is written.
        with ThreadPoolExecutor(1) as pool:
            before = [pool.submit(self._check, block) for block, _ in work[:1]]
            for place, (block, pieces) in enumerate(work):
                before.pop().result()
                before = [pool.submit(self._check, following) for following, _ in work[place + 1 : place + 2]]
                for start, end in pieces:
                    yield self._images[work[place][0].part][start:end]
                if after is not None:
                    after.result()
                after = pool.submit(self._check, block)
            if after is not None:
                after.result()

    def _needed(self, wanted: list[Range]) -> Iterator[tuple[Block, list[Range]]]:
        """Yield the blocks that overlap `wanted`, each with the ranges wanted of it."""
        at = 0
        for block in blocks_of(self.manifest):
            pieces, block_end = [], block.at + block.length
            while at < len(wanted) and wanted[at][0] < block_end:
                pieces.append((max(wanted[at][0], block.at), min(wanted[at][1], block_end)))
                if wanted[at][1] > block_end:
                    break  # the range continues in the next block
                at += 1
            if pieces:
                yield block, pieces

    def _check(self, block: Block) -> None:
        image, path = self._images[block.part], self._paths[block.part]
        if not is_intact(image, block):
            raise DamagedImage(
                f"the image of rank {self.manifest.rank} in {path} is corrupt: block {block.number} of its "
                f"{block.part} part is not what was hashed. It was not stored; look at that node's memory",
                self.manifest.rank,
            )


def _mapped(path: str, size_bytes: int, rank: int) -> memoryview:
    """Map the file's first `size_bytes`. Raises StorageFailure."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailure(f"the image of rank {rank} is gone: {explain(error, path)}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found < size_bytes:
            raise StorageFailure(f"{path} has {found} bytes, the image of rank {rank} has more")
        return memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ) if size_bytes else b"")
    finally:
        os.close(descriptor)


def merged(ranges: list[Range]) -> list[Range]:
    """Return the ascending `ranges` with adjacent ones joined."""
    found: list[Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


# ---- a node's disk

KEEP = 2

_STATE = re.compile(r"step-(\d{8,})\.a(\d{4,})")
_IMAGE = re.compile(r"rank-(\d{5,})\.manifest")


class LocalDirectory:
    """One run's images on one node's disk, for the process that writes them; `keeper.copies` reads them."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, step: int, attempt: int) -> Path:
        return self.root / f"step-{step:08d}.a{attempt:04d}"

    def states(self) -> list[StateId]:
        """List the states here, whole or not, by attempt and step, newest first."""
        matches = map(_STATE.fullmatch, names_in(self.root))
        found = [StateId(int(match[1]), int(match[2])) for match in matches if match]
        return sorted(found, key=age, reverse=True)

    def ranks(self, step: int, attempt: int) -> set[int]:
        """Return the ranks whose images of a state are complete. Raises OSError."""
        matches = map(_IMAGE.fullmatch, names_in(self.path(step, attempt)))
        return {int(match[1]) for match in matches if match}

    def prune(self, keep: int, protect: Collection[StateId] = ()) -> list[StateId]:
        """Remove all but the newest `keep` states and those in `protect`; return the removed states."""
        gone = [state for state in self.states()[max(0, keep) :] if state not in protect]
        for step, attempt in gone:
            self._remove(self.path(step, attempt))
        return gone

    def sweep(self) -> None:
        """Remove what a killed storage process left: images without a manifest, and temporary files."""
        for step, attempt in self.states():
            place = self.path(step, attempt)
            ranks = self.ranks(step, attempt)
            whole = {f"rank-{rank:05d}.{kind}" for rank in ranks for kind in ("image", "manifest")}
            for name in set(os.listdir(place)) - whole:
                (place / name).unlink(missing_ok=True)
            if not whole:
                place.rmdir()

    def _remove(self, place: Path) -> None:
        # Manifests first: an image without a manifest does not count, even if this is interrupted.
        for manifest in place.glob("*.manifest"):
            manifest.unlink(missing_ok=True)
        shutil.rmtree(place)


def write(order: WriteLocal, job: Job) -> Done:
    """Write an order's images to local disk. Raises StorageFailure."""
    try:
        return _write_all(order, job)
    except OSError as error:
        why = str(error) if isinstance(error, NotOurs) else explain(error, order.root)
        raise StorageFailure(f"local disk: {why}") from error


def _write_all(order: WriteLocal, job: Job) -> Done:
    state = StateId(order.step, order.attempt)
    with ExitStack() as stack:
        opened = (closing(ImageSource.of_order(image, *state)) for image in order.images)
        sources = [stack.enter_context(source) for source in opened]
        _make_durable(Path(order.root))
        directory = stack.enter_context(_held(Path(order.root)))
        directory.sweep()
        held = directory.ranks(*state)
        missing = [source for source in sources if source.manifest.rank not in held]
        _make_room(directory, sum(source.manifest.size_bytes for source in missing), state)
        place = directory.path(*state)
        place.mkdir(mode=0o700, exist_ok=True)
        written: list[Path] = []
        try:
            for source in missing:
                _write(place, source, job, written)
            sync_directory(directory.root)
        except BaseException:
            for path in reversed(written):  # manifests before images
                path.unlink(missing_ok=True)
            if not os.listdir(place):
                place.rmdir()
            raise
        directory.prune(KEEP, {state})
    return Done(bytes=job.bytes)


@contextmanager
def _held(root: Path) -> Iterator[LocalDirectory]:
    """The run's directory, by a name that goes on meaning it: where a disk's directory is not sticky, others
    can rename those in it, and what is removed here would be removed from another one. Raises NotOurs,
    OSError, StorageFailure."""
    with own_directory(root.parent) as parent:
        directory = LocalDirectory(parent / root.name)
        try:
            yield directory
        except OSError as error:  # explained as long as its name means something
            raise StorageFailure(f"local disk: {explain(error, directory.root)}") from error


def _make_durable(root: Path) -> None:
    """Make the run's directory, and those above it, for this user alone; a power cut does not take them
    back. Raises NotOurs, OSError."""
    missing = [one for one in root.parents if not exists(one)]
    make_private(root.parent)
    root.mkdir(mode=0o700, exist_ok=True)
    for one in (root, *missing):
        sync_directory(one.parent)


def _make_room(directory: LocalDirectory, needed: int, state: StateId) -> None:
    """Remove the oldest states until the new images fit; the newest state stays."""
    for fewer in range(KEEP - 1, 0, -1):
        free = free_bytes(directory.root)
        if free is None or free > needed:
            return
        directory.prune(fewer, {state})
    free = free_bytes(directory.root)
    if free is not None and free < needed:
        raise StorageFailure(
            f"no space left at {name_of(directory.root)}: {size(needed)} are needed, {size(free)} are free; "
            "make room there, or choose another path"
        )


def _write(place: Path, source: ImageSource, job: Job, written: list[Path]) -> None:
    manifest = source.manifest
    image = place / f"rank-{manifest.rank:05d}.image"
    temporary = image.with_suffix(".writing")
    written.append(temporary)
    with NewFile(temporary, hashing=False) as file:
        for piece in source.read([(0, manifest.size_bytes)]):
            file.write(piece)
            job.wrote(len(piece))
    written.append(image)
    os.rename(temporary, image)
    written.append(image.with_suffix(".manifest"))
    write_atomically(image.with_suffix(".manifest"), manifest.to_bytes())
