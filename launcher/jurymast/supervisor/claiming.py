"""How a run takes a node that waits in the pool: one that suits it, which no other run has taken, and which
answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from jurymast.core.judges.pool import PoolMember, PoolNeed, best
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import JurymastError, SubmissionError

log = logging.getLogger("jurymast.supervisor")

# A member that has not answered by then hangs, or its node is lost and Slurm knows nothing of it (seconds).
ANSWER_LIMIT_S, LOOK_S = 5.0, 0.05


class PoolAccess(Protocol):
    """What a run can do with its pool. All raises JurymastError."""

    def now(self) -> float:
        """Unix time."""

    async def need(self) -> PoolNeed: ...
    async def waiting(self) -> Sequence[PoolMember]: ...

    async def take(self, job: str) -> bool:
        """Take this member; False: another run has."""

    async def tell(self, member: PoolMember) -> None:
        """Tell it what it is for."""

    async def answered(self, job: str) -> bool: ...

    async def withdraw(self, job: str) -> bool:
        """Tell it otherwise; False: it has answered in the meantime."""

    async def end(self, job: str) -> None:
        """End its job."""


class Taking:
    """Takes nodes of a pool for a run. After one that does not answer, the next is Slurm's."""

    def __init__(self) -> None:
        self.answers = True

    async def take(self, pool: PoolAccess, number: int) -> SmallJob | None:
        """Small job `number` of the run from now on; None if the run has to ask Slurm for it. Raises
        SubmissionError for one that does not answer."""
        self.answers, answers = True, self.answers
        if not answers:
            return None
        try:
            return await claim(pool, number)
        except SubmissionError:
            self.answers = False
            raise
        except JurymastError as error:
            log.warning("pool: %s", error)
            return None


async def claim(pool: PoolAccess, number: int) -> SmallJob | None:
    """A member that is small job `number` of the run from now on; None if none suits it. Raises
    SubmissionError if the one that it took does not answer, and other JurymastErrors before it takes one."""
    waiting = [*await pool.waiting()]
    need = await pool.need() if waiting else None
    while need is not None and (member := best(waiting, need, pool.now())) is not None:
        waiting.remove(member)
        if not await pool.take(member.job):
            continue
        if why := await _why_lost(pool, member):
            raise SubmissionError(f"{member.node}, which waited in the pool as job {member.job}: {why}")
        return SmallJob(number, member.job, member.node)
    return None


async def _why_lost(pool: PoolAccess, member: PoolMember) -> str:
    """Why the run does not get the member that it took; "" if it does. Whatever is wrong now, that member may
    still come as this small job: no other can have its number."""
    try:
        await pool.tell(member)
        if await _answers(pool, member.job):
            return ""
        await pool.end(member.job)
    except JurymastError as error:
        return str(error)
    return f"no answer in {ANSWER_LIMIT_S:.0f} s"


async def _answers(pool: PoolAccess, job: str) -> bool:
    loop = asyncio.get_running_loop()
    limit = loop.time() + ANSWER_LIMIT_S
    while not await pool.answered(job):
        if loop.time() > limit:
            return not await pool.withdraw(job)
        await asyncio.sleep(LOOK_S)
    return True
