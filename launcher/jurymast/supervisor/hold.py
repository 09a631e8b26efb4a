"""Holding an epoch: the pulse that shows that its supervisor lives, and the check whether another one has
taken over."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from pathlib import Path

from jurymast.wire import endpoint

log = logging.getLogger("jurymast.supervisor")

RETRY_S = 0.5
ANSWER_LIMIT_S = 600.0


class Hold:
    """Of `epoch`, whose file is in `epochs`. While `silent` there is no pulse, and another may take over."""

    def __init__(self, epochs: Path, epoch: int) -> None:
        self.epoch = epoch
        self.silent = False
        self._asked_at: float | None = None
        self._epochs = epochs
        self._keeping: asyncio.Future[None] | None = None

    def begin(self) -> None:
        self._keeping = asyncio.ensure_future(self._keep())

    @property
    def waits_s(self) -> float:
        """How long the run directory has owed an answer; 0.0: it owes none."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    async def taken_over(self) -> None:
        """Returns when another supervisor has taken over."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def _keep(self) -> None:
        """Until another supervisor has taken over. On threads: a shared file system that hangs must not stop
        the recovery. One that fails does not either: what a superseded supervisor decides reaches nobody,
        for agents listen to the newest that they find."""
        for count in itertools.count():
            self._asked_at = time.monotonic()
            try:
                if await self._newest() > self.epoch:  # first: a newer one's pulse is not to be written over
                    log.info("epoch %d: a newer supervisor has taken over", self.epoch)
                    return
                if not self.silent:
                    await asyncio.to_thread(endpoint.pulse, self._epochs, self.epoch, count)
            except OSError as error:
                log.warning("epoch %d: %s", self.epoch, error)
            self._asked_at = None
            await asyncio.sleep(endpoint.PULSE_INTERVAL_S)

    async def is_superseded(self) -> bool:
        """Before the job's end, which is for the newest supervisor alone to bring about: one that was stopped
        for a while may have a successor. Waits for the file system: what comes next is written there, too.
        Raises OSError when it does not come back: then this one ends without having ended anything, and who
        started it sees to the rest."""
        end = time.monotonic() + ANSWER_LIMIT_S
        while True:
            try:
                return await self._newest() > self.epoch
            except OSError as error:
                log.warning("epoch %d: cannot find out whether it is the newest: %s", self.epoch, error)
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _newest(self) -> int:
        """Raises OSError also when not even the own epoch is seen: that is another directory, or an old view
        of this one."""
        newest = await asyncio.to_thread(endpoint.newest_epoch, self._epochs)
        if newest < self.epoch:
            raise OSError(f"{self._epochs} does not show epoch {self.epoch}")
        return newest
