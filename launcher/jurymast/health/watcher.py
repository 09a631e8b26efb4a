"""Keeps the probe child looking, and outlives whatever happens to it: a driver may hang, crash, or hold a
process so that not even SIGKILL ends it. A hang or a crash is believed when a fresh child meets it as well;
then that probe is left out, and the others go on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jurymast.core.nodes.findings import HOST, STORAGE, Finding, Verdict
from jurymast.health.discover import installed
from jurymast.health.probe import Context
from jurymast.health.readings import stands_in, waits_for_storage

# How long a child may take to start, or beyond what it said, before it says something.
START_LIMIT_S = 60.0
# How long a process that was killed may take to be gone.
GONE_S = 5.0
# A child that wants to run, on a machine whose processors the ranks keep, has so many limits more.
STARVED_MAX = 5
# Children that end without a word: pauses between them, and how many in a row are enough.
PAUSES_S = (1.0, 5.0, 30.0, 60.0)
STRIKES = 2
# Two channels tell of the same event within this time.
SAME_EVENT_S = 10.0
EVENTS_KEPT = 50
LINE_BYTES_MAX = 1 << 20
# Signals that others send to a child; they say nothing about the probe that was looking.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)

# What a probe that hangs says about its node. Anything else that hangs: the host is suspect.
WEDGED = defaultdict(
    lambda: (Verdict.SUSPECT, HOST),
    nvidia=(Verdict.BAD, HOST),
    amd=(Verdict.BAD, HOST),
    storage=(Verdict.UNKNOWN, STORAGE),  # what nodes share is no single node's fault
)
Key = tuple[str, str, str]


@dataclass
class _End:
    """Why a child is no more: `how` is done, hung, crashed or gone (for reasons outside it). `probe` is what
    it was looking through, `detail` what could be seen, `on_storage` that it waited for shared storage (where
    a look's imports may come from), `undead` that SIGKILL did not end it."""

    how: str
    probe: str = ""
    detail: str = ""
    on_storage: bool = False
    undead: bool = False


@dataclass
class Looked:
    """What became of one probe: `state` is looked, nothing, failed or left out."""

    state: str
    findings: dict[Key, Finding] = field(default_factory=dict)


class Watcher:
    """`found` hears of findings that are new, changed, or gone (verdict ok). `probes` tells of every probe
    that was asked; all methods are called in the event loop.

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
        self._names = list(names)
        self._found = found
        self._once = once
        self._strikes: dict[str, int] = {}
        self._events: deque[Finding] = deque(maxlen=EVENTS_KEPT)
        self._process: asyncio.subprocess.Process | None = None
        self._has_answered = False
        self._closing = asyncio.Event()
        self.probes: dict[str, Looked] = {}

    def findings(self) -> list[Finding]:
        """All that hold now, and the newest events."""
        return [*(f for probe in self.probes.values() for f in probe.findings.values()), *self._events]

    async def run(self) -> None:
        """Never raises for a child's sake, and returns when no probe is left to look through."""
        failures = 0
        while names := [name for name in self._names if self._is_wanted(name)]:
            if self._closing.is_set():
                return
            try:
                end = await self._follow(await self._start(names))
            except OSError as error:
                end = _End("gone", detail=f"it cannot be started: {error}")
            if end.how == "done":
                return
            failures = 0 if self._has_answered else failures + 1
            self._has_answered = False
            if end.probe and end.how != "gone":
                self._strike(end)
            elif failures > len(PAUSES_S):
                self._report("health", _no_child(end.detail))
                return
            elif not self._once:
                await self._pause(PAUSES_S[max(0, failures - 1)])

    def _is_wanted(self, name: str) -> bool:
        state = self.probes[name].state if name in self.probes else ""
        return state not in ("left out", "nothing") and not (self._once and state)

    async def close(self) -> None:
        """Kill the child; `run` returns soon."""
        self._closing.set()
        if self._process is not None and self._process.returncode is None:
            await self._kill(self._process)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    # One child.

    async def _start(self, names: list[str]) -> asyncio.subprocess.Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jurymast.health", limit=LINE_BYTES_MAX,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        context = replace(self._context, fresh=self._context.fresh and not self.probes)
        order = {"context": asdict(context), "probes": names, "once": self._once}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        return process

    async def _follow(self, process: asyncio.subprocess.Process) -> _End:
        """Hear the child until it ends, or says nothing for longer than it may."""
        assert process.stdout is not None
        looking, limit_s, starved = "", START_LIMIT_S, 0
        # Not for ever: a cancelled `wait_for` may still give a line, and lose the cancellation.
        while not self._closing.is_set():
            try:
                line = await asyncio.wait_for(process.stdout.readline(), limit_s)
                message: dict[str, Any] = json.loads(line) if line else {}
            except asyncio.TimeoutError:
                state, where = stands_in(process.pid)
                if state == "R" and starved < STARVED_MAX:
                    starved += 1
                    continue
                detail = f"no answer for {limit_s * (starved + 1):.0f} s, in state {state}"
                detail += f" in {where}" if where else ""
                undead = not await self._kill(process)
                return _End("hung", looking, detail, waits_for_storage(where), undead)
            except ValueError:
                message = {}
            if not message:
                return await self._ended(process, looking)
            starved = 0
            if message["say"] == "look":
                looking, limit_s = message["probe"], float(message["limit_s"])
            else:
                self._looked(looking, message)
                looking, limit_s = "", float(message["next_s"]) + START_LIMIT_S
        await self._kill(process)
        return _End("done")

    async def _ended(self, process: asyncio.subprocess.Process, looking: str) -> _End:
        try:  # not a kill at once: that would take the exit code from asyncio
            await asyncio.wait_for(process.wait(), GONE_S)
        except asyncio.TimeoutError:  # it has only closed its end
            await self._kill(process)
        code = process.returncode
        if code == 0 and not looking:
            return _End("done")
        if code in FROM_OUTSIDE:
            return _End("gone", looking, f"it was killed by signal {-(code or 0)}")
        return _End("crashed", looking, f"exit code {code}" if (code or 0) >= 0 else f"signal {-(code or 0)}")

    async def _kill(self, process: asyncio.subprocess.Process) -> bool:
        """False when it is still there after all."""
        try:
            process.kill()
        except ProcessLookupError:
            pass
        try:
            await asyncio.wait_for(process.wait(), GONE_S)
        except asyncio.TimeoutError:
            return False
        return True

    # What it said.

    def _looked(self, probe: str, message: dict[str, Any]) -> None:
        found = [Finding.from_json(values) for values in message["findings"]]
        self._strikes.pop(probe, None)
        self._has_answered = True
        for event in (finding for finding in found if finding.once):
            if not any(_is_same(event, known) for known in self._events):
                self._events.append(event)
                self._found(event)
        now = {(f.probe, f.code, f.device): f for f in found if not f.once}
        before = self.probes[probe].findings if probe in self.probes else {}
        for key, finding in now.items():
            held = before.get(key)
            now[key] = replace(finding, at=held.at if held else finding.at or time.time())
            if held is None or (held.verdict, held.kind) != (finding.verdict, finding.kind):
                self._found(now[key])
        for key in before.keys() - now.keys():
            self._found(replace(before[key], verdict=Verdict.OK, message="is over", at=time.time()))
        self.probes[probe] = Looked(message["state"], now)

    def _strike(self, end: _End) -> None:
        """A hang or a crash during a look: another child is to confirm it, unless it cannot be doubted."""
        self._strikes[end.probe] = self._strikes.get(end.probe, 0) + 1
        if self._strikes[end.probe] < STRIKES and not end.undead:
            return
        self._report(end.probe, _wedged(end) if end.how == "hung" else _crashes(end))

    def _report(self, probe: str, finding: Finding) -> None:
        """The probe is left out from now on, and this is why."""
        known = self.probes.setdefault(probe, Looked(""))
        known.state = "left out"
        known.findings[finding.probe, finding.code, finding.device] = finding
        self._found(finding)


def names_to_ask(off: Collection[str]) -> list[str]:
    """Every installed probe but those that are `off`."""
    return [name for name in installed() if name not in off]


def _wedged(end: _End) -> Finding:
    verdict, kind = WEDGED["storage" if end.on_storage else end.probe]
    again = "and SIGKILL does not end it" if end.undead else "twice, in two processes"
    return Finding(
        probe=end.probe, code="driver-wedged", verdict=verdict, kind=kind, at=time.time(),
        message=f"a look through the probe {end.probe} hangs, {again}: {end.detail}; it is left out "
        "from now on",
    )  # fmt: skip


def _crashes(end: _End) -> Finding:
    return Finding(
        probe=end.probe, code="probe-crashes", verdict=Verdict.UNKNOWN, kind=HOST, at=time.time(),
        message=f"a look through the probe {end.probe} ends its process, twice: {end.detail}; it is left out "
        "from now on",
    )  # fmt: skip


def _no_child(why: str) -> Finding:
    return Finding(
        probe="health", code="no-probes", verdict=Verdict.UNKNOWN, kind=HOST, at=time.time(),
        message=f"the node's health is not observed any more: the process for it ends at once ({why})",
    )  # fmt: skip


def _is_same(event: Finding, known: Finding) -> bool:
    same = (event.probe, event.code, event.device) == (known.probe, known.code, known.device)
    return same and abs(event.at - known.at) < SAME_EVENT_S
