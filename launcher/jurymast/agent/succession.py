"""When the supervisor's node dies: one of the agents starts the next supervisor, on its own node."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

from jurymast.core.settings import RunPlan
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint

# The batch process restarts a supervisor that merely crashed well before this.
PATIENCE_S = 2.0
# Agents try one after the other, in the allocation's order; the claim of an epoch settles a tie.
STAGGER_S = 2.0
PLACE_UNKNOWN = 10
LOOK_S = 0.25
# Who is late in the order looks seldom: thousands that all looked so often would keep the storage busy.
LOOK_SHARE = 0.1


class Succession:
    """One agent's part in it. A node that is merely cut off must not take over: as long as the supervisor's
    pulse changes in the run directory, it lives, and others hear it."""

    def __init__(self, directory: RunDirectory, plan: RunPlan, node: str, nodes: Sequence[str]) -> None:
        """`nodes`: all of the allocation, in its order."""
        self._directory = directory
        self._enabled = plan.cluster == "slurm"  # locally the batch process cannot die alone
        self._node = node
        place = nodes.index(node) if node in nodes else PLACE_UNKNOWN
        self._patience_s = PATIENCE_S + STAGGER_S * place
        self._look_s = max(LOOK_S, LOOK_SHARE * STAGGER_S * place)
        self._look_at = 0.0
        self._pulse = ""
        self._quiet_since: float | None = None
        self._child: asyncio.subprocess.Process | None = None

    async def watch(self, answered: Callable[[], bool]) -> None:
        """For ever: while `answered` is False, see whether anybody supervises. Before a supervisor was there
        at all it is the batch process's to bring one up."""
        met = False
        while self._enabled:
            await asyncio.sleep(LOOK_S)
            if answered():
                self._quiet_since, met = None, True
            elif not met:
                continue
            elif time.monotonic() >= self._look_at and not self._supervises():
                self._look_at = time.monotonic() + self._look_s
                await self._consider()

    def _supervises(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def _consider(self) -> None:
        try:
            pulse = await asyncio.to_thread(endpoint.read_pulse, self._directory.epochs)
        except OSError:
            return
        now = time.monotonic()
        if self._quiet_since is None or pulse != self._pulse:
            self._pulse, self._quiet_since = pulse, now
        elif now - self._quiet_since > self._patience_s:
            await self._take_over()

    async def _take_over(self) -> None:
        self._quiet_since = None
        print(f"{self._node}: no supervisor answers, starting one here", flush=True)
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jurymast.supervisor", str(self._directory.root), "--takeover", self._node,
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def wait(self) -> None:
        """The supervisor that was started here ends the job after its last agent has left."""
        if self._child is not None:
            await self._child.wait()
