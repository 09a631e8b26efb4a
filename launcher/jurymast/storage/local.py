"""Images on a node's own disk, which survive the agent and a reboot of the node.

ROOT/step-00000100.a0003/rank-00007.image       the image's bytes
ROOT/step-00000100.a0003/rank-00007.manifest    written last: without it the image does not count

ROOT's parent directory must belong to this user and be closed to others.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path

from jurymast.checkpoint.directory import NewFile, names_in
from jurymast.core.texts import size
from jurymast.foreign import NotOurs, check_private, make_private
from jurymast.rundir import sync_directory, write_atomically
from jurymast.storage.orders import Done, Job, StorageFailure, WriteLocal, explain, free_bytes
from jurymast.storage.source import ImageSource

KEEP = 2

_STATE = re.compile(r"step-(\d{8,})\.a(\d{4,})")
_IMAGE = re.compile(r"rank-(\d{5,})\.manifest")

State = tuple[int, int]  # step, attempt


class LocalDirectory:
    """One run's images on one node's disk, for the process that writes them; `keeper.copies` reads them."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, step: int, attempt: int) -> Path:
        return self.root / f"step-{step:08d}.a{attempt:04d}"

    def states(self) -> list[State]:
        """List (step, attempt) of the states here, whole or not, by attempt and step, newest first."""
        matches = map(_STATE.fullmatch, names_in(self.root))
        found = [(int(match[1]), int(match[2])) for match in matches if match]
        return sorted(found, key=lambda state: (state[1], state[0]), reverse=True)

    def ranks(self, step: int, attempt: int) -> set[int]:
        """Return the ranks whose images of a state are complete. Raises OSError."""
        matches = map(_IMAGE.fullmatch, names_in(self.path(step, attempt)))
        return {int(match[1]) for match in matches if match}

    def prune(self, keep: int, protect: Collection[State] = ()) -> list[State]:
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
    directory = LocalDirectory(order.root)
    try:
        return _write_all(directory, order, job)
    except OSError as error:
        why = str(error) if isinstance(error, NotOurs) else explain(error, directory.root)
        raise StorageFailure(f"local disk: {why}") from error


def remove(root: Path) -> None:
    """Remove all of one run's images, best effort."""
    try:
        check_private(root.parent)
    except OSError:
        return
    shutil.rmtree(root, ignore_errors=True)


def _write_all(directory: LocalDirectory, order: WriteLocal, job: Job) -> Done:
    state = order.step, order.attempt
    place = directory.path(*state)
    with ExitStack() as stack:
        opened = (closing(ImageSource.of_order(image, *state)) for image in order.images)
        sources = [stack.enter_context(source) for source in opened]
        make_private(directory.root.parent)
        directory.root.mkdir(mode=0o700, exist_ok=True)
        directory.sweep()
        held = directory.ranks(*state)
        missing = [source for source in sources if source.manifest.rank not in held]
        _make_room(directory, sum(source.manifest.size_bytes for source in missing), state)
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


def _make_room(directory: LocalDirectory, needed: int, state: State) -> None:
    """Remove the oldest states until the new images fit; the newest state stays."""
    for fewer in range(KEEP - 1, 0, -1):
        free = free_bytes(directory.root)
        if free is None or free > needed:
            return
        directory.prune(fewer, {state})
    free = free_bytes(directory.root)
    if free is not None and free < needed:
        raise StorageFailure(
            f"no space left at {directory.root}: {size(needed)} are needed, {size(free)} are free; "
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
