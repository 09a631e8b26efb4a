"""Images to be stored, read block by block. Each block is checked against its hash before any of it is
written."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from jurymast.core.checkpoints.copies import COMMON, OWN
from jurymast.keeper.manifest import BadImage, Block, Manifest, blocks_of, is_intact
from jurymast.storage.orders import ImageAt, StorageFailure, explain

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
            raise StorageFailure(
                f"the image of rank {self.manifest.rank} in {path} is corrupt: block {block.number} of "
                f"its {block.part} part is not what was hashed. It was not stored; look at that node's memory"
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
