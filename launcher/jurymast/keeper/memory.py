"""The memory that this node gives: within its limits, touched off the training's path, and used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jurymast.core.checkpoints.foresight import Room
from jurymast.keeper.buffers import Buffer, round_up
from jurymast.keeper.limits import Refused
from jurymast.keeper.threads import in_thread


class Memory:
    """Buffers in use belong to whoever took them; those given back wait here for the next who asks, because
    the first touch of new memory is ten times slower than a copy into old. For the agent's loop only."""

    def __init__(self, room: Callable[[], Room]) -> None:
        self.room = room
        self._spares: list[Buffer] = []
        self._reserving: dict[Buffer, tuple[int, int]] = {}
        self._asking = asyncio.Lock()

    async def take(
        self, count: int, capacity: int, asked: str, *, extent: tuple[int, int] | None = None, also: int = 0
    ) -> list[Buffer]:
        """`count` buffers in which `extent` (by default all) will be reserved: the caller awaits `reserve`
        for each. `also`: bytes that must be free besides. Raises Refused, saying what was `asked`.
        """
        capacity = round_up(capacity)
        start, end = extent or (0, capacity)
        async with self._asking:
            # A much larger one would be wasted here.
            fitting = [one for one in self._spares if capacity <= one.capacity <= 2 * capacity]
            taken = sorted(fitting, key=lambda one: one.capacity)[:count]
            for buffer in taken:
                self._spares.remove(buffer)
            need = also + count * (end - start) - sum(min(one.allocated, end - start) for one in taken)
            try:
                await self._ask(need, asked)
                made = [Buffer(capacity) for _ in range(count - len(taken))]
            except (Refused, OSError) as error:
                self._spares.extend(taken)
                raise self._refused(asked, error) from error
            for buffer in (*taken, *made):
                self._reserving[buffer] = (start, end)
        return taken + made

    async def reserve(self, buffer: Buffer, extent: tuple[int, int] | None = None) -> None:
        """Take and touch the memory itself. Raises Refused; `buffer` stays the caller's in any case."""
        start, end = extent or (0, buffer.capacity)
        try:
            await in_thread(buffer.reserve, start, end)
        except OSError as error:
            raise self._refused("a buffer that was granted", error) from error
        finally:
            self._reserving.pop(buffer, None)

    def give_back(self, buffer: Buffer, keep: int) -> None:
        """Nobody uses it any more. At most `keep` buffers wait for the next who asks, the newest ones."""
        self._reserving.pop(buffer, None)
        self._spares.append(buffer)
        while len(self._spares) > keep:
            self._spares.pop(0).close()

    def close(self) -> None:
        while self._spares:
            self._spares.pop().close()

    async def _ask(self, need: int, asked: str) -> None:
        if need <= 0:
            return
        for last in (False, True):
            room = await in_thread(self.room)
            free = room.free - self._promised()
            if need <= free:
                return
            if last or not self._spares:
                raise Refused(asked, Room(max(0, free), room.limit))
            self.close()  # what nobody uses goes first

    @property
    def idle_bytes(self) -> int:
        """Of buffers that nobody uses."""
        return sum(one.allocated for one in self._spares)

    def _promised(self) -> int:
        """Granted, and not yet seen by the limits."""
        return sum(max(0, end - start - one.allocated) for one, (start, end) in self._reserving.items())

    def _refused(self, asked: str, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        return Refused(asked, Room(0, f"the kernel: {error}"))
