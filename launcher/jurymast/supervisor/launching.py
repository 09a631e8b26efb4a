"""Carries a decided launch out: fences earlier attempts off, waits as `core.launching` says, tells nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jurymast.core import events as ev
from jurymast.core import launching
from jurymast.core import messages as msg
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.copies import SHARED
from jurymast.core.effects import Effect, Record, Send
from jurymast.core.instructions import Launch
from jurymast.core.nodes.watch import WATCH_INTERVAL_S, Watch
from jurymast.core.state import Phase, RunState
from jurymast.rundir import RunDirectory, write_atomically

# Of so many nodes one may look in a second whether all of them are there.
LOOKS_A_SECOND = 10_000.0
# So many nodes are told of a launch before others have their turn.
AT_ONCE = 64


class Launching:
    """`here` maps the nodes whose agents are connected. `do` carries effects out."""

    def __init__(
        self, directory: RunDirectory, state: RunState, here: Mapping[str, Any], watch: Watch,
        checkpoints: Checkpoints, do: Callable[[Sequence[Effect]], None], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._directory, self._state, self._here = directory, state, here
        self._watch, self._checkpoints, self._do, self._now = watch, checkpoints, do, now
        self._launch: Launch | None = None  # that nodes are being told of
        self._fencing = threading.Lock()
        self._fenced = 0

    async def carry_out(self, launch: Launch) -> None:
        self._launch = None
        if not await self._may_go(launch):
            return
        self._do(self._checkpoints.choose(launch, self._now()))
        self._launch = launch
        for rank, node in enumerate(launch.placement):
            if not rank % AT_ONCE and not await self._still_due(launch):
                return
            self._do([Send(node, self._message(launch, rank))])

    def tell_again(self, node: str, attempt: int) -> None:
        """A placed node, whose newest attempt is this one, may not have been told."""
        launch = self._launch
        if launch is not None and self._is_due(launch) and attempt < launch.attempt:
            self._do([Send(node, self._message(launch, self._state.places[node]))])

    async def _may_go(self, launch: Launch) -> bool:
        """False when it is not wanted any more. On a thread: storage may hang."""
        fenced = asyncio.ensure_future(asyncio.to_thread(self._fence, launch))
        since = told_at = time.monotonic()
        while self._is_due(launch):
            unfenced = "" if fenced.done() else str(self._directory.root)
            what = launching.waits_for(
                launch.placement, self._here, self._watch.away(), self._checkpoints.copies, unfenced
            )
            if not what:
                break
            if time.monotonic() > told_at + launching.WAIT_TOLD_S:
                told_at = time.monotonic()
                waited_s = round(told_at - since, 3)
                waits = ev.LaunchWaits(t=self._now(), attempt=launch.attempt, what=what, seconds=waited_s)
                self._do([Record(waits)])
            if unfenced:
                await asyncio.wait([fenced], timeout=WATCH_INTERVAL_S)
            else:
                await asyncio.sleep(max(WATCH_INTERVAL_S, len(self._state.nodes) / LOOKS_A_SECOND))
        error = fenced.result() if fenced.done() else None
        if error is not None:  # no checkpoint can be saved now, but training can go on
            why = f"cannot write {self._directory.attempt_file}: {error}"
            self._do([Record(ev.Noted(t=self._now(), message=why))])
        return self._is_due(launch)

    def _fence(self, launch: Launch) -> OSError | None:
        """What hung is not to put an older attempt's number over a newer one's."""
        with self._fencing:
            if launch.attempt <= self._fenced:
                return None
            try:
                number = str(launch.attempt).encode()
                write_atomically(self._directory.attempt_file, number, durable=False)
            except OSError as error:
                return error
            self._fenced = launch.attempt
            return None

    async def _still_due(self, launch: Launch) -> bool:
        """Others have their turn meanwhile."""
        await asyncio.sleep(0)
        return self._is_due(launch)

    def _is_due(self, launch: Launch) -> bool:
        return (self._state.attempt, self._state.phase) == (launch.attempt, Phase.LAUNCHING)

    def _message(self, launch: Launch, rank: int) -> msg.Launch:
        """For the node with group rank `rank`; what it restores was chosen."""
        count = self._state.ranks_per_node
        ranks = range(rank * count, (rank + 1) * count)
        return msg.Launch(
            attempt=launch.attempt, rank=rank, world=len(launch.placement),
            master_address=launch.master_address, master_port=launch.master_port,
            mtbf_s=launch.mtbf_s, cold=bool(self._state.cold), saved=self._state.saved_on(SHARED),
            restore=self._checkpoints.restore_message(launch.placement[rank], ranks),
        )  # fmt: skip
