"""The event loop of one simulated process: the real shells run on it, in the simulated world's time."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from jurymast.sim.cluster.world import Process, World

T = TypeVar("T")


class SimLoop:
    """Whatever is due runs in `process`: late if that stands still, and not at all once it has ended. It has
    what tasks, futures and timers need of a loop, and nothing else."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
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

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._world.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._asyncio_s, context)
        self._world.at(self._world.now, self._process, self._due, handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._asyncio_s, context)
        self._world.at(when, self._process, self._due, handle)
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.call(handle._run)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._asyncio_s)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.Task(coro, loop=self._asyncio_s, **kwargs))
        return self._tasks[-1]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "handle" in context:  # the rest is about tasks of a process that has ended
            self._error = context.get("exception")

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass
