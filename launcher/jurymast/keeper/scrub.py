"""Reading again what is held: a bit that has flipped in memory is found before somebody needs the copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from jurymast.keeper.buffers import Buffer
from jurymast.keeper.copies import Copies, Copy, blocks_of, is_intact
from jurymast.keeper.threads import in_thread

EVERY_S = 600.0
LOOK_S = 1.0
# Of one core.
SHARE = 0.1

Distrust = Callable[[Copy, str], None]
now = time.monotonic


async def forever(copies: Copies, distrust: Distrust, every_s: float = EVERY_S) -> None:
    """Each copy in memory once in `every_s`, one after another."""
    while True:
        due = [one for one in copies if isinstance(one.place, Buffer) and one.verified_at + every_s < now()]
        if due:
            await read_again(copies, min(due, key=lambda one: one.verified_at), distrust, SHARE)
        else:
            await asyncio.sleep(min(LOOK_S, every_s))


async def read_again(copies: Copies, copy: Copy, distrust: Distrust, share: float = 1.0) -> None:
    """Hash a copy again, using `share` of a core; `distrust` it at the first block that is wrong.

    It is a reader for a block at a time only: a slot that becomes free does not wait for this.
    """
    buffer = copy.place
    if not isinstance(buffer, Buffer):
        return
    for block in blocks_of(copy.manifest, copy.part):
        started = now()
        if not copies.read(copy):
            return
        try:
            good = await in_thread(is_intact, buffer.view(0, copy.manifest.size_bytes), block)
        finally:
            copies.release(copy)
        if not good:
            distrust(copy, f"the block at {block.at} of the {block.part} part is corrupt in memory")
            return
        await asyncio.sleep((now() - started) * (1 / share - 1))
    copy.verified_at = now()
