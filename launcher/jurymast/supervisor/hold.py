"""Holds an epoch: shows by a pulse that its supervisor lives, and checks whether another one has taken
over."""

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
    """Holds `epoch`, whose file is in `epochs`. While `silent`, there is no pulse and another supervisor may
    take over."""

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
        """Seconds for which the run directory has not answered; 0.0 if nothing was asked."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    async def taken_over(self) -> None:
        """Wait until another supervisor has taken over."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def _keep(self) -> None:
        """Keep the pulse until another supervisor has taken over. Threads do this, because a shared file
        system that hangs must not stop a recovery. Nor does one that fails: decisions of a superseded
        supervisor reach nobody, because agents listen to the newest that they find."""
        for count in itertools.count():
            self._asked_at = time.monotonic()
            try:
                if await self._newest() > self.epoch:  # checked first, so as not to overwrite a newer pulse
                    log.info("epoch %d: a newer supervisor has taken over", self.epoch)
                    return
                if not self.silent:
                    await asyncio.to_thread(endpoint.pulse, self._epochs, self.epoch, count)
            except OSError as error:
                log.warning("epoch %d: %s", self.epoch, error)
            self._asked_at = None
            await asyncio.sleep(endpoint.PULSE_INTERVAL_S)

    async def is_superseded(self) -> bool:
        """Return whether a newer supervisor exists. Asked before the job is ended, which only the newest may
        do: one that was stopped for a while may have a successor. Waits for the file system, to which the
        outcome is written as well. Raises OSError if it does not answer: then this supervisor ends without
        ending the job, which is left to the process that started it."""
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
        """Return the newest epoch. Raises OSError, also if not even our own epoch is visible: then this is
        another directory, or an outdated view of it."""
        newest = await asyncio.to_thread(endpoint.newest_epoch, self._epochs)
        if newest < self.epoch:
            raise OSError(f"{self._epochs} does not show epoch {self.epoch}")
        return newest
