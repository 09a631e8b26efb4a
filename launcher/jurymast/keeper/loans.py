"""Images lent to storage processes, for minutes maybe: from a copy where memory allows, so that the slot is
the rank's again as soon as a newer step is safe."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jurymast.core.keeper.copies import Image as Key
from jurymast.core.texts import memory_size
from jurymast.keeper.buffers import Buffer
from jurymast.keeper.manifest import Manifest
from jurymast.keeper.threads import in_thread

if TYPE_CHECKING:
    from jurymast.keeper.keeper import Keeper


@dataclass(frozen=True)
class Loan:
    """A file that begins with the whole image, which stays so until `give_back`."""

    path: str
    manifest: Manifest
    give_back: Callable[[], None]


async def lend(keeper: Keeper, key: Key) -> Loan | None:
    """None when this node has not the whole image."""
    copy = keeper.copies.acquire(key)
    if copy is None:
        return None
    place, size = copy.place, copy.manifest.size_bytes

    def release() -> None:
        keeper.copies.release(copy)

    if not keeper.is_slot(copy) or not isinstance(place, Buffer):
        return Loan(copy.path, copy.manifest, release)
    making = asyncio.ensure_future(
        _copied(keeper, place, size, f"a copy for storage of rank {key[2]}, {memory_size(size)}")
    )

    def give_up(_: object) -> None:
        if not making.cancelled() and making.exception() is None and (made := making.result()) is not None:
            keeper.give_back(made)
        release()

    try:
        buffer = await asyncio.shield(making)
    except BaseException:  # cancelled, maybe: the thread that copies is not, and both buffers are its own
        making.add_done_callback(give_up)
        raise
    if buffer is None:
        return Loan(copy.path, copy.manifest, release)
    release()
    return Loan(buffer.path, copy.manifest, lambda: keeper.give_back(buffer))


async def _copied(keeper: Keeper, source: Buffer, size: int, asked: str) -> Buffer | None:
    """A buffer with the same image, None when there is no memory for one."""
    buffer = await keeper.borrow(size, asked)
    if buffer is None:
        return None
    try:
        await in_thread(buffer.reserve, 0, size)
        await in_thread(_copy, source, buffer, size)
    except OSError:
        keeper.give_back(buffer)
        return None
    except BaseException:
        keeper.give_back(buffer)
        raise
    return buffer


def _copy(source: Buffer, target: Buffer, size: int) -> None:
    """Not by slices: those hold the GIL, and with it the agent's heartbeats."""
    if size:
        first, last = (ctypes.c_char.from_buffer(buffer.map) for buffer in (source, target))
        ctypes.memmove(ctypes.addressof(last), ctypes.addressof(first), size)
