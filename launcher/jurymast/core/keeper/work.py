"""Work that takes several steps: bringing an image into a buffer, for a rank or as a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jurymast.core import messages as msg
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.copies import KeptCopy
from jurymast.core.keeper.holding import Holding
from jurymast.core.keeper.memory import Buffer


@dataclass(frozen=True)
class Found:
    """Manifests of images, in the order in which they were requested, up to the first that no node has.
    `slot_bytes`: the size of the buffer for the first one as a slot; `passed_over`: why sources could not be
    used, one line each."""

    reports: tuple[msg.CopyReport, ...]
    slot_bytes: int = 0
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filled:
    """The result of filling a buffer: the `copy` if it is whole, with its manifest of `behind` bytes after it
    if that was requested and has room. `got`: bytes by tier; `refused`: why the kernel has no memory for it;
    `allocated`: the memory that the buffer uses now."""

    copy: KeptCopy | None
    behind: int = 0
    got: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    refused: str = ""
    allocated: int = 0


class Works:
    """All work under way, by number."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.going: dict[int, Work] = {}
        self.numbers = 0


class Work:
    """`buffer`: the buffer that it fills; `why`: what it had to pass over; `stopped`: nobody wants it any
    more."""

    def __init__(self, works: Works) -> None:
        works.numbers += 1
        self.number = works.numbers
        works.going[self.number] = self
        self._works = works
        self.holding, self.memory = works.holding, works.holding.memory
        self.do, self.tell = works.holding.do, works.holding.tell
        self.buffer: Buffer | None = None
        self.why: list[str] = []
        self.stopped = False

    def found(self, found: Found) -> None:
        raise NotImplementedError

    def verified(self, intact: bool | None) -> None:
        raise NotImplementedError

    def fetched(self, fetched: Filled, now: float) -> None:
        raise NotImplementedError

    def own(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.holding.busy.add(buffer)

    def took(self, fetched: Filled) -> None:
        self.why += fetched.passed_over
        if self.buffer is not None:
            self.memory.touched(self.buffer, fetched.allocated)

    def stop(self) -> None:
        self.stopped = True
        self.do(do.Hurry(self.number))

    def end(self) -> None:
        """End the work, and give its buffer back unless it belongs to a copy."""
        if self.buffer is not None:
            self.holding.release(self.buffer)
            self.buffer = None
        del self._works.going[self.number]
        self.do(do.EndWork(self.number))
