"""What is a rank's own, on a rank of another node as well, so that the loss of a node costs no step either.

After each step a rank passes its record on to its keeper, and takes that of its ward, over the process group
while the next step is under way. Connections of a process group are not authenticated: what comes over them
is read with `plain_loads`, which calls nothing.
"""

from __future__ import annotations

import importlib
import io
import pickle
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from jurymast.checkpoint.tree import is_plain
from jurymast.errors import CheckpointError

_TAG = 0x6A6D
_HEAD = struct.Struct("qqQ")  # the step, the length, and a hash of what follows
# What a record may grow by, within an attempt, beyond the longest at its first step.
_HEADROOM_BYTES = 1 << 12
PASSED_BYTES_MAX = 1 << 16  # of a record: it is a part of each step's traffic
RECORDS = 2  # ranks differ by a step at most
_LAST_S = 1.0  # how long a rank whose connections were cut waits for what was under way


# ---- records


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


class _Pickler(pickle.Pickler):
    """torch's own way to pickle a tensor takes a hundred microseconds."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and is_plain(value):
            flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return _tensor, (flat.numpy().tobytes(), value.dtype, tuple(value.shape))
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biuf":
            return _array, (value.tobytes(), value.dtype.str, value.shape)
        return NotImplemented


_CONTAINERS = {"Counter": Counter, "OrderedDict": OrderedDict, "deque": deque}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ((__name__, "_tensor"), (__name__, "_array")):
            return globals()[name]
        if module == "collections" and name in _CONTAINERS:
            return _CONTAINERS[name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it has a {module}.{name}")


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def plain_loads(data: bytes) -> Any:
    """Read what `dumps` made of tensors, arrays and values in dicts, lists and tuples. Raises
    CheckpointError for anything else."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise CheckpointError(f"what is a rank's own cannot be taken from another rank: {error}") from error


def why_not_passed(data: bytes) -> str:
    """Why this record may not be passed on; "" if it may, or there is none."""
    if not data:
        return ""
    if len(data) > PASSED_BYTES_MAX:
        return f"it has {len(data)} bytes"
    try:
        plain_loads(data)
    except CheckpointError as error:
        return str(error.__cause__)
    return ""


# ---- their way


class Ward:
    """This rank's part: it passes its records on to its keeper, and keeps the last two of its ward."""

    def __init__(self) -> None:
        self.rank = -1  # whose records are kept
        self._keeper = -1
        self._kept: dict[int, bytes] = {}
        self._works: list[Any] = []
        self._out = self._in = torch.empty(0, dtype=torch.uint8)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._kept)

    def read(self, step: int) -> bytes:
        return self._kept[step]

    def begin(self, rank: int, each: int, sizes: Sequence[int]) -> None:
        """Begin to pass records on in this attempt. `each`: ranks of a node; `sizes`: those of all ranks'
        records in bytes, of all of which it is known that they may be."""
        world, room = len(sizes), _HEAD.size + max(sizes) + _HEADROOM_BYTES
        self._keeper, ward = (rank + each) % world, (rank - each) % world
        if ward != self.rank:
            self._kept = {}
        self.rank = ward
        self._out, self._in = (torch.empty(room, dtype=torch.uint8) for _ in range(2))

    def end(self) -> None:
        """The attempt has ended: take what had arrived by then, and pass nothing on."""
        with suppress(Exception):
            self._finish(timedelta(seconds=_LAST_S))
        self._keeper = -1

    def keep_only(self, step: int) -> None:
        """All go on from this step (-1: from a save)."""
        self._kept = {one: data for one, data in self._kept.items() if one == step}

    def pass_on(self, step: int, data: bytes) -> None:
        """Pass this rank's record on, b"" for none, and take its ward's. Raises what a collective does."""
        if self._keeper < 0:
            return
        self._finish()
        if _HEAD.size + len(data) > len(self._out):
            data = b""
        out = memoryview(self._out.numpy())
        _HEAD.pack_into(out, 0, step, len(data), xxhash.xxh3_64_intdigest(data))
        out[_HEAD.size : _HEAD.size + len(data)] = data
        self._works = [
            dist.isend(self._out, self._keeper, tag=_TAG), dist.irecv(self._in, self.rank, tag=_TAG),
        ]  # fmt: skip

    def _finish(self, *limit: timedelta) -> None:
        """Wait for what is under way, which has had a step's time."""
        works, self._works = self._works, []
        failed = None
        for work in works:
            try:
                work.wait(*limit)
            except Exception as error:
                failed = error
        if works:
            self._keep()
        if failed is not None:
            raise failed

    def _keep(self) -> None:
        """Take what is in the buffer, if that is all of a record."""
        data = memoryview(self._in.numpy())
        step, size, digest = _HEAD.unpack_from(data)
        record = bytes(data[_HEAD.size : _HEAD.size + size]) if size > 0 else b""
        if len(record) != size or xxhash.xxh3_64_intdigest(record) != digest or not record:
            return
        self._kept[step] = record
        while len(self._kept) > RECORDS:
            del self._kept[min(self._kept)]


def give(data: bytes, taker: int) -> None:
    """Send a record to the rank whose own it is."""
    dist.send(torch.tensor([len(data)]), taker)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), taker)


def take(keeper: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, keeper)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, keeper)
    return data.numpy().tobytes()
