"""The agent's part in replacing a supervisor whose node died: it reads the pulse, and runs a standby process
and the next supervisor on this node, when `core.agent.succession` decides so."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import suppress

from jurymast.agent.driver import Driver
from jurymast.core.agent import effects as do
from jurymast.errors import never
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint

log = logging.getLogger("jurymast.agent")

Effect = do.ReadPulse | do.StandBy | do.EndStandby | do.StartSupervisor
Process = asyncio.subprocess.Process


class Succeeding:
    def __init__(self, directory: RunDirectory, node: str, driver: Driver) -> None:
        self._directory = directory
        self._node = node
        self._driver = driver
        self._machine = driver.machine
        self._standby: asyncio.Task[Process] | None = None
        self._supervisor: Process | None = None

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case do.ReadPulse():
                self._driver.spawn(self._read_pulse())
            case do.StandBy():
                self._standby = asyncio.ensure_future(self._stand_by())
            case do.EndStandby():
                self._driver.spawn(self._dismiss(), vital=False)
            case do.StartSupervisor():
                log.info("no supervisor answers: starting one here")
                self._driver.spawn(self._supervise(effect))
            case _:
                never(effect)

    async def close(self) -> None:
        """End the standby process, and wait for a supervisor on this node, which ends the job after its last
        agent has left."""
        await self._dismiss()
        if self._supervisor is not None:
            await self._supervisor.wait()

    async def _read_pulse(self) -> None:
        try:
            pulse: str | None = await asyncio.to_thread(endpoint.read_pulse, self._directory.epochs)
        except OSError:
            pulse = None
        self._driver.act(self._machine.pulse(pulse, self._driver.now))

    async def _stand_by(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jurymast.supervisor.standby", str(self._directory.root), self._node,
            stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def _dismiss(self) -> None:
        """End the standby process by closing its input."""
        starting, self._standby = self._standby, None
        if starting is not None:
            with suppress(OSError):  # it could not be started
                process = await starting
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()

    async def _supervise(self, start: do.StartSupervisor) -> None:
        self._supervisor = await self._call(start) or await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jurymast.supervisor", str(self._directory.root), "--takeover", self._node,
            "--after", str(start.after), "--silent-since", f"{time.monotonic() - start.silent_s:.3f}",
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await self._supervisor.wait()
        self._driver.act(self._machine.supervisor_ended(self._driver.now))

    async def _call(self, start: do.StartSupervisor) -> Process | None:
        """Start the takeover in the standby process, and return the process; None if there is none."""
        starting, self._standby = self._standby, None
        if starting is None:
            return None
        try:
            process = await starting
            assert process.stdin is not None
            process.stdin.write(f"{start.after} {time.monotonic() - start.silent_s:.3f}\n".encode())
            await process.stdin.drain()
        except OSError:
            return None
        return process if process.returncode is None else None
