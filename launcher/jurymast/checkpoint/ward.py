"""What is a rank's own, on a rank of another node as well, so that the loss of a node costs no step either.

After each step a rank passes its record on to its keeper, and takes that of its ward, over the process group
while the next step is under way. Connections of a process group are not authenticated: each record has a code
that only who knows the run's secret can make, and is read with `plain_loads`, which calls nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import io
import os
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

from jurymast.checkpoint.tree import is_plain
from jurymast.errors import CheckpointError
from jurymast.rundir import RunDirectory

_TAG = 0x6A6D
_CODE_BYTES = 16
_HEAD = struct.Struct(f"qq{_CODE_BYTES}s")  # the step, the length, and the code of what follows
_WHAT = struct.Struct("qq")  # the rank whose record it is, and the step, which the code vouches for as well
# What a record may grow by, within an attempt, beyond the longest at its first step.
_HEADROOM_BYTES = 1 << 12
PASSED_BYTES_MAX = 1 << 16  # of a record at that step: it is a part of each step's traffic
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


def key_of_run() -> bytes:
    """The key of the codes of this run's records. Raises RunDirectoryError."""
    secret = RunDirectory(os.environ["JURYMAST_RUN_DIR"]).secret()
    return hmac.digest(secret, b"records of ranks", "sha256")


class Ward:
    """This rank's part: it passes its records on to its keeper, and keeps the last two of its ward."""

    def __init__(self, key: bytes) -> None:
        """`key`: see `key_of_run`."""
        self.rank = -1  # whose records are kept
        self._key = key
        self._own = self._keeper = -1
        self._kept: dict[int, bytes] = {}
        self._works: list[Any] = []
        self._out = self._in = torch.empty(0, dtype=torch.uint8)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._kept)

    def begin(self, rank: int, each: int, sizes: Sequence[int]) -> None:
        """Begin to pass records on in this attempt. `each`: ranks of a node; `sizes`: those of all ranks'
        records in bytes, of all of which it is known that they may be."""
        world, room = len(sizes), max(sizes) + _HEADROOM_BYTES
        self._own, self._keeper, ward = rank, (rank + each) % world, (rank - each) % world
        if ward != self.rank:
            self._kept = {}
        self.rank = ward
        self._out, self._in = _buffer(room), _buffer(room)

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
        self._write(self._out, self._own, step, data)
        self._works = [
            dist.isend(self._out, self._keeper, tag=_TAG), dist.irecv(self._in, self.rank, tag=_TAG),
        ]  # fmt: skip

    def give(self, step: int) -> None:
        """Send the ward's record of `step` back to it."""
        buffer = _buffer(PASSED_BYTES_MAX + _HEADROOM_BYTES)
        self._write(buffer, self.rank, step, self._kept[step])
        dist.send(buffer, self.rank, tag=_TAG)

    def take(self, rank: int, step: int, keeper: int) -> bytes:
        """Receive this rank's own record of `step` from its `keeper`. Raises CheckpointError if what comes is
        none."""
        buffer = _buffer(PASSED_BYTES_MAX + _HEADROOM_BYTES)
        dist.recv(buffer, keeper, tag=_TAG)
        came, data = self._read(buffer, rank)
        if not data or came != step:
            raise CheckpointError(f"rank {keeper} sent no record of rank {rank} after step {step}")
        return data

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
        step, record = self._read(self._in, self.rank)
        if not record:
            return
        self._kept[step] = record
        while len(self._kept) > RECORDS:
            del self._kept[min(self._kept)]

    # ---- what goes over a connection

    def _write(self, buffer: torch.Tensor, rank: int, step: int, data: bytes) -> None:
        """Write the record of `rank`; none, if it does not fit."""
        out = memoryview(buffer.numpy())
        if _HEAD.size + len(data) > len(out):
            data = b""
        _HEAD.pack_into(out, 0, step, len(data), self._code(rank, step, data))
        out[_HEAD.size : _HEAD.size + len(data)] = data

    def _read(self, buffer: torch.Tensor, rank: int) -> tuple[int, bytes]:
        """Return the step and the record of `rank`; b"" if there is none, or not all of it."""
        data = memoryview(buffer.numpy())
        step, size, code = _HEAD.unpack_from(data)
        record = bytes(data[_HEAD.size : _HEAD.size + size]) if size > 0 else b""
        whole = len(record) == size and hmac.compare_digest(code, self._code(rank, step, record))
        return step, record if whole else b""

    def _code(self, rank: int, step: int, data: bytes) -> bytes:
        code = hashlib.blake2b(_WHAT.pack(rank, step), key=self._key, digest_size=_CODE_BYTES)
        code.update(data)
        return code.digest()


def _buffer(room: int) -> torch.Tensor:
    """Memory for a record of up to `room` bytes."""
    return torch.zeros(_HEAD.size + room, dtype=torch.uint8)
