"""The agent's part in checkpoints: it carries out the supervisor's orders to write images to storage.
`core.agent.machine` decides about the writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jurymast import background
from jurymast.agent.io import Phases, StorageAccess
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import WritePhase
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.storage.orders import Answer, Done, StorageFailed


class Keeping:
    """The node's writes. `tell` sends the supervisor a message; `write_reached` is called with a write's id
    and the phase whose end it has reached, `write_ended` at the end of each write, with its id."""

    def __init__(
        self,
        keeper: Keeper,
        storage: StorageAccess,
        tell: Callable[[msg.AboutCheckpoints], None],
        write_reached: Callable[[str, WritePhase], None],
        write_ended: Callable[[str], None],
    ) -> None:
        self._keeper, self._storage, self._tell = keeper, storage, tell
        self._write_reached, self._write_ended = write_reached, write_ended
        self._writes: dict[str, asyncio.Task[None]] = {}
        self._phases: dict[str, Phases] = {}  # of these

    def write(self, order: msg.Write) -> None:
        phases = self._phases[order.id] = Phases(
            lambda phase: self._write_reached(order.id, phase),
            lambda size: self._tell(msg.WriteProgress(id=order.id, size_bytes=size)),
        )
        task = self._writes[order.id] = background.start(self._write(order, phases))
        task.add_done_callback(lambda _: self._ended(order.id))

    def continue_write(self, order: msg.ContinueWrite) -> None:
        self._phases[order.id].turns.put_nowait(order)

    def cancel_write(self, id: str) -> None:
        self._writes[id].cancel()

    def _ended(self, id: str) -> None:
        del self._writes[id], self._phases[id]
        self._write_ended(id)

    async def _write(self, order: msg.Write, phases: Phases) -> None:
        """Write images of this node to a tier, and report the result in any case: the supervisor waits for
        it."""
        answer: Answer
        try:
            answer = await self._written(order, phases)
        except Exception as error:
            background.logged(error)
            answer = StorageFailed(why=f"unexpected {type(error).__name__}: {error}")
        size_bytes, why = (answer.bytes, "") if isinstance(answer, Done) else (0, answer.why)
        ok, gone = isinstance(answer, Done), isinstance(answer, StorageFailed) and answer.gone
        self._tell(
            msg.Written(id=order.id, tier=order.tier, ok=ok, size_bytes=size_bytes, why=why, gone=gone)
        )

    async def _written(self, order: msg.Write, phases: Phases) -> Answer:
        loans: list[Loan] = []
        try:
            for rank in order.ranks:
                loan = await self._keeper.lend(order.step, order.attempt, rank)
                if loan is None:
                    return StorageFailed(why=f"the image of rank {rank} is no longer here", gone=True)
                loans.append(loan)
            answer = await self._storage.write(order, loans, phases)
            for loan in loans:
                if isinstance(answer, StorageFailed) and answer.damaged == loan.manifest.rank:
                    loan.doubt()
            return answer
        finally:
            for loan in loans:
                loan.give_back()

    async def close(self) -> None:
        running = [*self._writes.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
