"""Starts, uses and ends the processes that test this node (`python -m jurymast.preflight`), as
`core.agent.node_tests` decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from jurymast.agent.driver import Driver
from jurymast.child import Child
from jurymast.core.agent import effects as do
from jurymast.core.nodes.tests import Alone
from jurymast.errors import never
from jurymast.wire.addresses import ADDRESS_VARIABLE

# Slurm may allocate devices that have no driver.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
GONE_S = 5.0


def driver_here() -> bool:
    return any(Path(path).exists() for path in DRIVERS)


class NodeTestRunner:
    """Runs the tests of this node. `environment` returns what ranks get. An error in a test does not end the
    agent, because the supervisor does not wait for tests."""

    def __init__(self, driver: Driver, environment: Callable[[], dict[str, str]]) -> None:
        self._driver, self._machine = driver, driver.machine
        self._environment = environment
        self._address = ""
        self._children: list[Child] = []
        self._work: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Future[list[bool]]] = set()

    def carry_out(self, effect: do.ForTests) -> None:
        match effect:
            case do.StartTests():
                self._begin(self._start(effect))
            case do.TestDevices(number):
                self._begin(self._ask(number, {"do": "alone"}))
            case do.TestTogether():
                order = {"do": "group", **asdict(effect), "host": effect.host or self._address}
                self._begin(self._ask(effect.number, order))
            case do.EndTests():
                self._end()
            case _:
                never(effect)

    async def gone(self) -> None:
        """Wait until all processes that were ended have released the devices."""
        if self._ending:
            await asyncio.wait(set(self._ending))

    async def close(self) -> None:
        self._end()
        await self.gone()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = self._driver.spawn(work, vital=False)

    async def _start(self, effect: do.StartTests) -> None:
        environment = self._environment()
        self._address = environment[ADDRESS_VARIABLE]
        try:
            for local_rank in range(effect.count):
                self._children.append(
                    await Child.start("jurymast.preflight", str(local_rank), environment=environment)
                )
            ready = await asyncio.gather(*(_line(child) for child in self._children))
            port, why = int(ready[0].get("port") or 0), ""
        except OSError as error:
            port, why = 0, f"its test processes cannot be started: {error}"
        self._driver.act(self._machine.tests_started(effect.number, port, why, self._driver.now))

    async def _ask(self, number: int, order: dict[str, Any]) -> None:
        for local_rank, child in enumerate(self._children):
            own = {**order, "rank": int(order.get("rank") or 0) + local_rank}
            child.tell(json.dumps(own).encode())
        answers = await asyncio.gather(*(_answer(child) for child in self._children))
        self._driver.act(self._machine.tests_answered(number, answers, self._driver.now))

    def _end(self) -> None:
        if self._work is not None:
            self._work.cancel()
        children, self._children = self._children, []
        ending = asyncio.gather(*(child.kill(GONE_S) for child in children))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _answer(child: Child) -> Alone:
    line = await _line(child)
    try:
        times = {str(measure): float(seconds) for measure, seconds in line["times"].items()}
        return Alone(times, str(line["wrong"]), str(line["error"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return Alone(error=f"invalid reply of a test process: {error!r}")


async def _line(child: Child) -> dict[str, Any]:
    """Return a test process's next message, or what its end means."""
    try:
        line = await child.hear()
        if line:
            said: dict[str, Any] = json.loads(line)
            return said
    except (OSError, ValueError) as error:
        return {"times": {}, "wrong": "", "error": f"invalid reply of a test process: {error}"}
    await child.gone(GONE_S)
    how = "closed its output" if child.code is None else f"ended with {child.code}"
    return {"times": {}, "wrong": "", "error": f"a test process {how}"}
