"""The agent's side of supervision. It connects to a supervisor as `core.agent.link` decides. When the
supervisor's node has died, it runs the next supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from jurymast import background
from jurymast.agent.driver import Driver
from jurymast.agent.io import AgentIo, OrderChannel, Standby
from jurymast.core.agent import effects as do
from jurymast.core.state import messages as msg
from jurymast.core.state.message import Strangers
from jurymast.errors import never

# ---- the connection

CONNECT_LIMIT_S = 1.5
# A failure that comes sooner counts as a refusal.
REFUSED_S = 0.5
FIND_LIMIT_S = 2.0


class Connecting:
    """The agent's connection."""

    def __init__(self, io: AgentIo, driver: Driver, strangers: Strangers) -> None:
        self._io = io
        self._driver = driver
        self._machine = driver.machine
        self._strangers = strangers
        self._channel: OrderChannel | None = None
        self._listening: asyncio.Task[None] | None = None
        self._tries: set[asyncio.Task[None]] = set()

    def send(self, message: msg.ToSupervisor | msg.Beat) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def connect(self, targets: tuple[tuple[str, int], ...]) -> None:
        self._try(self._connect(targets))

    def find(self) -> None:
        self._try(self._find())

    def give_up_tries(self) -> None:
        """Cancel all other tries, because there is a connection."""
        for task in self._tries - {asyncio.current_task()}:
            task.cancel()

    def hang_up(self) -> None:
        connection, self._channel = self._channel, None
        listening, self._listening = self._listening, None
        if connection is not None:
            connection.close()
            self._strangers.left(connection.peer_address)
        if listening is not None and listening is not asyncio.current_task():
            listening.cancel()

    def _try(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._driver.spawn(work)
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _connect(self, targets: tuple[tuple[str, int], ...]) -> None:
        began = self._driver.now
        found = await self._io.connect(targets, CONNECT_LIMIT_S)
        if found is None:
            now = self._driver.now
            refused = now < began + REFUSED_S
            self._driver.act(self._machine.on_supervisor_unreached(now, refused=refused))
        elif self._channel is not None:  # another try was first
            found.close()
        else:
            self._channel = found
            self._io.connected(found)
            self._driver.act(self._machine.on_connected(self._driver.now))
            self._listening = self._driver.spawn(self._listen(found))

    async def _find(self) -> None:
        try:
            place, attempt = await asyncio.wait_for(self._io.find(), FIND_LIMIT_S)
        except asyncio.TimeoutError:
            place = attempt = None
        self._driver.act(self._machine.on_supervisor_found(place, self._driver.now, attempt=attempt))

    async def _listen(self, connection: OrderChannel) -> None:
        await connection.listen(partial(self._hear, connection.peer_address))
        self.hang_up()
        self._driver.act(self._machine.on_connection_lost(self._driver.now))

    def _hear(self, sender: str, order: msg.Order) -> None:
        if isinstance(order, msg.Unreadable):
            self._strangers.heard(sender, order)
        self._driver.act(self._machine.on_order(order, self._driver.now))


# ---- the next supervisor

log = logging.getLogger("jurymast.agent")


class SuccessionDriver:
    def __init__(self, io: AgentIo, driver: Driver) -> None:
        self._io = io
        self._driver = driver
        self._machine = driver.machine
        self._standby: asyncio.Task[Standby] | None = None
        self._supervisor: Standby | None = None

    def carry_out(self, effect: do.ForSuccession) -> None:
        match effect:
            case do.ReadPulse():
                self._driver.spawn(self._read_pulse())
            case do.StandBy():
                self._standby = background.start(self._io.stand_by(), background.to_its_awaiter)
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
        pulse = await self._io.read_pulse()
        self._driver.act(self._machine.on_pulse(pulse, self._driver.now))

    async def _dismiss(self) -> None:
        starting, self._standby = self._standby, None
        if starting is not None:
            with suppress(OSError):  # it could not be started
                await (await starting).dismiss()

    async def _supervise(self, start: do.StartSupervisor) -> None:
        """Start the takeover in the standby process, or in a new one if there is none."""
        standby, self._standby = self._standby, None
        if standby is not None:
            try:
                await self._begin(standby, start)
            except OSError:  # it has ended, or could not be started
                self._supervisor = None
        if self._supervisor is None or self._supervisor.ended:
            await self._begin(self._io.stand_by(), start)
        assert self._supervisor is not None
        await self._supervisor.wait()
        self._driver.act(self._machine.on_supervisor_ended(self._driver.now))

    async def _begin(self, starting: Awaitable[Standby], start: do.StartSupervisor) -> None:
        self._supervisor = await starting
        await self._supervisor.begin(start)
