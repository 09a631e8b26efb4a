"""The agent's side of supervision. It drives the agent's machine (its timer, the tasks whose results become
events, and the agent's end), and connects to a supervisor as `core.agent.link` decides. When the
supervisor's node has died, it runs the next supervisor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from jurymast import background
from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect, WakeAt
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.state import messages as msg
from jurymast.core.state.message import Strangers
from jurymast.errors import RunDirectoryError, never
from jurymast.interpreter import run_module
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.addresses import is_up
from jurymast.wire.channel import Channel

# ---- the machine


class Driver:
    """Drives `machine`. `act` passes the effects of an event to `carry_out`, in order; that may call back at
    once only to send messages. `over` is set when the agent is to end; `failure` is the error that broke
    it."""

    def __init__(self, machine: AgentMachine, carry_out: Callable[[Effect], None]) -> None:
        self.machine = machine
        self.over = asyncio.Event()
        self.failure: BaseException | None = None
        self._carry_out = carry_out
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """The time on the machine's clock, in seconds."""
        return time.monotonic()

    def act(self, effects: list[Effect]) -> None:
        if self.over.is_set():
            return
        for effect in effects:
            if isinstance(effect, WakeAt):
                self._wake_at(effect.at)
            else:
                self._carry_out(effect)

    def say(self, message: msg.ToSupervisor) -> None:
        self.act(self.machine.say(message, self.now))

    def spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = True) -> asyncio.Task[None]:
        """Run a task. An error in a `vital` task ends the agent: giving its node up is better than an agent
        that half works. Errors of other tasks are logged."""
        task = background.start(work, self.fail if vital else background.logged)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error: BaseException) -> None:
        """End the agent because of this error."""
        self.failure = self.failure or error
        self.over.set()

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(at - self.now, self._wake, at) if at < NEVER else None

    def _wake(self, at: float) -> None:
        self.act(self.machine.tick(max(at, self.now)))

    async def close(self) -> None:
        """Stop carrying out effects, and cancel all tasks."""
        self.over.set()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- the connection

CONNECT_LIMIT_S = 1.5
# A failure that comes sooner counts as a refusal.
REFUSED_S = 0.5
FIND_LIMIT_S = 2.0


def read_run_directory(directory: RunDirectory) -> tuple[msg.Endpoint | None, int | None]:
    """Return the newest supervisor's address and the number of the newest attempt, each None if it cannot be
    known."""
    place = attempt = None
    with suppress(OSError):
        place = endpoint.find(directory.epochs)
    with suppress(OSError, RunDirectoryError):
        attempt = directory.newest_attempt()
    return place, attempt


class Connecting:
    """The agent's connection. `address` is this node's address on the way to the supervisor, "" before the
    first connection."""

    def __init__(self, directory: RunDirectory, driver: Driver, strangers: Strangers) -> None:
        self._directory = directory
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
            look = asyncio.to_thread(read_run_directory, self._directory)
            place, attempt = await asyncio.wait_for(look, FIND_LIMIT_S)
        except asyncio.TimeoutError:
            place = attempt = None
        self._driver.act(self._machine.found(place, self._driver.now, attempt=attempt))

    async def _listen(self, connection: Channel[msg.Order]) -> None:
        await connection.listen(partial(self._hear, connection.peer_address))
        self.hang_up()
        self._driver.act(self._machine.lost(self._driver.now))

    def _hear(self, sender: str, order: msg.Order) -> None:
        if isinstance(order, msg.Strange):
            self._strangers.heard(sender, order)
        self._driver.act(self._machine.heard(order, self._driver.now))


# ---- the next supervisor

log = logging.getLogger("jurymast.agent")

Process = asyncio.subprocess.Process


class Succeeding:
    def __init__(self, directory: RunDirectory, node: str, driver: Driver) -> None:
        self._directory = directory
        self._node = node
        self._driver = driver
        self._machine = driver.machine
        self._standby: asyncio.Task[Process] | None = None
        self._supervisor: Process | None = None

    def carry_out(self, effect: do.ForSuccession) -> None:
        match effect:
            case do.ReadPulse():
                self._driver.spawn(self._read_pulse())
            case do.StandBy():
                self._standby = background.start(self._stand_by(), background.to_its_awaiter)
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
            *run_module("jurymast.supervisor.standby", str(self._directory.root), self._node),
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
        """Start the takeover in the standby process, or in a new one if there is none."""
        standby, self._standby = self._standby, None
        if standby is not None:
            try:
                await self._call(standby, start)
            except OSError:  # it has ended, or could not be started
                self._supervisor = None
        if self._supervisor is None or self._supervisor.returncode is not None:
            await self._call(self._stand_by(), start)
        assert self._supervisor is not None
        await self._supervisor.wait()
        self._driver.act(self._machine.supervisor_ended(self._driver.now))

    async def _call(self, starting: Awaitable[Process], start: do.StartSupervisor) -> None:
        process = self._supervisor = await starting
        assert process.stdin is not None
        process.stdin.write(f"{start.after} {time.monotonic() - start.silent_s:.3f}\n".encode())
        await process.stdin.drain()
