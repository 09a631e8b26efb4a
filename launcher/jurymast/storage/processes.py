"""The agent's side of the storage processes: starts them, gives them orders, and kills them if they hang."""

from __future__ import annotations

import asyncio
import signal

import msgspec

from jurymast.child import Child
from jurymast.core.message import Strange
from jurymast.storage.orders import Answer, AnyOrder, Cancel, StorageFailed, Told, read_answer

# Seconds that an order gets after its limit to give up by itself, and a killed process to end.
GRACE_S = 10.0
GONE_S = 2.0


class StorageProcesses:
    """Carries out orders, at most one per tier at a time. Each tier has its own process, started at its first
    order, so that storage that hangs delays nothing else. All methods are called in the event loop.
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._tiers: dict[str, _Tier] = {}
        self._next_id = 0

    async def carry_out(self, order: AnyOrder) -> Answer:
        """Have `order` carried out, under a new number. Storage errors are answers, and never raised.

        Cancelling the task that awaits this cancels the order, and waits until nothing is written any more.
        """
        tier = self._tiers.setdefault(order.tier, _Tier(order.tier))
        self._next_id += 1
        async with tier.lock:
            numbered = msgspec.structs.replace(order, id=self._next_id)
            return await tier.carry_out(numbered, self._grace_s)

    async def close(self) -> None:
        """End all processes."""
        for tier in self._tiers.values():
            await tier.kill()


class _Tier:
    def __init__(self, name: str) -> None:
        self.lock = asyncio.Lock()
        self._name = name
        self._child: Child | None = None

    async def carry_out(self, order: AnyOrder, grace_s: float) -> Answer:
        """Carry out an order, with the lock held. A process that remains is idle."""
        try:
            child = await self._ready()
        except OSError as error:
            return StorageFailed(why=f"the storage process cannot be started: {error}")
        if child is None:
            return StorageFailed(
                why=f"{self._name} storage still hangs: its killed process has not ended yet"
            )
        work = asyncio.ensure_future(self._talk(child, order))
        try:
            done, _ = await asyncio.wait([work], timeout=order.limit_s + grace_s)
            if not done:
                await self.kill()
                place = getattr(order, "root", "")
                return StorageFailed(
                    why=f"{self._name} storage hangs at {place}: not done within {order.limit_s:.0f} s; "
                    "its process was killed"
                )
            return work.result() or StorageFailed(why=await self._why_ended())
        except asyncio.CancelledError:
            self._tell(child, Cancel(id=order.id))
            done, _ = await asyncio.wait([work], timeout=grace_s)
            if not done:
                await self.kill()
            raise
        finally:
            work.cancel()

    async def _ready(self) -> Child | None:
        """Return a process that takes orders; None while a killed one has not ended."""
        if self._child is not None and self._child.code is None:
            return None if self._child.killed else self._child
        self._child = await Child.start("jurymast.storage")
        return self._child

    async def _talk(self, child: Child, order: AnyOrder) -> Answer | None:
        """Return the order's answer; None if the process ended before it answered."""
        try:
            self._tell(child, order)
            await child.told()
            while line := await child.hear():
                answer = read_answer(line)
                if not isinstance(answer, Strange) and answer.id == order.id:
                    return answer
        except (ConnectionError, ValueError):
            pass
        return None

    @staticmethod
    def _tell(child: Child, told: Told) -> None:
        child.tell(msgspec.json.encode(told))

    async def _why_ended(self) -> str:
        assert self._child is not None
        await self._child.gone(GONE_S)
        await self.kill()
        code = self._child.code
        if code is not None and code < 0:
            return f"the storage process was killed by {signal.Signals(-code).name}"
        return f"the storage process ended with {code}"

    async def kill(self) -> None:
        """Send SIGKILL and wait a moment, but not longer: a process that waits for storage that hangs ends
        only when storage answers."""
        if self._child is not None:
            await self._child.kill(GONE_S)
