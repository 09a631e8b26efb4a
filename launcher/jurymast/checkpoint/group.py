"""Exchanges values between the ranks of a training; a single process exchanges nothing.

Values travel as JSON: torch's own collectives for objects unpickle what they receive, and connections between
ranks are not authenticated.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jurymast import foreign
from jurymast.checkpoint.directory import CheckpointManifest, FileRecord, one_line
from jurymast.errors import CheckpointError
from jurymast.reading import Unable, conclusive
from jurymast.worker import link

log = logging.getLogger("jurymast.checkpoint")


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; the same on every rank, except in the memory tier. `error` is one line, empty if
    `ok`.

    `existing` is True if the step already had a complete, verified checkpoint, which was kept.
    """

    ok: bool
    size_bytes: int = 0
    error: str = ""
    existing: bool = False


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored and is not yet verified. `entries` says how each entry was saved;
    `attempt`, which attempt saved the image in memory (0: it is in the shared tier); `unable`, why it cannot
    be read now ("": nobody has tried)."""

    step: int
    size_bytes: int
    world_size: int
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    attempt: int = 0
    unable: str = ""


KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Candidate, FileRecord, CheckpointManifest, SaveResult)
}


def to_bytes(value: Any) -> bytes:
    """Encode a value as JSON. Raises TypeError for a type that ranks do not exchange."""
    return json.dumps(_packed(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Decode a value. An exception becomes one of the same class if that is known here. Raises
    CheckpointError."""
    try:
        return _unpacked(foreign.parse(data))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"invalid message from a rank: {one_line(error)}") from error


def _packed(value: Any) -> Any:
    """Return the value in JSON's types. Types that JSON lacks become a list that begins with the type's
    name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, OSError):
        name = str(value.filename) if value.filename is not None else None
        return ["OSError", value.errno, value.strerror or str(value), name]
    if isinstance(value, CheckpointError):
        return ["CheckpointError", str(value), value.hint]
    if isinstance(value, Exception):
        return ["CheckpointError", one_line(value), ""]
    parts = value.items() if type(value) is dict else value
    if KINDS.get(type(value).__name__) is type(value):
        parts = (getattr(value, one.name) for one in fields(value))
    elif type(value) not in (list, tuple, dict):
        raise TypeError(f"ranks cannot exchange a {type(value).__name__}")
    return [type(value).__name__, *map(_packed, parts)]


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *values = packed[0], *map(_unpacked, packed[1:])
    match kind:
        case "list":
            return values
        case "tuple":
            return tuple(values)
        case "dict":
            return dict(values)
        case "OSError":
            errno, text, name = values
            return OSError(errno, text, name) if errno is not None else OSError(text)
        case "CheckpointError":
            text, hint = values
            return CheckpointError(text, hint=hint)
    return KINDS[kind](*values)


T = TypeVar("T")


class RankUnable(Unable):
    """One rank could not read or hold something now, which says nothing about what is stored. Raised on every
    rank."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class RankFailed(CheckpointError):
    """Work failed on one rank, and would again. Raised on every rank."""


NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "HIP error: out of memory")


def is_inability(error: BaseException) -> bool:
    """Whether something cannot be read or held now. torch says so of its own memory, of a GPU's, of what is
    pinned for one, and of files, by RuntimeErrors."""
    if isinstance(error, RuntimeError):
        text = str(error)
        return isinstance(error, torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY)
    return isinstance(error, OSError | MemoryError) and not conclusive(error)


def is_hidden(error: BaseException) -> bool:
    """Whether this is the RuntimeError in which torch's zip files hide an OSError."""
    return isinstance(error, RuntimeError) and ".cc:" in str(error)


class Group:
    """All ranks of the default process group, over a CPU backend. All ranks call every method."""

    def __init__(self) -> None:
        """Make a gloo group if the training's group cannot carry CPU tensors. Collective.

        Raises CheckpointError if there are other ranks but no process group to reach them.
        """
        self.process_group: Any = None
        self.rank = 0
        self.size = 1
        self.distributed = dist.is_available() and dist.is_initialized()
        if not self.distributed and link.world_size() > 1:
            raise CheckpointError(
                "this is one of several ranks, but there is no process group",
                hint="call torch.distributed.init_process_group before restore(), step() and save()",
            )
        if self.distributed:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            if "cpu:" not in dist.get_backend_config():
                self.process_group = dist.new_group(backend="gloo")

    def broadcast_step(self, step: int) -> int:
        """Return rank 0's `step` on every rank, by one small message: ranks do this during training."""
        if not self.distributed:
            return step
        boxed = torch.tensor(step, dtype=torch.int64)
        dist.broadcast(boxed, src=0, group=self.process_group)
        return int(boxed)

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, by rank, on every rank."""
        if not self.distributed:
            return [value]
        data = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.process_group)
        longest = max(int(length) for length in lengths)
        filled = torch.zeros(longest, dtype=torch.uint8)
        filled[: len(data)] = data
        all_filled = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_filled, filled, group=self.process_group)
        return [_value(one[: int(length)]) for one, length in zip(all_filled, lengths, strict=True)]

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return all results, by rank. If it fails on some rank, every rank
        raises RankUnable or RankFailed, for the first rank that was unable, or else the first that failed."""
        result: T | None = None
        told: tuple[str, bool] = ("", False)
        try:
            result = work()
        except Exception as error:
            told = one_line(error), is_inability(error)
            log.warning("cannot load a checkpoint", exc_info=error)
        gathered = self.gather((result, told))
        failed = [(not unable, rank, why) for rank, (_, (why, unable)) in enumerate(gathered) if why]
        if failed:
            able, rank, why = min(failed)
            raise RankFailed(f"rank {rank}: {why}") if able else RankUnable(rank, why)
        return [theirs for theirs, _ in gathered]  # type: ignore[misc]  # nobody failed

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return its result on every rank. What it raises is raised on every rank."""
        result: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = work()
            except Exception as raised:
                error = raised.with_traceback(None)
                error.__cause__ = error.__context__ = None
        if self.distributed:
            told, told_error = self._broadcast((result, error))
            result, error = (told, told_error) if self.rank else (result, error)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # rank 0's, and that is a T

    def _broadcast(self, value: Any) -> Any:
        data = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self.process_group)
        data = data if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.process_group)
        return _value(data)


def _value(data: torch.Tensor) -> Any:
    return from_bytes(ctypes.string_at(data.data_ptr(), len(data)))
