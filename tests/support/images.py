"""Images made by hand, as `keeper.manifest` defines them, and the storage process that they are given to."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from jurymast.checkpoint.contents import Contents, Item
from jurymast.core.checkpoints.writes import ALONE
from jurymast.core.state.message import Unreadable
from jurymast.core.state.messages import WritePhase
from jurymast.keeper.manifest import Manifest
from jurymast.storage.orders import (
    Answer,
    AnyOrder,
    Cancel,
    Continue,
    Done,
    ImageAt,
    Progress,
    Reached,
    StorageFailed,
    Told,
    WriteLocal,
    WriteShared,
    read_answer,
)

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Chunk:
    """This rank's part of a larger tensor of `shape`."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def make_image(
    common: Mapping[Key, Any],
    own: Mapping[Key, Any],
    entries: dict[str, dict[str, Any]],
    *,
    step: int = 10,
    attempt: int = 1,
    rank: int = 0,
    world: int = 1,
) -> tuple[bytes, Manifest]:
    """Items back to back: `common` and `own` map paths to tensors, chunks or values."""
    data = bytearray()
    items = []
    common_bytes = 0
    for number, (path, value) in enumerate([*common.items(), *own.items()]):
        if number == len(common):
            common_bytes = len(data)
        items.append(_add(data, path, value))
    if not own:
        common_bytes = len(data)
    contents_at = len(data)
    data += Contents(entries, tuple(items)).to_bytes()
    manifest = Manifest(step, attempt, rank, world, torch.__version__, len(data), common_bytes, contents_at)
    return bytes(data), manifest.with_blocks(memoryview(data))


def _add(data: bytearray, path: Key, value: Any) -> Item:
    file = io.BytesIO()
    torch.save(value.tensor.clone() if isinstance(value, Chunk) else value, file)
    saved = file.getvalue()
    item = Item(".".join(map(str, path)), path, len(data), len(saved))
    data += saved
    if isinstance(value, torch.Tensor):
        value = Chunk(value, tuple(value.shape), (0,) * value.dim())
    if isinstance(value, Chunk):
        dtype = str(value.tensor.dtype).removeprefix("torch.")
        sizes = tuple(value.tensor.shape)
        return msgspec.structs.replace(
            item, dtype=dtype, shape=tuple(value.shape), offsets=value.offsets, sizes=sizes, raw=item.at
        )
    return item


def put_image(folder: Path, data: bytes, manifest: Manifest) -> ImageAt:
    """What an order says of an image in a file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"image-{manifest.step}-{manifest.attempt}-{manifest.rank}"
    path.write_bytes(data)
    return ImageAt(rank=manifest.rank, path=str(path), manifest=manifest.to_bytes().decode())


def simple_images(
    folder: Path,
    *,
    step: int = 10,
    attempt: int = 1,
    world: int = 1,
    size: int = 1000,
    fill: float | None = None,
) -> list[ImageAt]:
    """Data-parallel ranks: a replicated weight, a sharded one, and a value of each rank's own."""
    images = []
    value = float(step) if fill is None else fill
    for rank in range(world):
        data, manifest = make_image(
            {("model", "weight"): torch.full((size,), value), ("model", "bias"): torch.full((7,), value + 1)},
            {
                ("model", "table"): Chunk(torch.full((2, 3), value + rank), (2 * world, 3), (2 * rank, 0)),
                ("data", "position"): 100 * rank + step,
                ("epoch",): step,
            },
            {
                "model": {"kind": "module"},
                "data": {"kind": "stateful", "digest": str(rank)},
                "epoch": {"kind": "value", "digest": "same"},
            },
            step=step,
            attempt=attempt,
            rank=rank,
            world=world,
        )
        images.append(put_image(folder, data, manifest))
    return images


def to_local(
    root: Path, images: Sequence[ImageAt], *, step: int = 10, attempt: int = 1, limit_s: float = 100.0
) -> WriteLocal:
    return WriteLocal(root=str(root), step=step, attempt=attempt, images=tuple(images), limit_s=limit_s)


