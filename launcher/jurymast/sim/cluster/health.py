"""What is wrong with simulated nodes, and how it is seen: in findings of probes, in tests before use, and in
how long parts of steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jurymast.core.agent import effects as do
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.findings import (
    APPLICATION,
    HARDWARE,
    STORAGE,
    SYMPATHETIC,
    Finding,
    Verdict,
)

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent, SimSite

# How a node is ill (`SimSite.ill`).
LOST, DOUBTFUL, SLOW = "gpu lost", "gpu doubtful", "slow node"
# Until the ranks of a node that falls ill are elsewhere, if nothing else happens.
LEAVES_S = {LOST: 12.0, DOUBTFUL: 12.0, SLOW: 60.0}
WRONG, FAILS, SLOW_ALONE, HANGS = TESTS = "wrong result", "fails", "slow alone", "hangs"


def _finding(code: str, verdict: Verdict, kind: str, message: str) -> Finding:
    return Finding(
        probe="p", code=code, verdict=verdict, kind=kind, message=message, device="gpu0", once=True
    )


FOUND = {
    LOST: _finding("xid-79", Verdict.BAD, HARDWARE, "the GPU fell off the bus"),
    DOUBTFUL: _finding("xid-63", Verdict.SUSPECT, HARDWARE, "a row is remapped"),
}
# These take no node out of a run.
STRAY = (
    _finding("xid-43", Verdict.SUSPECT, APPLICATION, "the program failed"),
    _finding("xid-45", Verdict.SUSPECT, SYMPATHETIC, "cleaned up after another failure"),
    _finding("ecc", Verdict.UNKNOWN, HARDWARE, "cannot be read"),
    _finding("storage-slow", Verdict.UNKNOWN, STORAGE, "slow"),
)
START_S, TEST_S, NOISE = (0.2, 0.6), (0.1, 0.4), (0.95, 1.05)
ALONE_S, SLOW_TIMES = 0.2, 4.0


def tell(site: SimSite, found: Finding) -> None:
    """The node's probe finds this, and its agent tells it, or the next that runs there."""
    finding = replace(found, at=site.wall)
    site.findings.append(finding)
    if site.agent is not None:
        site.agent.probing.found(finding)


class SimNodeHealth:
    """See `agent.io.ProbeAccess` and `agent.io.NodeTestAccess`."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent, self._site, self._world = agent, agent.site, agent.world
        self._began = agent.world.now

    # ---- probes

    @property
    def joules(self) -> float | None:
        return WATTS * (self._world.now - self._began)

    def start(self) -> None: ...

    def known(self) -> tuple[Finding, ...]:
        return tuple(self._site.findings)

    def wall(self) -> float:
        return self._site.wall

    def found(self, finding: Finding) -> None:
        self._world.after(0.0, self._agent.process, self._agent.found, finding)

    def new_supervisor(self) -> None: ...
    def clock(self, theirs: float) -> None: ...
    async def close(self) -> None: ...

    # ---- tests

    async def gone(self) -> None: ...

    def carry_out(self, effect: do.ForTests) -> None:
        machine, meeting = self._agent.machine, self._agent.cluster.meeting
        match effect:
            case do.StartTests(number):
                port = self._agent.cluster.new_port()
                self._later(START_S, machine.on_tests_started, number, port, "")
            case do.TestDevices(number):
                if self._site.ill != HANGS:
                    self._answer(number, self._alone())
            case do.TestTogether() if effect.host:
                self._meet(effect)
            case do.TestTogether(number):
                self._answer(number, self._together())
            case _:
                for name in [name for name, (one, _) in meeting.items() if one is self]:
                    del meeting[name]

    def _alone(self) -> NodeTimes:
        ill, seconds = self._site.ill, ALONE_S * self._world.between(*NOISE)
        wrong = "its product of matrices is not exact" if ill in (WRONG, LOST) else ""
        error = "the test failed" if ill == FAILS else ""
        return NodeTimes(
            {"matmul": seconds * (SLOW_TIMES if ill in (SLOW, SLOW_ALONE) else 1.0)}, wrong, error
        )

    def _together(self) -> NodeTimes:
        return NodeTimes({"gloo transfer": ALONE_S * self._world.between(*NOISE)})

    def _meet(self, asked: do.TestTogether) -> None:
        """Both nodes of a pair begin once the other is there."""
        cluster = self._agent.cluster
        other, number = cluster.meeting.pop(asked.name, (None, 0))
        if other is None or not other._agent.process.alive:
            cluster.meeting[asked.name] = self, asked.number
            self._world.after(asked.limit_s, self._agent.process, self._late, asked)
        elif cluster.network.joins(self._site.name, other._site.name):
            self._answer(asked.number, self._together())
            other._answer(number, self._together())
        else:
            self._world.after(asked.limit_s, self._agent.process, self._answer, asked.number, LATE)
            self._world.after(asked.limit_s, other._agent.process, other._answer, number, LATE)

    def _late(self, asked: do.TestTogether) -> None:
        cluster = self._agent.cluster
        if cluster.meeting.get(asked.name) == (self, asked.number):
            del cluster.meeting[asked.name]
            self._answer(asked.number, LATE)

    def _answer(self, number: int, found: NodeTimes) -> None:
        count = min(2, self._agent.cluster.ranks_per_node)
        self._later(TEST_S, self._agent.machine.on_tests_answered, number, [found] * count)

    def _later(self, seconds: tuple[float, float], event: Callable[..., Any], *said: object) -> None:
        after_s = self._world.between(*seconds)
        self._world.after(after_s, self._agent.process, self._agent.happens, event, *said)


WATTS = 100.0  # of a node
LATE = NodeTimes(error="no answer in time")
