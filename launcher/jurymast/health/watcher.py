"""Keeps a process for each probe running, and survives its faults: a driver may hang, crash, or block a
process so that not even SIGKILL ends it. What a probe remembers is kept here for its next process.
`core.judges.own_health` decides what follows."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from jurymast.child import Child
from jurymast.core.judges.energy import EnergyUsed
from jurymast.core.judges.own_health import ChildEnd, ProbeLooked, ProbeLooks
from jurymast.core.state.findings import Finding
from jurymast.health.child import FINDINGS_MAX
from jurymast.health.probe import Context
from jurymast.health.readings import stands_in, waits_for_storage
from jurymast.processes import kill_below, kill_group
from jurymast.reference import installed

# How long a child may be silent at its start, or beyond the limit that it announced.
START_LIMIT_S = 60.0
# How long a killed process may take to end.
GONE_S = 5.0
# Signals that other processes send to a child; they do not point at the probe that was looking.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
SECONDS_MAX = 1e7  # longer than any run
JOULES_MAX = 1e13  # more than a GPU uses in its life
# What reading a message may raise that is none of the child module's.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
UNREADABLE_TEXT = "its process said what cannot be read"


class ProbeWatcher:
    """Runs the probes, each in its own process. Calls `found` with findings that are new, changed, or gone
    (verdict ok). All methods must be called in the event loop.

    With `once`, `run` returns after one look through each probe.
    """

    def __init__(
        self,
        context: Context,
        names: Collection[str],
        found: Callable[[Finding], None],
        *,
        once: bool = False,
    ) -> None:
        self._context = context
        self._looks = ProbeLooks(names, once=once)
        self._found = found
        self._once = once
        self._children: dict[str, Child] = {}
        self._energy = EnergyUsed()
        self._closing = asyncio.Event()
        # The probes' clock. All their processes share it, and setting the machine's clock does not change it.
        self._epoch = time.time() - time.monotonic()

    @property
    def probes(self) -> dict[str, ProbeLooked]:
        return self._looks.probes

    @property
    def joules(self) -> float | None:
        """What the devices of this node have used since they were first looked at; None: nobody can say."""
        return self._energy.total if self._energy else None

    def findings(self) -> list[Finding]:
        """All findings that hold now, and the newest events."""
        return self._looks.findings()

    async def run(self) -> None:
        """Run the probes until none is left. A fault of their processes raises nothing."""
        points = await asyncio.to_thread(installed)  # hundreds of files, perhaps on busy storage
        await asyncio.gather(
            *(self._keep(name, points[name]) for name in self._looks.wanted() if name in points)
        )

    async def _keep(self, name: str, point: str) -> None:
        """Run one probe, in one process after the other, until it is no longer wanted."""
        while self._looks.is_wanted(name) and not self._closing.is_set():
            try:
                end = await self._follow(name, await self._start(name, point))
            except OSError as error:
                end = ChildEnd("gone", name, f"it cannot be started: {error}")
            after = self._looks.ended(end, time.time())
            for finding in after.news:
                self._found(finding)
            if after.over:
                return
            await self._pause(after.pause_s)

    async def close(self) -> None:
        """Kill the probes' processes; `run` returns soon."""
        self._closing.set()
        await asyncio.gather(*(_kill(child) for child in self._children.values()))

    async def _pause(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    # One process.

    async def _start(self, name: str, point: str) -> Child:
        child = self._children[name] = await Child.start("jurymast.health")
        first = name not in self._looks.probes
        order = {
            "context": asdict(replace(self._context, fresh=self._context.fresh and first)),
            "name": name, "point": point, "memory": self._looks.memory(name), "epoch": self._epoch,
            "once": self._once,
        }  # fmt: skip
        child.tell(json.dumps(order).encode())
        return child

    async def _follow(self, name: str, child: Child) -> ChildEnd:
        """Read from the process until it ends, or is silent for longer than it may be."""
        looking, limit_s, starved, pid = False, START_LIMIT_S, 0, child.pid
        # Checked again and again: a cancelled `wait_for` may still return a line, and lose the cancellation.
        while not self._closing.is_set():
            try:
                line = await asyncio.wait_for(child.hear(), limit_s)
                message: dict[str, Any] = json.loads(line) if line else {}
            except asyncio.TimeoutError:
                state, where = stands_in(pid)
                if state == "R" and self._looks.starves(starved):
                    starved += 1
                    continue
                detail = f"no answer for {limit_s * (starved + 1):.0f} s, in state {state}"
                detail += f" in {where}" if where else ""
                undead = not await _kill(child)
                how = "hung" if looking else "gone"
                return ChildEnd(how, name, detail, waits_for_storage(where), undead)
            except (ValueError, RecursionError):
                message = {}
            if not message:
                return await self._ended(name, child, looking)
            starved = 0
            await asyncio.sleep(0)  # lines without end keep nobody else waiting
            try:
                if message["say"] == "runs":
                    pid = int(message["pid"])
                elif message["say"] == "look":
                    looking, limit_s = True, _seconds(message["limit_s"])
                else:
                    self._looked(name, message)
                    looking, limit_s = False, _seconds(message["next_s"]) + START_LIMIT_S
            except UNREADABLE:  # a plugin wrote to its process's pipe; the other probes go on
                undead = not await _kill(child)
                return ChildEnd("crashed", name, UNREADABLE_TEXT, undead=undead)
        await _kill(child)
        return ChildEnd("done", name)

    def _looked(self, name: str, message: dict[str, Any]) -> None:
        found = [_read(name, values) for values in message["findings"][:FINDINGS_MAX]]
        memory = message["memory"]
        if memory is None and message["remembers"]:
            memory = self._looks.memory(name)  # it has not changed
        if (state := message["state"]) not in ("looked", "nothing", "failed"):
            raise ValueError(f"{state!r} is no state")
        for device, joules in message["energy"].items():
            self._energy.take(f"{name} {device}", _joules(joules))
        for finding in self._looks.looked(name, state, found, time.time(), memory):
            self._found(finding)

    async def _ended(self, name: str, child: Child, looking: bool) -> ChildEnd:
        if not await child.gone(GONE_S):  # it has only closed its output, or said what cannot be read
            undead = not await _kill(child)
            if looking:
                return ChildEnd("crashed", name, UNREADABLE_TEXT, undead=undead)
        kill_group(child.pid)  # if somebody has killed its process alone
        code = child.code
        if code == 0 and not looking:
            return ChildEnd("done", name)
        if code in FROM_OUTSIDE or not looking:
            how = f"exit code {code}" if (code or 0) >= 0 else f"it was killed by signal {-(code or 0)}"
            return ChildEnd("gone", name, how)
        how = f"exit code {code}" if (code or 0) >= 0 else f"signal {-(code or 0)}"
        return ChildEnd("crashed", name, how)


async def _kill(child: Child) -> bool:
    """Kill the probe with all that it started; False if it still exists. Its process ends once the probe
    has."""
    if child.code is None:
        kill_below(child.pid)
    gone = await child.gone(GONE_S)
    await child.kill(GONE_S)
    return gone


def _read(name: str, values: dict[str, Any]) -> Finding:
    """A finding of the probe `name`, within bounds. No probe speaks in another's name, but all report Xids as
    the nvidia probe's (`probe.xid_finding`). Raises one of UNREADABLE."""
    found = Finding.from_json(values).bounded()
    shared = found.probe == "nvidia" and found.code.startswith("xid-")
    return found if shared else replace(found, probe=name)


def _joules(value: Any) -> float:
    """Raises one of UNREADABLE, also for what no counter says."""
    joules = float(value)
    if not 0.0 <= joules <= JOULES_MAX:
        raise ValueError(f"{joules} J is no counter's value")
    return joules


def _seconds(value: Any) -> float:
    """A duration from a message. Raises one of UNREADABLE, also if it is not finite."""
    seconds = float(value)
    if not 0 <= seconds <= SECONDS_MAX:
        raise ValueError(f"{seconds} s is no duration")
    return seconds


def names_to_ask(off: Collection[str]) -> list[str]:
    """All installed probes except those in `off`."""
    return [name for name in installed() if name not in off]
