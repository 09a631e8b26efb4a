"""Drives the agent's machine: its timer, the tasks whose results become events, and the agent's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jurymast import background
from jurymast.core.agent.effects import NEVER, Effect, WakeAt
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.state import messages as msg


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
        return asyncio.get_running_loop().time()

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

    def terminated(self) -> None:
        self.act(self.machine.on_sigterm(self.now))

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
        self.act(self.machine.on_time(max(at, self.now)))

    async def close(self) -> None:
        """Stop carrying out effects, and cancel all tasks."""
        self.over.set()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
