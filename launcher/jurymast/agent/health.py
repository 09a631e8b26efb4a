"""The agent's part in health: the probe child, this node's clock, reports to the supervisor, and the report
to the site that this node is bad. It also runs the processes that test this node (`python -m
jurymast.preflight`), as `core.agent.ranks` decides."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from jurymast import background
from jurymast.agent.driver import Driver
from jurymast.child import Child
from jurymast.cluster.verdicts import boot_id, leave, verdict
from jurymast.core.agent import effects as do
from jurymast.core.judges.own_health import OwnHealth
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.findings import HOST, Finding, Verdict
from jurymast.core.state.settings import RunPlan
from jurymast.errors import ClusterUnavailableError, never
from jurymast.health.probe import Context, granted_gpus
from jurymast.health.watcher import ProbeWatcher, names_to_ask
from jurymast.rundir import RunDirectory
from jurymast.wire.addresses import ADDRESS_VARIABLE

CLOSE_LIMIT_S = 5.0


class Probing:
    """Reports findings to the supervisor, and keeps them for the next one. `tell` sends it a message;
    findings that reach no supervisor are in the next hello."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, tell: Callable[[msg.HealthFound], None]
    ) -> None:
        self._tell = tell
        settings = plan.settings
        self._context = Context(
            node=node, thresholds=settings.thresholds, xid=settings.xid, paths=(str(directory.root),),
            data_paths=settings.data_paths, local_path=os.path.expandvars(settings.local_path),
            gpus=granted_gpus(os.environ), started_at=time.time(),
        )  # fmt: skip
        self._watcher = ProbeWatcher(self._context, names_to_ask(settings.probes_off), self._found)
        self._watching: asyncio.Future[None] | None = None
        self._own = OwnHealth()

    def start(self) -> None:
        """Start the probes, once. Called when nothing else on this node is urgent."""
        if self._watching is None:
            self._watching = background.start(self._watcher.run(), self._stopped)

    def known(self) -> tuple[Finding, ...]:
        """Return findings for a hello: the newest of each kind, and the newest events."""
        events = [finding for finding in self._watcher.findings() if finding.once]
        return (*self._own.known(), *events)

    def findings(self) -> list[Finding]:
        """Return all findings that hold now, and the newest events."""
        return [*self._watcher.findings(), *self._own.holding()]

    @property
    def joules(self) -> float | None:
        return self._watcher.joules

    def wall(self) -> float:
        return time.time()

    def new_supervisor(self) -> None:
        self._own.new_supervisor()

    def clock(self, theirs: float) -> None:
        """Compare this node's clock with the supervisor's Unix time, which has just arrived."""
        offset = self._own.clock(theirs, time.time())
        if offset is None:
            return
        from jurymast.health.probe import threshold  # loads YAML, which not every agent needs

        limit = threshold(self._context, "clock-offset-s")
        if finding := self._own.judge(offset, limit, time.time()):
            self._found(finding)

    def _stopped(self, error: BaseException) -> None:
        """Report an error in the watcher, which is no reason to end the ranks."""
        self._found(
            Finding(
                probe="agent", code="no-probes", verdict=Verdict.UNKNOWN, kind=HOST, at=time.time(),
                message=f"the node's health is no longer observed: {error!r}",
            )
        )  # fmt: skip

    def _found(self, finding: Finding) -> None:
        if self._own.found(finding):
            self._tell(msg.HealthFound(finding=finding, clock=self.wall()))

    async def close(self) -> None:
        await self._watcher.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching], timeout=CLOSE_LIMIT_S)


async def leave_verdict(
    order: msg.LeaveVerdict, plan: RunPlan, node: str, say: Callable[[msg.VerdictLeft], None]
) -> None:
    """Carry out the supervisor's order to leave a verdict, and report that it is done, or why not."""
    why = ""
    try:
        values = verdict(node, boot_id(), order.job, plan.run, order.finding, time.time())
        await asyncio.to_thread(leave, Path(plan.settings.spool), values)
    except ClusterUnavailableError as error:
        why = str(error)
    say(msg.VerdictLeft(why=why))


# ---- tests of this node

# Slurm may allocate devices that have no driver.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
GONE_S = 5.0
# Test processes give up by themselves at their limit; the supervisor waits for a ninth of it longer.
HANG_SHARE = 1.05


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
                self._begin(self._ask(effect.number, order, HANG_SHARE * effect.limit_s))
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
        self._driver.act(self._machine.on_tests_started(effect.number, port, why, self._driver.now))

    async def _ask(self, number: int, order: dict[str, Any], limit_s: float | None = None) -> None:
        """Have a test done, and say what came of it. What does not end within `limit_s` is answered as well,
        since whoever is silent counts as lost."""
        for local_rank, child in enumerate(self._children):
            own = {**order, "rank": int(order.get("rank") or 0) + local_rank}
            child.tell(json.dumps(own).encode())
        name = str(order.get("name", ""))
        waiting = asyncio.gather(*(_answer(child, name) for child in self._children))
        try:
            answers = await asyncio.wait_for(waiting, limit_s)
        except asyncio.TimeoutError:
            answers = [NodeTimes(error="its test processes do not answer in time")]
        self._driver.act(self._machine.on_tests_answered(number, answers, self._driver.now))

    def _end(self) -> None:
        if self._work is not None:
            self._work.cancel()
        children, self._children = self._children, []
        ending = asyncio.gather(*(child.kill(GONE_S) for child in children))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _answer(child: Child, name: str) -> NodeTimes:
    """Return what a test process says of the test with this name. It may answer an earlier one late."""
    line = await _line(child)
    while line.get("name", name) != name:
        line = await _line(child)
    try:
        times = {str(measure): float(seconds) for measure, seconds in line["times"].items()}
        return NodeTimes(times, str(line["wrong"]), str(line["error"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return NodeTimes(error=f"invalid reply of a test process: {error!r}")


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
