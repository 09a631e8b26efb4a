"""Tests of this node, alone and with another one: which processes run them, what these are asked, and what
the supervisor learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jurymast.core import messages as msg
from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect
from jurymast.core.nodes.tests import LOCAL, Alone, limit_s, slowest
from jurymast.core.settings import RunPlan

# A node's processes meet under this name, and in pairs under the pair's.
ITSELF, ITSELF_LIMIT_S = "local", 20.0
# Nodes without GPUs are tested by at most two processes.
CPU_PROCESSES = 2

Asked = do.TestDevices | do.TestTogether


class NodeTests:
    """Runs one test process for each device, or one or two without GPUs. They start with the agent's first
    torchrun host, so that both import torch at the same time. `now` is monotonic, in seconds."""

    def __init__(self, plan: RunPlan, gpus: int, *, driver: bool) -> None:
        """`driver`: Slurm has granted GPUs, and a driver is present."""
        self._wanted = limit_s(plan.settings, gpus) > 0
        self._join_limit_s = plan.settings.join_limit_s
        self._count = gpus if gpus and driver else min(CPU_PROCESSES, plan.ranks_per_node)
        self._number = 0  # number of the processes, from 1 on
        self._port: int | None = None  # where those of two nodes meet; None: they are not ready
        self._asked: Asked | None = None  # the processes do one thing at a time
        self._waiting: deque[Asked] = deque()
        self._alone = Alone()
        self._result: msg.TestedAlone | None = None
        self.wake_at = NEVER  # their end

    @property
    def here(self) -> bool:
        """Whether test processes run."""
        return self.wake_at < NEVER

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert self.here or self._asked is None, "nobody is there to answer"
        assert self._asked is not None or not self._waiting, "nothing is on, and something waits"
        assert self._result is None or self.here, "a result of processes that are gone"

    # Orders.

    def host_started(self, now: float) -> list[Effect]:
        """The first host started: new nodes will be tested soon, if the policy wants that."""
        wanted, self._wanted = self._wanted, False
        return self._begin(now + self._join_limit_s) if wanted and not self.here else []

    def test(self, order: msg.TestAlone | msg.TestPair, now: float) -> list[Effect]:
        """Start tests. Tests that were answered before are answered again."""
        if isinstance(order, msg.TestPair):
            return self._pair(order)
        begun = [] if self.here else self._begin(now)
        self.wake_at = now + order.limit_s
        return begun if self._result is None else [do.Send(self._result)]

    def _begin(self, until: float) -> list[Effect]:
        self._number += 1
        self._port, self._result, self.wake_at = None, None, until
        self._asked = do.TestDevices(self._number)
        return [do.StartTests(self._number, self._count)]

    def _pair(self, order: msg.TestPair) -> list[Effect]:
        if not self.here:
            gone = "it has no test processes left"
            return [do.Send(msg.TestedPair(name=order.name, times={}, error=gone))]
        return self._ask(self._together(order.name, order.host, order.port, order.limit_s, 2, order.rank))

    def _together(self, name: str, host: str, port: int, limit_s: float, nodes: int, rank: int) -> Asked:
        world, first = nodes * self._count, rank * self._count
        return do.TestTogether(self._number, name, host, port, limit_s, world, first)

    def _ask(self, asked: Asked) -> list[Effect]:
        if self._asked is not None:
            self._waiting.append(asked)
            return []
        self._asked = asked
        return [asked]

    # Reports of the processes.

    def started(self, number: int, port: int, why: str) -> list[Effect]:
        if number != self._number or self._asked is None or self._port is not None:
            return []
        self._port = port
        return self._ended(Alone(error=why)) if why else [self._asked]

    def answered(self, number: int, answers: Sequence[Alone]) -> list[Effect]:
        """Take in the answers to the last tests."""
        if number != self._number or self._asked is None or self._port is None:
            return []
        return self._ended(slowest(answers))

    def _ended(self, found: Alone) -> list[Effect]:
        asked, self._asked = self._asked, None
        if isinstance(asked, do.TestDevices):
            if self._count > 1 and not found.error:
                self._alone = found
                return self._ask(self._together(ITSELF, "", self._port or 0, ITSELF_LIMIT_S, 1, 0))
            said = self._said(found)
        elif asked is not None and asked.name == ITSELF:
            local = {LOCAL + measure: seconds for measure, seconds in found.times.items()}
            said = self._said(replace(self._alone, times={**self._alone.times, **local}, error=found.error))
        else:
            assert asked is not None
            said = [do.Send(msg.TestedPair(name=asked.name, times=dict(found.times), error=found.error))]
        return said + (self._ask(self._waiting.popleft()) if self._waiting else [])

    def _said(self, found: Alone) -> list[Effect]:
        self._result = msg.TestedAlone(port=self._port or 0, found=found)
        return [do.Send(self._result)]

    # Their end.

    def tick(self, now: float) -> list[Effect]:
        return self.end() if now >= self.wake_at else []

    def end(self) -> list[Effect]:
        """End the test processes, because others need the devices."""
        if not self.here:
            return []
        self._asked, self._result, self.wake_at = None, None, NEVER
        self._waiting.clear()
        return [do.EndTests(self._number)]
