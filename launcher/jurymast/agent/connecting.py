"""Connects the agent to a supervisor and receives its messages. `core.agent.link` decides when to connect, to
which supervisor, and when to hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from jurymast.agent.driver import Driver
from jurymast.core import messages as msg
from jurymast.core.message import Strange
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.addresses import is_up
from jurymast.wire.channel import Channel
from jurymast.wire.strangers import Strangers

CONNECT_LIMIT_S = 1.5
# A failure that comes sooner counts as a refusal.
REFUSED_S = 0.5
FIND_LIMIT_S = 2.0


class Connecting:
    """The agent's connection. `address` is this node's address on the way to the supervisor, "" before the
    first connection."""

    def __init__(self, directory: RunDirectory, driver: Driver, strangers: Strangers) -> None:
        self._epochs = directory.epochs
        self._secret = directory.secret()
        self._driver = driver
        self._machine = driver.machine
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
        found = await channel.connect_any(targets, self._secret, msg.read_order, CONNECT_LIMIT_S)
        if found is None:
            now = self._driver.now
            refused = now < began + REFUSED_S
            self._driver.act(self._machine.unreached(now, refused=refused))
        elif self._channel is not None:  # another try was first
            found.close()
        else:
            self._channel = found
            if not is_up(self.address):  # others know this address: it is kept as long as it works
                self.address = found.local_address
            self._driver.act(self._machine.connected(self._driver.now))
            self._listening = self._driver.spawn(self._listen(found))

    async def _find(self) -> None:
        try:
            look = asyncio.to_thread(endpoint.find, self._epochs)
            found = await asyncio.wait_for(look, FIND_LIMIT_S)
        except (OSError, asyncio.TimeoutError):
            found = None
        self._driver.act(self._machine.found(found, self._driver.now))

    async def _listen(self, connection: Channel[msg.Order]) -> None:
        await connection.listen(partial(self._hear, connection.peer_address))
        self.hang_up()
        self._driver.act(self._machine.lost(self._driver.now))

    def _hear(self, sender: str, order: msg.Order) -> None:
        if isinstance(order, Strange):
            self._strangers.heard(sender, order)
        self._driver.act(self._machine.heard(order, self._driver.now))
