"""A stand-in for the agent's keeper: it gives memory, reads what ranks saved, and offers what to restore."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from jurymast.core.keeper.holding import SLOTS
from jurymast.keeper.manifest import (
    PAGE_VARIABLE,
    Manifest,
    RankRecord,
    RestoreStatus,
    ShownImage,
    ShownImages,
    SlotRecord,
    SlotWord,
    Word,
    create_page,
)
from jurymast.worker import link

LIMIT_S = 120.0


class Keeper:
    """For `ranks` local ranks; gives each slots of the size that it asks for, unless it is `stingy`."""

    def __init__(self, ranks: int = 1, *, stingy: bool = False) -> None:
        self._page_fd, page = create_page(ranks)
        self.records = [RankRecord(page, rank) for rank in range(ranks)]
        self.events: list[dict[str, Any]] = []
        self._buffers: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}
        self._lent: list[int] = []
        self._generation = 0
        self.growing = {(rank, number) for rank in range(ranks) for number in range(SLOTS)}
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._stop = threading.Event()
        self._serving = threading.Thread(target=self._serve)
        for record in self.records:
            record[Word.RESTORE] = RestoreStatus.ELSEWHERE
        if not stingy:
            self._serving.start()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._serving.is_alive():
            self._serving.join()
        for descriptor in (self._page_fd, self._read_fd, self._write_fd):
            os.close(descriptor)
        for descriptor in (*self._lent, *(descriptor for descriptor, _ in self._buffers.values())):
            os.close(descriptor)

    @property
    def environment(self) -> dict[str, str]:
        root = f"/proc/{os.getpid()}/fd"
        return {
            PAGE_VARIABLE: f"{root}/{self._page_fd}",
            link.EVENTS_VARIABLE: f"{root}/{self._write_fd}",
            "JURYMAST_ATTEMPT": "3",
        }

    def slot(self, rank: int, number: int) -> SlotRecord:
        return self.records[rank].slot(number)

    def _serve(self) -> None:
        while not self._stop.wait(0.002):
            for rank, number in list(self.growing):
                wanted = self.records[rank][Word.WANT]
                if wanted > self.slot(rank, number)[SlotWord.CAPACITY]:
                    self.give(rank, number, wanted)

    def give(self, rank: int, number: int, capacity: int) -> mmap.mmap:
        """Put a new buffer into a slot; an older one lives on where it is mapped."""
        descriptor = os.memfd_create("test-slot", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, capacity)
        buffer = mmap.mmap(descriptor, capacity)
        slot = self.slot(rank, number)
        slot[SlotWord.FD] = 0
        if (rank, number) in self._buffers:
            os.close(self._buffers[rank, number][0])
        self._buffers[rank, number] = (descriptor, buffer)
        self._generation += 1
        slot[SlotWord.CAPACITY] = capacity
        slot[SlotWord.GENERATION] = self._generation
        slot[SlotWord.FREED] = slot[SlotWord.SEQ]
        slot[SlotWord.FD] = descriptor
        return buffer

    def buffer(self, rank: int, number: int) -> mmap.mmap:
        return self._buffers[rank, number][1]

    def image(self, number: int, rank: int = 0) -> tuple[Manifest, bytes]:
        """What a slot holds; AssertionError when that is not whole."""
        slot = self.slot(rank, number)
        assert slot[SlotWord.SEQ] % 2 == 0
        assert slot[SlotWord.SEQ] != slot[SlotWord.FREED]
        data = self.buffer(rank, number)
        size = slot[SlotWord.IMAGE]
        manifest = Manifest.from_bytes(data[size : size + slot[SlotWord.MANIFEST]])
        image = data[:size]
        assert (manifest.step, manifest.size_bytes, manifest.rank) == (slot[SlotWord.STEP], size, rank)
        manifest = manifest.with_blocks(memoryview(image))
        return Manifest.from_bytes(manifest.to_bytes()), image

    def free(self, number: int, rank: int = 0) -> None:
        slot = self.slot(rank, number)
        slot[SlotWord.FREED] = slot[SlotWord.SEQ]

    def offer(self, manifest: Manifest, image: bytes, rank: int = 0, number: int = 0) -> None:
        """Have the rank restore this."""
        tail = manifest.to_bytes()
        wanted = self.records[rank][Word.WANT]  # of the process before
        buffer = self.give(rank, number, max(wanted, len(image) + len(tail)))
        buffer[: len(image)] = image
        buffer[len(image) : len(image) + len(tail)] = tail
        record = self.records[rank]
        record[Word.RESTORE_SLOT] = number
        record[Word.RESTORE_STEP] = manifest.step
        record[Word.RESTORE_ATTEMPT] = manifest.attempt
        record[Word.RESTORE_IMAGE] = len(image)
        record[Word.RESTORE_MANIFEST] = len(tail)
        record[Word.RESTORE] = RestoreStatus.READY

    def show(self, images: Sequence[tuple[Manifest, bytes]]) -> None:
        """Have all ranks restore what another number of ranks saved. Of a common part that is the same there
        is one."""
        shown, common = list[ShownImage](), dict[str, int]()
        for manifest, image in images:
            other = common.get(manifest.common_id, 0)
            own = bytes(manifest.common_bytes) + image[manifest.common_bytes :] if other else image
            place = self._lend(own)
            common.setdefault(manifest.common_id, place)
            shown.append(ShownImage(manifest.to_bytes(), place, other))
        text = ShownImages(tuple(shown)).to_bytes()
        first, index = images[0][0], self._lend(text)
        for record in self.records:
            record[Word.RESTORE_SLOT], record[Word.RESTORE_MANIFEST] = index, len(text)
            record[Word.RESTORE_STEP], record[Word.RESTORE_ATTEMPT] = first.step, first.attempt
            record[Word.RESTORE_IMAGE] = sum(len(image) for _, image in images)
            record[Word.RESTORE] = RestoreStatus.COLLECTED

    def _lend(self, data: bytes) -> int:
        descriptor = os.memfd_create("test-shown", os.MFD_CLOEXEC)
        os.write(descriptor, data)
        self._lent.append(descriptor)
        return descriptor

    def heard(self) -> list[dict[str, Any]]:
        """All events of ranks so far."""
        try:
            data = os.read(self._read_fd, 1 << 20)
        except BlockingIOError:
            data = b""
        self.events += [json.loads(line) for line in data.splitlines()]
        return self.events
