"""Keeps the probe child running, and survives its faults: a driver may hang, crash, or block a process so
that not even SIGKILL ends it. `core.nodes.own_health` decides what follows."""

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
from jurymast.core.nodes.findings import Finding
from jurymast.core.nodes.own_health import ChildEnd, ProbeLooked, ProbeLooks
from jurymast.health.probe import Context, installed
from jurymast.health.readings import stands_in, waits_for_storage

# How long a child may be silent at its start, or beyond the limit that it announced.
START_LIMIT_S = 60.0
# How long a killed process may take to end.
GONE_S = 5.0
# Signals that other processes send to a child; they do not point at the probe that was looking.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


class ProbeWatcher:
    """Runs the probes. Calls `found` with findings that are new, changed, or gone (verdict ok). All methods
    must be called in the event loop.

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
        self._child: Child | None = None
        self._closing = asyncio.Event()

    @property
    def probes(self) -> dict[str, ProbeLooked]:
        return self._looks.probes

    def findings(self) -> list[Finding]:
        """All findings that hold now, and the newest events."""
        return self._looks.findings()

    async def run(self) -> None:
        """Run the child until no probe is left. A fault of the child raises nothing."""
        while (names := self._looks.wanted()) and not self._closing.is_set():
            try:
                end = await self._follow(await self._start(names))
            except OSError as error:
                end = ChildEnd("gone", detail=f"it cannot be started: {error}")
            after = self._looks.ended(end, time.time())
            for finding in after.news:
                self._found(finding)
            if after.over:
                return
            await self._pause(after.pause_s)

    async def close(self) -> None:
        """Kill the child; `run` returns soon."""
        self._closing.set()
        if self._child is not None:
            await self._child.kill(GONE_S)

    async def _pause(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    # One child.

    async def _start(self, names: list[str]) -> Child:
        child = self._child = await Child.start("jurymast.health")
        context = replace(self._context, fresh=self._context.fresh and not self.probes)
        order = {"context": asdict(context), "probes": names, "once": self._once}
        child.tell(json.dumps(order).encode())
        return child

    async def _follow(self, child: Child) -> ChildEnd:
        """Read from the child until it ends, or is silent for longer than it may be."""
        looking, limit_s, starved = "", START_LIMIT_S, 0
        # Checked again and again: a cancelled `wait_for` may still return a line, and lose the cancellation.
        while not self._closing.is_set():
            try:
                line = await asyncio.wait_for(child.hear(), limit_s)
                message: dict[str, Any] = json.loads(line) if line else {}
            except asyncio.TimeoutError:
                state, where = stands_in(child.pid)
                if state == "R" and self._looks.starves(starved):
                    starved += 1
                    continue
                detail = f"no answer for {limit_s * (starved + 1):.0f} s, in state {state}"
                detail += f" in {where}" if where else ""
                undead = not await child.kill(GONE_S)
                return ChildEnd("hung", looking, detail, waits_for_storage(where), undead)
            except ValueError:
                message = {}
            if not message:
                return await self._ended(child, looking)
            starved = 0
            if message["say"] == "look":
                looking, limit_s = message["probe"], float(message["limit_s"])
            else:
                found = [Finding.from_json(values) for values in message["findings"]]
                for finding in self._looks.looked(looking, message["state"], found, time.time()):
                    self._found(finding)
                looking, limit_s = "", float(message["next_s"]) + START_LIMIT_S
        await child.kill(GONE_S)
        return ChildEnd("done")

    async def _ended(self, child: Child, looking: str) -> ChildEnd:
        if not await child.gone(GONE_S):  # it has only closed its output
            await child.kill(GONE_S)
        code = child.code
        if code == 0 and not looking:
            return ChildEnd("done")
        if code in FROM_OUTSIDE:
            return ChildEnd("gone", looking, f"it was killed by signal {-(code or 0)}")
        return ChildEnd(
            "crashed", looking, f"exit code {code}" if (code or 0) >= 0 else f"signal {-(code or 0)}"
        )


def names_to_ask(off: Collection[str]) -> list[str]:
    """All installed probes except those in `off`."""
    return [name for name in installed() if name not in off]
