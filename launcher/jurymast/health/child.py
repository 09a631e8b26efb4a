"""The process of one probe: looks at this machine at the probe's interval, until its stdin ends.

stdin: one line, {"context": {...}, "name", "point": "package:function", "memory", "epoch": s, "once": bool}.
Answers, one JSON object per line:
    {"say": "runs", "pid"}    the process in which the probe looks: see `__main__`
    {"say": "look", "limit_s"}    before a call into the probe
    {"say": "looked", "state", "findings", "memory", "energy", "next_s"}    all that holds now, and events
        since then; `state` is looked, nothing (not for this machine) or failed; `memory`: what the next
        process of this probe is to be given, null if it has not changed or the probe keeps none, with
        "remembers" true if it keeps one; `energy`: joules by device, {} if nothing new was read; `next_s`:
        seconds until the next look
With `once` it ends after one look. A probe that is not for this machine ends its process, too.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from jurymast.core.state.findings import Finding, Verdict
from jurymast.health.probe import Context, Probe, failed, open_probe, threshold

# Drivers that are not in use may take seconds per GPU to open.
OPEN_LOOKS = 3
INTERVALS = 3
FINDINGS_MAX = 100
DEVICES_MAX = 64
# The machine's clock was set if it is off by this much from where the probes' clock is; less is drift.
CLOCK_SET_S = 1.0
# A line to the agent must fit into child.LINE_BYTES_MAX, with up to FINDINGS_MAX findings.
MEMORY_BYTES_MAX = 256 << 10


class ProbeChild:
    def __init__(self, order: dict[str, Any], output: int) -> None:
        self._context = Context(**order["context"])
        self._name, self._point = str(order["name"]), str(order["point"])
        self._memory = order["memory"]
        self._epoch = float(order["epoch"])
        self._once = bool(order["once"])
        self._output = output
        self._least_s = threshold(self._context, "look-limit-s")
        self._probe: Probe | None = None
        self._due = time.monotonic()
        self._remembered = ""  # what was last sent, as JSON
        self._energy: dict[str, float] = {}  # what was last sent
        self._forgot = False  # this process could not take what an earlier one remembered

    def run(self) -> None:
        """Look until stdin ends, or with `once` until the probe has looked once."""
        while self._step() and not self._once and not self._must_end():
            pass
        if self._probe is not None:
            self._probe.close()

    def _step(self) -> bool:
        """Look, after opening the probe if it is not open. False if there is nothing for it to see here."""
        try:
            if self._probe is None:
                self._say({"say": "look", "limit_s": self._limit_s(OPEN_LOOKS * self._least_s)})
                self._due = time.monotonic() + threshold(self._context, "open-again-s")
                self._probe = self._open()
                if self._probe is None:
                    self._looked("nothing", [])
                    return False
            self._look(self._probe)
        except Exception as error:  # other people's code, which may raise anything
            doing = "be opened" if self._probe is None else "look"
            self._looked("failed", [failed(self._name, error, doing).to_json()])
        return True

    def _open(self) -> Probe | None:
        """Open the probe with what an earlier process remembered; if it cannot take that, without. Raises
        whatever the plugin raises."""
        if self._memory is not None:
            try:
                return open_probe(self._point, replace(self._context, memory=self._memory))
            except Exception:
                self._forgot = True
        return open_probe(self._point, self._context)

    def _look(self, probe: Probe) -> None:
        interval_s = max(0.1, probe.interval_s)
        self._say({"say": "look", "limit_s": self._limit_s(INTERVALS * probe.interval_s)})
        self._due = time.monotonic() + interval_s  # also if it raises
        now = self._epoch + time.monotonic()
        wrong = (f for f in probe.look(now) if getattr(f, "verdict", None) is not Verdict.OK)
        found = [self._told(f) for f in islice(wrong, FINDINGS_MAX)]
        if next(wrong, None) is not None:  # the first are told, and that there are more
            error = ValueError(f"more than {FINDINGS_MAX} findings")
            found[-1] = failed(self._name, error, "tell all that it found").to_json()
        memory, energy = self._changed_memory(probe), self._new_energy(probe)
        self._due = time.monotonic() + interval_s
        self._looked("looked", found, memory, energy)

    def _new_energy(self, probe: Probe) -> dict[str, float]:
        """The joules of the devices that have used any since they were last sent. Raises whatever the plugin
        raises."""
        energy = getattr(probe, "energy", None)
        if energy is None:
            return {}
        found = {str(device): float(joules) for device, joules in islice(energy().items(), DEVICES_MAX)}
        new = {device: joules for device, joules in found.items() if self._energy.get(device) != joules}
        self._energy = found
        return new

    def _changed_memory(self, probe: Probe) -> Any:
        """What the probe wants its next process to know, if that has changed; None otherwise. Raises whatever
        the plugin raises, and ValueError if it is too large."""
        remember = getattr(probe, "remember", None)
        if remember is None or self._forgot or self._once:
            return None
        memory = remember()
        text = json.dumps(memory)
        if len(text) > MEMORY_BYTES_MAX:
            raise ValueError(f"it wants to remember {len(text)} bytes; {MEMORY_BYTES_MAX} are possible")
        if text == self._remembered:
            return None
        self._remembered = text
        return memory

    def _looked(
        self, state: str, found: Sequence[dict[str, Any]], memory: Any = None,
        energy: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._say(
            {
                "say": "looked", "state": state, "findings": found, "memory": memory, "energy": energy or {},
                "remembers": bool(self._remembered), "next_s": self._next_s(),
            }
        )  # fmt: skip

    def _told(self, finding: Finding) -> dict[str, Any]:
        """A finding as JSON, or that it is none: one that is wrong takes no others with it."""
        try:
            return self._checked(finding)
        except Exception as error:  # whatever a plugin put into it
            return failed(self._name, error, "tell one of its findings").to_json()

    def _checked(self, finding: Finding) -> dict[str, Any]:
        """A finding as JSON, with its time by the clock as it is now. Raises if its reader would not accept
        it."""
        values = Finding.from_json(finding.to_json()).bounded().to_json()
        was_set_s = time.time() - time.monotonic() - self._epoch
        if values["at"] and abs(was_set_s) >= CLOCK_SET_S:
            values["at"] = max(0.0, values["at"] + was_set_s)
        return values

    def _limit_s(self, wanted_s: float) -> float:
        """The limit in seconds for a look; with `once` a person waits for the result."""
        return self._least_s if self._once else max(self._least_s, wanted_s)

    def _next_s(self) -> float:
        return max(0.0, self._due - time.monotonic())

    def _must_end(self) -> bool:
        """Wait until the next look is due. True if stdin has ended."""
        return bool(select.select([sys.stdin.fileno()], [], [], self._next_s())[0])

    def _say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._output, data) :]
