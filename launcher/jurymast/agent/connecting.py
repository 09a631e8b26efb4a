"""How the agent gets a connection to a supervisor, and hears it. When it tries, whom, and when it hangs up is
decided in `core.agent.link`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.agent.effects import Effect
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.message import Strange
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.strangers import Strangers

CONNECT_LIMIT_S = 1.5
FIND_LIMIT_S = 2.0


class Connecting:
    """What `machine` makes of what happens here goes to `act`; `spawn` starts a task. `address`: of this node
    on the way to the supervisor, "" before the first."""

    def __init__(
        self,
        directory: RunDirectory,
        machine: AgentMachine,
        act: Callable[[list[Effect]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        strangers: Strangers,
    ) -> None:
        self._epochs = directory.epochs
        self._secret = directory.secret()
        self._machine = machine
        self._act = act
        self._spawn = spawn
        self._strangers = strangers
        self._channel: Channel[msg.Order] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._tries: set[asyncio.Task[None]] = set()
        self.address = ""

    def send(self, message: msg.ToSupervisor | msg.Beat) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def connect(self, targets: tuple[tuple[str, int], ...]) -> None:
        self._try(self._connect(targets))

    def find(self) -> None:
        self._try(self._find())

    def give_up_tries(self) -> None:
        """All others: there is a connection."""
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
        task = self._spawn(work)
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _connect(self, targets: tuple[tuple[str, int], ...]) -> None:
        found = await channel.connect_any(targets, self._secret, msg.read_order, CONNECT_LIMIT_S)
        if found is None:
            self._act(self._machine.unreached(time.monotonic()))
        elif self._channel is not None:  # another one was first
            found.close()
        else:
            self._channel, self.address = found, found.local_address
            self._act(self._machine.connected(time.monotonic()))
            self._listening = self._spawn(self._listen(found))

    async def _find(self) -> None:
        try:
            look = asyncio.to_thread(endpoint.find, self._epochs)
            found = await asyncio.wait_for(look, FIND_LIMIT_S)
        except (OSError, asyncio.TimeoutError):
            found = None
        self._act(self._machine.found(found, time.monotonic()))

    async def _listen(self, connection: Channel[msg.Order]) -> None:
        await connection.listen(partial(self._hear, connection.peer_address))
        self.hang_up()
        self._act(self._machine.lost(time.monotonic()))

    def _hear(self, sender: str, order: msg.Order) -> None:
        if isinstance(order, Strange):
            self._strangers.heard(sender, order)
        self._act(self._machine.heard(order, time.monotonic()))