def to_shared(
    root: Path, images: Sequence[ImageAt], *, world: int, lead: bool, nonce: str = "00ab", step: int = 10,
    attempt: int = 1, keep: int = 0, limit_s: float = 100.0,
) -> WriteShared:  # fmt: skip
    return WriteShared(
        root=str(root), step=step, attempt=attempt, world=world, images=tuple(images), nonce=nonce, lead=lead,
        keep=keep, limit_s=limit_s,
    )  # fmt: skip


class StorageProcess:
    """`python -m jurymast.storage`, spoken to line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jurymast.storage"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._next_id = 0

    def __enter__(self) -> StorageProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def give(self, order: AnyOrder) -> int:
        self._next_id += 1
        self.tell(msgspec.structs.replace(order, id=self._next_id))
        return self._next_id

    def tell(self, told: Told) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(told) + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Answer | Reached:
        """What it says next besides its progress; what it has not done or said before its end has failed."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            found = read_answer(line) if line else StorageFailed(why="the process has ended")
            assert not isinstance(found, Unreadable), found
            if not isinstance(found, Progress):
                return found

    def answer(self) -> Answer:
        said = self.hear()
        assert not isinstance(said, Reached), said
        return said

    def carry_out(self, order: AnyOrder) -> Answer:
        self.give(order)
        return self.answer()

    def done(self, order: AnyOrder) -> Done:
        answer = self.carry_out(order)
        assert isinstance(answer, Done), answer
        return answer

    def failure(self, order: AnyOrder) -> str:
        answer = self.carry_out(order)
        assert isinstance(answer, StorageFailed), answer
        return answer.why

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class WriteTogether:
    """Storage processes, the first of which leads, that are led through the phases of a write as by a
    supervisor."""

    def __init__(self, processes: Sequence[StorageProcess], orders: Sequence[WriteShared]) -> None:
        self.processes = processes
        self._parts = tuple(order.images[0].rank for order in orders)
        self._ids = [process.give(order) for process, order in zip(processes, orders, strict=True)]
        self.answers: dict[int, Answer] = {}  # by the process's number

    def _of(self, phase: WritePhase) -> Sequence[int]:
        return range(1 if phase in ALONE else len(self.processes))

    def begin(self, phase: WritePhase) -> None:
        """Have this phase begun by all that take part in it."""
        parts = self._parts if phase is WritePhase.SHARE_OUT else ()
        for number in self._of(phase) if phase > WritePhase.OPEN else ():
            self.processes[number].tell(Continue(id=self._ids[number], phase=phase, parts=parts))

    def end(self, phase: WritePhase) -> bool:
        """Wait for its end; whether there is another phase."""
        for number in self._of(phase):
            said = self.processes[number].hear()
            if isinstance(said, Reached) and said.phase is WritePhase.HOLD:
                said = self.processes[number].hear()
            if not isinstance(said, Reached):
                self.answers[number] = said
            else:
                assert said == Reached(id=self._ids[number], phase=phase)
        failed = any(isinstance(answer, StorageFailed) for answer in self.answers.values())
        return not failed and 0 not in self.answers

    def go(self, until: WritePhase) -> None:
        """Up to where this phase begins."""
        for phase in WritePhase:
            if WritePhase.HOLD < phase < until:
                self.begin(phase)
                assert self.end(phase), self.answers
        self.begin(until)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.answers[number] = StorageFailed(why="it was killed")

    def carry_out(self) -> list[Answer]:
        """The answers of all. Who has not answered when one fails is cancelled."""
        for phase in list(WritePhase)[1:]:
            self.begin(phase)
            if not self.end(phase):
                break
        return self.cancel()

    def cancel(self) -> list[Answer]:
        """The answers of all; who has not given one yet is cancelled."""
        for number, process in enumerate(self.processes):
            if number not in self.answers:
                process.tell(Cancel(id=self._ids[number]))
                while isinstance(said := process.hear(), Reached):
                    continue
                self.answers[number] = said
        return [answer for _, answer in sorted(self.answers.items())]
