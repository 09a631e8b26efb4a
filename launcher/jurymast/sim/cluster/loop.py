"""The event loop of one simulated process, and its end of a connection: the real shells run on it, in the
simulated world's time."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from jurymast.sim.cluster.world import Process, SimConnection, SimEnd, World
from jurymast.wire.channel import ConnectionClosed

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite
    from jurymast.sim.cluster.cluster import Cluster

T = TypeVar("T")
Hears = TypeVar("Hears")


class SimLoop:
    """Whatever is due runs in `process`: late if that stands still, and not at all once it has ended. It has
    what tasks, futures and timers need of a loop, and nothing else. `clock_s`: its time when the world's
    begins."""

    def __init__(self, world: World, process: Process, clock_s: float = 0.0) -> None:
        self._world, self._process, self._clock_s = world, process, clock_s
        self._asyncio_s: Any = self
        self._error: BaseException | None = None
        # Kept: what ends with the process would otherwise be closed, and so go on, when Python collects it.
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, T], over: Callable[[asyncio.Task[T]], object]) -> None:
        """Begin a process's work; `over` gets it once it has ended."""
        self.call(lambda: self.create_task(work).add_done_callback(over))

    def call(self, what: Callable[..., object], *args: Any) -> None:
        """Call now, as the loop would. Raises what that raises."""
        before = events._get_running_loop()
        events._set_running_loop(self._asyncio_s)
        try:
            what(*args)
        finally:
            events._set_running_loop(before)
        if self._error is not None:
            raise self._error

    def failed(self, error: BaseException) -> None:
        """End the simulation with this error."""
        self._error = error

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._world.now + self._clock_s

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._asyncio_s, context)
        self._world.at(self._world.now, self._process, self._due, handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._asyncio_s, context)
        self._world.at(when - self._clock_s, self._process, self._due, handle)
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.call(handle._run)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._asyncio_s)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        self._world.work.append(coro)
        self._tasks.append(asyncio.Task(coro, loop=self._asyncio_s, **kwargs))
        return self._tasks[-1]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "handle" in context:  # the rest is about tasks of a process that has ended
            self._error = context.get("exception")

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...


class SimShell(SimEnd):
    """A process in which a real shell runs. What it does with files happens in `thread`."""

    def __init__(self, cluster: Cluster, site: SimSite, clock_s: float = 0.0) -> None:
        self.cluster, self.site, self.world = cluster, site, cluster.world
        self.process, self.thread = site.process(), site.process()
        self.loop = SimLoop(self.world, self.process, clock_s)

    async def on_disk(self, work: Callable[[], T], *, writes: bool = False) -> T:
        done: asyncio.Future[T | OSError] = self.loop.create_future()

        def tell(result: T | OSError) -> None:
            self.world.at(self.world.now, self.process, _set, done, result)

        self.cluster.storage.do(self.site.name, self.thread, work, tell, writes=writes)
        result = await done
        if isinstance(result, OSError):
            raise result
        return result

    def sends(self, connection: SimConnection, message: Any) -> None:
        connection.send(self, message)


def _set(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


class SimPeer(Generic[Hears]):
    """A shell's end of a connection: see `wire.channel.Channel`."""

    def __init__(self, shell: SimShell, connection: SimConnection) -> None:
        self._shell, self.connection = shell, connection
        self._unread: deque[Hears] = deque()
        self._hear: Callable[[Hears], None] | None = None
        self._news = asyncio.Event()
        self._ended: ConnectionError | None = None
        self.peer_address = "peer"

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self._shell.sends(self.connection, message)

    async def receive(self) -> Hears:
        while not self._unread:
            if self._ended is not None:
                raise self._ended
            await self._more()
        return self._unread.popleft()

    async def listen(self, hear: Callable[[Hears], None]) -> Exception:
        self._hear = hear
        while self._unread and self._ended is None:
            hear(self._unread.popleft())
        while self._ended is None:
            await self._more()
        return self._ended

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.connection.close(self._shell)
        self.lost()

    # What the network does.

    def heard(self, message: Hears) -> None:
        if self._ended is not None:
            return
        if self._hear is not None:
            self._hear(message)
        else:
            self._unread.append(message)
            self._news.set()

    def lost(self) -> None:
        self._ended = self._ended or ConnectionClosed("closed")
        self._news.set()
