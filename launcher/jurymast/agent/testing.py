"""The agent's side of this node's tests: starts the test processes, talks to them, and ends them in time.

One process a GPU; without GPUs one, or two when the run has several ranks a node.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jurymast.core import messages as msg
from jurymast.core.nodes.tests import LOCAL, Alone, limit_s
from jurymast.core.settings import RunPlan
from jurymast.wire.addresses import ADDRESS_VARIABLE

# Slurm may grant devices that no driver stands behind.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
LINE_BYTES_MAX = 1 << 20
LOCAL_LIMIT_S = 20.0
GONE_S = 5.0


class Testing:
    """Answers the supervisor's orders to test by `say`.

    The tests of the node alone begin by themselves with the agent's first torchrun host (`warm_up`), so that
    both import torch at the same time. `environment` is what ranks get. Nothing raises for a test's sake.
    """

    def __init__(
        self,
        plan: RunPlan,
        gpus: int,
        environment: Callable[[], dict[str, str]],
        say: Callable[[msg.TestedAlone | msg.TestedPair], None],
    ) -> None:
        self._wanted = limit_s(plan.settings, gpus) > 0
        self._join_limit_s = plan.settings.join_limit_s
        has_driver = any(Path(path).exists() for path in DRIVERS)
        self._count = gpus if gpus and has_driver else min(2, plan.ranks_per_node)
        self._environment = environment
        self._say = say
        self._processes: _Processes | None = None
        self._result: msg.TestedAlone | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def warm_up(self) -> None:
        """Once, if the policy wants tests: nodes that have just come are about to be tested."""
        if self._wanted:
            self._wanted = False
            self._begin(self._join_limit_s)

    def obey(self, order: msg.TestAlone | msg.TestPair) -> None:
        """What was answered before is answered again."""
        if isinstance(order, msg.TestPair):
            self._spawn(self._pair(order))
        else:
            if self._processes is None:
                self._begin(order.limit_s)
            self._until(order.limit_s)
            if self._result is not None:
                self._say(self._result)

    async def end(self) -> None:
        """Kill what is there, and wait until it has gone, and with it what it held of the GPUs."""
        self.end_soon()
        if self._ending is not None:
            await self._ending

    def end_soon(self) -> None:
        """Kill what is there."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        processes, self._processes, self._result = self._processes, None, None
        if processes is not None:
            self._ending = asyncio.ensure_future(processes.end())

    def _begin(self, life_s: float) -> None:
        self._processes = _Processes(self._count)
        self._spawn(self._test_alone(self._processes))
        self._until(life_s)

    def _until(self, life_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(life_s, self.end_soon)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _test_alone(self, processes: _Processes) -> None:
        environment = self._environment()
        port = await processes.start({**os.environ, **environment})
        found = await processes.ask({"do": "alone"})
        if self._count > 1 and not found.error:
            meeting = msg.TestPair(
                name="local", host=environment[ADDRESS_VARIABLE], port=port, rank=0, limit_s=LOCAL_LIMIT_S
            )
            together = await processes.meet(meeting, 1)
            times = {**found.times, **{LOCAL + key: value for key, value in together.times.items()}}
            found = Alone(times, found.wrong, together.error)
        self._result = msg.TestedAlone(port=port, found=found)
        self._say(self._result)

    async def _pair(self, order: msg.TestPair) -> None:
        """With the processes of another node."""
        found = Alone(error="it has no test processes any more")
        if self._processes is not None:
            found = await self._processes.meet(order, 2)
        self._say(msg.TestedPair(name=order.name, times=dict(found.times), error=found.error))


class _Processes:
    """`python -m jurymast.preflight`, one a device; see there for orders and answers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._children: list[asyncio.subprocess.Process] = []
        self._turn = asyncio.Lock()

    async def start(self, environment: dict[str, str]) -> int:
        """Returns the port of the store for those who meet here; 0 when there is none."""
        try:
            for local_rank in range(self._count):
                child = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "jurymast.preflight", str(local_rank), limit=LINE_BYTES_MAX,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
                )  # fmt: skip
                self._children.append(child)
        except OSError:
            return 0  # as with one that ends at once: the first order tells
        ready = await asyncio.gather(*(_answer(child) for child in self._children))
        return int(ready[0].get("port") or 0)

    async def meet(self, order: msg.TestPair, nodes: int) -> Alone:
        """An all-reduce over all devices of `nodes` nodes, of which this is number `order.rank`."""
        return await self.ask(
            {
                "do": "group", "name": order.name, "host": order.host, "port": order.port,
                "limit_s": order.limit_s, "world": nodes * self._count, "rank": order.rank * self._count,
            }
        )  # fmt: skip

    async def ask(self, order: dict[str, Any]) -> Alone:
        """Each process's answer in one: the slowest's times, everything wrong, the first error."""
        if len(self._children) < self._count:
            return Alone(error="its test processes cannot be started")
        async with self._turn:
            for local_rank, child in enumerate(self._children):
                own = {**order, "rank": int(order.get("rank") or 0) + local_rank}
                if child.stdin is not None and not child.stdin.is_closing():
                    child.stdin.write(json.dumps(own).encode() + b"\n")
            answers = await asyncio.gather(*(_answer(child) for child in self._children))
        times: dict[str, float] = {}
        for answer in answers:
            for measure, seconds in answer["times"].items():
                times[measure] = max(float(seconds), times.get(measure, 0.0))
        wrong = "; ".join(answer["wrong"] for answer in answers if answer["wrong"])
        return Alone(times, wrong, next((a["error"] for a in answers if a["error"]), ""))

    async def end(self) -> None:
        for child in self._children:
            if child.returncode is None:
                child.kill()
        waits = [asyncio.ensure_future(child.wait()) for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=GONE_S)


async def _answer(child: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next answer of a test process, or what its end says."""
    assert child.stdout is not None
    try:
        line = await child.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
    except (OSError, ValueError) as error:
        return {"times": {}, "wrong": "", "error": f"a test process said nonsense: {error}"}
    return {"times": {}, "wrong": "", "error": f"a test process ended with {await child.wait()}"}
