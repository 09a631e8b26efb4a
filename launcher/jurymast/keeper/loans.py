"""Images lent to storage processes, perhaps for minutes. If memory allows, a copy is lent, so that the
rank gets its slot back as soon as a newer step is safe."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jurymast.core.keeper.copies import Image as Key
from jurymast.core.texts import memory_size
from jurymast.keeper.copies import StoredCopy
from jurymast.keeper.manifest import Manifest
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.threads import in_thread

if TYPE_CHECKING:
    from jurymast.keeper.keeper import Keeper


@dataclass(frozen=True)
class Loan:
    """Files that do not change until `give_back`. One file begins with the image. If it has only the image's
    own part, at the same offset, the file at `common_path` begins with the common part."""

    path: str
    manifest: Manifest
    give_back: Callable[[], None]
    common_path: str = ""


@dataclass(frozen=True)
class _File:
    path: str
    give_back: Callable[[], None]


async def lend(keeper: Keeper, key: Key) -> Loan | None:
    """Lend an image; None if this node does not have all of it."""
    copies = keeper.copies.acquire_image(key)
    if not copies:
        return None
    manifest, files = copies[-1].manifest, list[_File]()

    def give_back() -> None:
        for file in files:
            file.give_back()

    try:
        while copies:
            files.append(await _lend(keeper, copies.pop(0)))
    except BaseException:
        give_back()
        for copy in copies:
            keeper.copies.release(copy)
        raise
    *common, own = files
    return Loan(own.path, manifest, give_back, common[0].path if common else "")


async def _lend(keeper: Keeper, copy: StoredCopy) -> _File:
    """Lend this copy, of which we are a reader until it is given back, or a copy of it."""
    place, size = copy.place, copy.manifest.size_bytes

    def release() -> None:
        keeper.copies.release(copy)

    if not keeper.is_slot(copy) or not isinstance(place, MappedBuffer):
        return _File(copy.path, release)
    asked = f"a copy for storage of rank {copy.image[2]}, {memory_size(size)}"
    making = asyncio.ensure_future(_copied(keeper, place, size, asked))

    def give_up(_: object) -> None:
        if not making.cancelled() and making.exception() is None and (made := making.result()) is not None:
            keeper.give_back(made)
        release()

    try:
        buffer = await asyncio.shield(making)
    except BaseException:  # for example cancelled: the copying thread goes on, and still needs both buffers
        making.add_done_callback(give_up)
        raise
    if buffer is None:
        return _File(copy.path, release)
    release()
    return _File(buffer.path, lambda: keeper.give_back(buffer))


async def _copied(keeper: Keeper, source: MappedBuffer, size: int, asked: str) -> MappedBuffer | None:
    """Copy the image to a new buffer; None if there is no memory for it."""
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


def _copy(source: MappedBuffer, target: MappedBuffer, size: int) -> None:
    """Copy the bytes; not through slices, which would hold the GIL and delay the agent's heartbeats."""
    if size:
        first, last = (ctypes.c_char.from_buffer(buffer.map) for buffer in (source, target))
        ctypes.memmove(ctypes.addressof(last), ctypes.addressof(first), size)
