"""Memory for slots, when ranks ask for it, and for copies that are read for long."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import LOCAL
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import Holding
from jurymast.core.keeper.memory import Buffer, BufferPool, Do
from jurymast.core.keeper.slots import RankSlots
from jurymast.core.texts import memory_size


class Growth:
    """Provides two slots of the size that a rank wants, or those that are missing."""

    def __init__(
        self,
        do: Do,
        memory: BufferPool,
        holding: Holding,
        ranks: Sequence[RankSlots],
        mine: RankSlots,
        want: int,
    ) -> None:
        self._do, self._memory, self._holding = do, memory, holding
        self._mine, self._want, self._attempt = mine, want, holding.attempt
        self.fresh: list[Buffer] = []  # not reserved yet
        self.ready: list[Buffer] = []
        active = [one for one in ranks if one.rank >= 0]
        # Includes what the others will need as well: it is better to refuse now than half-way.
        unserved = [one for one in active if one is not mine and not one.growing and one.lacking(1)]
        also = sum(len(one.lacking(1)) for one in unserved) * want
        each = f" for each of {len(active)} ranks" if len(active) > 1 else ""
        asked = f"two slots of {memory_size(want)}{each}{self._besides()}"
        mine.growing = True
        memory.claim(self, asked, len(mine.lacking(want)), want, also=also)

    def _besides(self) -> str:
        buffers = (self._holding.buffer_of(c) for c in self._holding.copies.values() if c.tier != LOCAL)
        held = sum(one.allocated for one in buffers if one is not None)
        return f" (besides {memory_size(held)} of checkpoints held here)" if held else ""

    def granted(self, buffers: list[Buffer]) -> None:
        self.fresh = buffers
        self._holding.busy |= set(buffers)
        self._next()

    def _next(self) -> None:
        if self.fresh:
            self._memory.reserve(self.fresh[0], self)
            return
        if self._attempt == self._holding.attempt:
            for slot in self._mine.lacking(self._want):
                if self.ready:
                    old, slot.following = slot.following, self.ready.pop()
                    self._holding.busy.discard(slot.following)
                    if old is not None:
                        self._holding.leave(old)
                    self._holding.settle(slot)
        self._over()

    def reserved(self, buffer: Buffer, why: str) -> None:
        self.fresh.remove(buffer)
        self.ready.append(buffer)
        if why:
            self.refused(why)
        else:
            self._next()

    def refused(self, why: str) -> None:
        if self._attempt == self._holding.attempt:
            self._mine.refused = self._want
            self._do(do.Refuse(self._mine.local))
        self._do(do.Tell(msg.Refused(why=f"{why}. Until then all ranks save to shared storage")))
        self._over()

    def _over(self) -> None:
        self._mine.growing = False
        for buffer in (*self.fresh, *self.ready):
            self._holding.release(buffer)
        self.fresh, self.ready = [], []


class LoanGrowth:
    """Provides a buffer for a copy of an image that will be read for long."""

    def __init__(
        self, do: Do, holding: Holding, memory: BufferPool, number: int, size: int, asked: str
    ) -> None:
        self._do, self._holding, self._number = do, holding, number
        memory.claim(self, asked, 1, size, (0, size))

    def granted(self, buffers: list[Buffer]) -> None:
        self._holding.busy |= set(buffers)
        self._do(do.Lend(self._number, buffers[0].number))

    def refused(self, why: str) -> None:
        self._do(do.Lend(self._number, 0, why))
