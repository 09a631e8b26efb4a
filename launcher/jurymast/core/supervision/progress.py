"""How far the ranks are: told to the journal when it matters, not at every look."""

from __future__ import annotations

from dataclasses import replace

from jurymast.core import events as ev
from jurymast.core.checkpoints.saves import Saves
from jurymast.core.nodes.reports import Reach, Reports
from jurymast.core.run.state import Phase, RunState
from jurymast.core.run.telling import pause_s

PROGRESS_INTERVAL_S = 2.0


class Progress:
    """Of the state's attempt, with what it has saved as usual. `now` is Unix time in seconds."""

    def __init__(self, state: RunState, reports: Reports, saves: Saves) -> None:
        self._state, self._reports, self._saves = state, reports, saves
        self._progress_at = 0.0

    @property
    def step(self) -> int:
        """The newest step done, told or not; while an attempt has done none, the newest of earlier ones."""
        state = self._state
        reach = self._reports.reach() if state.phase is Phase.RUNNING else None
        told = state.step if state.first_step_at is not None else state.best_step
        return told if reach is None else max(told, reach.step)

    def look(self, now: float, *, forced: bool = False) -> list[ev.Event]:
        """What the journal is to be told: at the first step, when it ends an incident, else now and then."""
        if self._state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        told: list[ev.Event] = [*self._saves.look(now, forced=forced)]
        first, incident = self._state.first_step_at is None, self._state.incident
        interval_s = max(PROGRESS_INTERVAL_S, pause_s(self._state, now))
        due = forced or first or now >= self._progress_at + interval_s
        if not due and incident is None:
            return told  # to ask all ranks takes long where there are many
        reach = self._reports.reach()
        if reach is None:
            return told
        done = reach.step - self._state.step
        if not first and done <= 0 and not (forced and done == 0 and self._saves.untold):
            return told
        ends = (
            incident is not None
            and self._state.phase is Phase.RUNNING
            and (not reach.absolute or reach.step > incident.step_lost_from)
        )
        return [*told, self._progress(now, reach)] if due or ends else told

    def _progress(self, now: float, reach: Reach) -> ev.Progress:
        self._progress_at = now
        first, done = self._state.first_step_at is None, reach.step - self._state.step
        stepped_at = now - reach.ago_s
        event = ev.Progress(
            t=now, attempt=self._state.attempt, step=reach.step, stepped_at=stepped_at,
            absolute=reach.absolute,
        )  # fmt: skip
        if (usual := self._saves.take(event.attempt, now)) is not None:
            event = replace(
                event, saves=usual.number, saved_step=usual.last.step, saved_in=usual.last.tier,
                stall_s=round(usual.stall_s, 6),
            )  # fmt: skip
        took_s = stepped_at - self._state.stepped_at - event.stall_s
        step_s = took_s / done if done > 0 and not first else 0.0
        return replace(event, step_s=max(0.0, step_s))
