"""The ranks of a training talking about checkpoints; in a single process there is nobody to talk to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jurymast.checkpoint import values
from jurymast.errors import CheckpointError

T = TypeVar("T")


class Group:
    """All ranks of the default process group, over a CPU backend. Every method is called by all ranks."""

    def __init__(self) -> None:
        """Collective: makes a gloo group of its own when the training's group cannot carry CPU objects.

        Raises CheckpointError when there are other ranks but no process group to reach them.
        """
        self.process_group: Any = None
        self.rank = 0
        self.size = 1
        self.distributed = dist.is_available() and dist.is_initialized()
        if not self.distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
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
        """Rank 0's `step`, on every rank: one small message, for ranks do this during training."""
        if not self.distributed:
            return step
        boxed = torch.tensor(step, dtype=torch.int64)
        dist.broadcast(boxed, src=0, group=self.process_group)
        return int(boxed)

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank, on every rank."""
        if not self.distributed:
            return [value]
        data = torch.frombuffer(bytearray(values.to_bytes(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.process_group)
        longest = max(int(length) for length in lengths)
        filled = torch.zeros(longest, dtype=torch.uint8)
        filled[: len(data)] = data
        all_filled = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_filled, filled, group=self.process_group)
        return [_value(one[: int(length)]) for one, length in zip(all_filled, lengths, strict=True)]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and give its result to every rank; what it raises is raised on every rank."""
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
        """Rank 0's `value`, on every rank."""
        data = torch.frombuffer(bytearray(values.to_bytes(value)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, src=0, group=self.process_group)
        data = data if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.process_group)
        return _value(data)


def _value(data: torch.Tensor) -> Any:
    return values.from_bytes(ctypes.string_at(data.data_ptr(), len(data)))
