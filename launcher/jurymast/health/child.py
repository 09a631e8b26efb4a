"""The probe child: looks at this machine through every probe, each at its own interval, until its stdin ends.

stdin: one line, {"context": {...}, "probes": [names], "once": bool}. Answers, one JSON object per line:
    {"say": "look", "probe", "limit_s"}    before a call into a probe: shows which one hangs
    {"say": "looked", "probe", "state", "findings", "next_s"}    all that holds now, and events since then;
        `state` is looked, nothing (not for this machine) or failed; `next_s`: seconds until the next look
With `once` it ends after one look of each probe.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jurymast.core.nodes.findings import Finding, Verdict
from jurymast.health.probe import Context, Probe, failed, installed, open_probe, threshold

# Drivers that are not in use may take seconds per GPU to open.
OPEN_LOOKS = 3
INTERVALS = 3
FINDINGS_MAX = 100


@dataclass
class Turn:
    """When a probe is due, on the monotonic clock; `probe` is None until it has been opened."""

    due: float
    probe: Probe | None = None


class ProbeChild:
    def __init__(self, order: dict[str, Any], output: int) -> None:
        self._context = Context(**order["context"])
        self._names: Sequence[str] = order["probes"]
        self._once = bool(order["once"])
        self._output = output
        self._least_s = threshold(self._context, "look-limit-s")
        self._open_again_s = threshold(self._context, "open-again-s")
        self._turns: dict[str, Turn] = {}

    def run(self) -> None:
        """Look until stdin ends, or with `once` until every probe has looked once."""
        points = installed()
        for name in self._names:
            if name in points:
                self._begin(name, points[name])
        while not self._once and not self._told_to_end():
            name, turn = min(self._turns.items(), key=lambda item: item[1].due)
            if turn.due > time.monotonic():
                continue
            if turn.probe is None:
                self._begin(name, points[name])
            else:
                self._look(name, turn.probe)
        for turn in self._turns.values():
            if turn.probe is not None:
                turn.probe.close()

    def _begin(self, name: str, point: Any) -> None:
        self._say({"say": "look", "probe": name, "limit_s": self._limit_s(OPEN_LOOKS * self._least_s)})
        try:
            probe = open_probe(point, self._context)
        except Exception as error:  # other people's code, which may raise anything
            self._turns[name] = Turn(time.monotonic() + self._open_again_s)
            self._looked(name, "failed", [failed(name, error, "be opened").to_json()])
            return
        if probe is None:
            self._turns.pop(name, None)
            self._looked(name, "nothing", [])
            return
        self._look(name, probe)

    def _look(self, name: str, probe: Probe) -> None:
        self._say({"say": "look", "probe": name, "limit_s": self._limit_s(INTERVALS * probe.interval_s)})
        try:
            found = [checked(f) for f in probe.look(time.time()) if f.verdict is not Verdict.OK]
            state = "looked"
        except Exception as error:  # as above
            found, state = [failed(name, error, "look").to_json()], "failed"
        self._turns[name] = Turn(time.monotonic() + max(0.1, probe.interval_s), probe)
        self._looked(name, state, found)

    def _looked(self, name: str, state: str, found: Sequence[dict[str, Any]]) -> None:
        self._say(
            {
                "say": "looked", "probe": name, "state": state, "findings": found[:FINDINGS_MAX],
                "next_s": self._next_s(),
            }
        )  # fmt: skip

    def _limit_s(self, wanted_s: float) -> float:
        """The limit in seconds for a look; with `once` a person waits for the result."""
        return self._least_s if self._once else max(self._least_s, wanted_s)

    def _next_s(self) -> float:
        due = min((turn.due for turn in self._turns.values()), default=time.monotonic())
        return max(0.0, due - time.monotonic())

    def _told_to_end(self) -> bool:
        """Wait until the next look is due. True if stdin has ended, or no probe is left."""
        return not self._turns or bool(select.select([sys.stdin.fileno()], [], [], self._next_s())[0])

    def _say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._output, data) :]


def checked(finding: Finding) -> dict[str, Any]:
    """A finding as JSON. Raises if its reader would not accept it."""
    values = finding.to_json()
    Finding.from_json(values)
    return values
