"""Writes a run's own metrics and incidents, by step, to the trackers that the policy's `metrics` names."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jurymast import tracker
from jurymast.core.run.notices import due
from jurymast.report.mailbox import Mailbox
from jurymast.report.metrics import RunMetrics
from jurymast.report.notifier import message_of
from jurymast.report.status import StatusWatcher, shown_step

log = logging.getLogger("jurymast.tracking")

# Of a metric with labels, the value is in the name of what is written.
WRITTEN = {
    "jurymast_step_seconds": "", "jurymast_samples_per_second": "", "jurymast_tokens_per_second": "",
    "jurymast_goodput_ratio": "kind", "jurymast_restarts_total": "",
    "jurymast_spares_ready": "", "jurymast_checkpoint_step": "tier", "jurymast_save_stall_seconds_total": "",
}  # fmt: skip
# What happened so long before this process began was written by an earlier supervisor's.
EARLIER_S = 60.0
CLOSE_S = 3.0


@dataclass(frozen=True)
class Point:
    """What is to be written. With a text it is an event, without one and without values the end."""

    step: int = 0
    at: float = 0.0
    values: tuple[tuple[str, float], ...] = ()
    text: str = ""


class Tracking:
    def __init__(self, watcher: StatusWatcher, names: Sequence[str]) -> None:
        self._watcher, self._metrics = watcher, RunMetrics(watcher)
        self._told: set[str] = set()
        self._since, self._written = time.time() - EARLIER_S, (0, 0)
        plan = watcher.plan
        run = tracker.TrackedRun(plan.run, plan.name, watcher.directory.root)
        self._boxes = [
            Mailbox(f"metrics.trackers: {name}", _Tracked(name, run).deliver, log, tries=1) for name in names
        ]
        for box in self._boxes:
            box.start()

    def look(self) -> None:
        """Write what the journal says anew: with each step that it tells, and each incident."""
        state = self._watcher.state
        step = shown_step(state)
        if state.first_step_at is not None and (state.attempt, step) != self._written:
            self._written = state.attempt, step
            self._put(Point(step, state.stepped_at, self._values()))
        for notice in due(state, self._told):
            self._told.add(notice.key)
            if notice.t >= self._since:
                self._put(Point(step, notice.t, text=message_of(notice, self._watcher)["text"]))

    def finish(self, until: float) -> None:
        self._put(Point())
        end = min(until, time.monotonic() + CLOSE_S)
        for box in self._boxes:
            box.empty(end)

    def _put(self, point: Point) -> None:
        for box in self._boxes:
            box.put(point)

    def _values(self) -> tuple[tuple[str, float], ...]:
        return tuple(
            ("/".join(filter(None, (family.name.removeprefix("jurymast_"), labels.get(label, "")))), value)
            for family in self._metrics.families(time.time())
            if (label := WRITTEN.get(family.name)) is not None
            for labels, value in family.values
        )


class _Tracked:
    """A plugin's tracker, which is opened when there is something to write: that may take long, too."""

    def __init__(self, name: str, run: tracker.TrackedRun) -> None:
        self._name, self._run = name, run
        self._tracker: Any = None

    def deliver(self, point: Point) -> str:
        if self._tracker is None and point != Point():
            self._tracker = tracker.load(self._name)(self._run)
        if point.text:
            self._tracker.event(point.step, point.at, point.text)
        elif point.values:
            self._tracker.write(point.step, point.at, dict(point.values))
        elif self._tracker is not None:
            self._tracker.close()
        return ""
