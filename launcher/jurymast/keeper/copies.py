"""The copies that a node holds: whole images or parts, in memory or on its own disk, and their readers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jurymast.core.keeper import effects as core
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, LOCAL, OWN, ImageId
from jurymast.foreign import MANIFEST_BYTES_MAX, NotOurs, check_private, open_own, own_directory, read_own
from jurymast.keeper.manifest import BadImage, Manifest, blocks_of
from jurymast.keeper.memory import ImageBuffer
from jurymast.reading import Unable, patiently

log = logging.getLogger("jurymast.keeper")

# How long a node's own disk is tried: other copies may serve meanwhile.
PATIENCE_S = 5.0
_STATE_NAME = re.compile(r"step-\d+\.a\d+")
_MANIFEST_NAME = re.compile(r"step-(\d+)\.a(\d+)/rank-(\d+)\.manifest")


def trusted(data: bytes, key: ImageId) -> Manifest:
    """Parse the manifest in `data`. Raises BadImage if it is not of this image or lacks hashes."""
    manifest = Manifest.from_bytes(data)
    if manifest.image != key:
        raise BadImage(
            f"its manifest is of step {manifest.step}, attempt {manifest.attempt}, rank {manifest.rank}"
        )
    blocks_of(manifest)
    return manifest


class StoredCopy(core.KeptCopy):
    """One image or one of its parts. Its bytes are at the offsets in the manifest, in a buffer or a file."""

    def __init__(
        self,
        manifest: Manifest,
        tier: str,
        part: str,
        place: ImageBuffer | Path,
        *,
        manifest_bytes: bytes = b"",
    ) -> None:
        self.memory = None if isinstance(place, Path) else place
        super().__init__(report_of(manifest, tier, part), self.memory.number if self.memory else 0)
        self.manifest = manifest
        self.place = place
        self.manifest_bytes = manifest_bytes or manifest.to_bytes()
        self.verified_at = 0.0  # the event loop's time

    @property
    def path(self) -> str:
        """The path of a file that begins with the image; it has every byte only if the copy is whole."""
        return self.memory.path if self.memory is not None else str(self.place)

    @property
    def capacity(self) -> int:
        return self.memory.capacity if self.memory is not None else 0

    def has(self, at: int, length: int) -> bool:
        start, end = 0, self.manifest.size_bytes
        if self.part != ALL:
            start, end = self.manifest.extent(self.part)
        return start <= at and length >= 0 and at + length <= end


def report_of(manifest: Manifest, tier: str, part: str) -> msg.CopyReport:
    """Return the report to the supervisor about such a copy."""
    return msg.CopyReport(
        tier=tier, step=manifest.step, attempt=manifest.attempt, rank=manifest.rank, world=manifest.world,
        part=part, size_bytes=manifest.size_bytes, common_bytes=manifest.common_bytes,
        common_id=manifest.common_id,
    )  # fmt: skip


@dataclass
class CopyTable:
    """The table of copies, and the readers of each buffer. Every method may be called from any thread.

    A buffer does not change while it is read: whoever drops its copy calls `when_idle` to learn when the last
    reader is gone. `idle` is called for that, in the thread of the last reader.
    """

    idle: Callable[[Callable[[], None]], None] = lambda then: then()
    _copies: dict[core.Entry, StoredCopy] = field(default_factory=dict)
    _waiting: dict[ImageBuffer, Callable[[], None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[StoredCopy]:
        with self._lock:
            return iter(list(self._copies.values()))

    def add(self, copy: StoredCopy) -> None:
        with self._lock:
            self._copies[copy.entry] = copy

    def remove(self, copy: StoredCopy) -> None:
        """Remove this copy from the table; those who read it already can continue."""
        with self._lock:
            if self._copies.get(copy.entry) is copy:
                del self._copies[copy.entry]

    def find(self, key: ImageId, tiers: tuple[str, ...] = core.TIERS) -> list[StoredCopy]:
        """List copies of this image or its parts, best first."""
        with self._lock:
            return core.best_first(self._copies.values(), key, tiers)

    def manifest(self, key: ImageId) -> tuple[Manifest, int] | None:
        """Return (the image's manifest, the capacity of its largest buffer here or 0), or None."""
        found = self.find(key)
        return (found[0].manifest, max(copy.capacity for copy in found)) if found else None

    def acquire(self, key: ImageId, at: int = 0, length: int | None = None) -> StoredCopy | None:
        """Return a copy with these bytes (by default all), which do not change until `release`, or None."""
        for copy in self.find(key):
            if copy.has(at, copy.manifest.size_bytes - at if length is None else length) and self.read(copy):
                return copy
        return None

    def acquire_image(self, key: ImageId) -> list[StoredCopy]:
        """Return the copies that together have the whole image: one, or that of the common part, which may be
        another rank's, and that of the own part. They do not change until each is released. [] if the image
        is not here."""
        if whole := self.acquire(key):
            return [whole]
        for own in self.find(key):
            same = own.image[:2], own.report.common_id
            for common in self:
                fits = (common.image[:2], common.report.common_id) == same
                if own.part != OWN or not fits or common.part == OWN or not self.read(common):
                    continue
                if self.read(own):
                    return [common, own]
                self.release(common)
        return []

    def read(self, copy: StoredCopy) -> bool:
        """Become a reader of this copy until `release`; False if it was dropped."""
        with self._lock:
            if self._copies.get(copy.entry) is not copy:
                return False
            if copy.memory is not None:
                copy.memory.readers += 1
            return True

    def release(self, copy: StoredCopy) -> None:
        if (buffer := copy.memory) is None:
            return
        with self._lock:
            buffer.readers -= 1
            then = self._waiting.pop(buffer, None) if not buffer.readers else None
        if then is not None:
            self.idle(then)

    def when_idle(self, buffer: ImageBuffer, then: Callable[[], None]) -> None:
        """Call `then` once no reader is left: at once, or later through `idle`."""
        with self._lock:
            if buffer.readers:
                self._waiting[buffer] = then
                return
        then()


def local_copies(root: Path) -> list[StoredCopy]:
    """List the complete images under a local directory; their contents are verified only when used.

    The manifest is written last: an image without one does not count. Neither does an image of another size,
    or a file that another user may have put there. One that cannot be read for a while is left out, but
    stays.
    """
    found: list[StoredCopy] = []
    try:
        patiently(lambda: check_private(root.parent), root.parent.parent, PATIENCE_S)
    except (FileNotFoundError, NotOurs):
        return found
    for path in sorted(root.glob("step-*.a*/rank-*.manifest")):
        name = _MANIFEST_NAME.fullmatch(f"{path.parent.name}/{path.name}")
        if name is None:
            continue
        image = path.with_suffix(".image")
        key = ImageId(int(name[1]), int(name[2]), int(name[3]))
        try:
            copy = patiently(lambda path=path, key=key: _local_copy(path, key), root, PATIENCE_S)  # type: ignore[misc]
        except Unable as error:
            log.warning("%s is not used: %s", image, error)
        except (OSError, BadImage):
            continue
        else:
            found += [copy] if copy is not None else []
    return found


def _local_copy(path: Path, key: ImageId) -> StoredCopy | None:
    """Return the image with this manifest, or None if its size is another. Raises OSError, BadImage."""
    image, data = path.with_suffix(".image"), read_own(path, MANIFEST_BYTES_MAX)
    manifest = trusted(data, key)
    with open(open_own(image), "rb") as file:
        size = os.fstat(file.fileno()).st_size
    return (
        StoredCopy(manifest, LOCAL, ALL, image, manifest_bytes=data) if size == manifest.size_bytes else None
    )


def remove_local_copies(root: Path) -> None:
    """Remove all of one run's images under a local directory, best effort. Nothing else that is there: where
    others may rename directories around it, another one of this user's may have got its name."""
    with suppress(OSError), own_directory(root.parent) as parent:
        with own_directory(parent / root.name) as here:
            for state in filter(_STATE_NAME.fullmatch, os.listdir(here)):
                shutil.rmtree(here / state, ignore_errors=True)
        os.rmdir(parent / root.name)
