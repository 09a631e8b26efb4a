"""How far the ranks are: told to the journal when it matters, not at every look."""

from __future__ import annotations

from collections.abc import Callable

from jurymast.core import events as ev
from jurymast.core.state import Phase, RunState
from jurymast.supervisor.watch import Watch

PROGRESS_INTERVAL_S = 2.0
PROGRESS_INTERVAL_MAX_S = 30.0
PROGRESS_EVENTS = 500


class Progress:
    """Reads `watch`, and feeds Progress events of the state's attempt."""

    def __init__(
        self, state: RunState, watch: Watch, feed: Callable[[ev.Event], None], now: Callable[[], float]
    ) -> None:
        self._state, self._watch, self._feed, self._now = state, watch, feed, now
        self._progress_at = 0.0

    def report(self, *, forced: bool) -> None:
        """Journal how far the run is: at the first step, when it ends an incident, else now and then."""
        if self._state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        now, first, incident = self._now(), self._state.first_step_at is None, self._state.incident
        due = forced or first or now >= self._progress_at + self._progress_interval_s(now)
        if not due and incident is None:
            return  # to ask all ranks takes long where there are many
        reach = self._watch.reach(self._state)
        if reach is None or (not first and reach.step <= self._state.step):
            return
        ends = (
            incident is not None
            and self._state.phase is Phase.RUNNING
            and (not reach.absolute or reach.step > incident.step_lost_from)
        )
        if due or ends:
            self._progress_at = now
            stepped_at = now - reach.ago_s
            done = reach.step - self._state.step
            step_s = (stepped_at - self._state.stepped_at) / done if done > 0 and not first else 0.0
            self._feed(
                ev.Progress(
                    t=now, attempt=self._state.attempt, step=reach.step, stepped_at=stepped_at,
                    absolute=reach.absolute, step_s=max(0.0, step_s),
                )
            )  # fmt: skip

    def _progress_interval_s(self, now: float) -> float:
        """Longer as the run grows older: a journal of months must still be read in a second."""
        age_s = now - self._state.submitted_at
        return min(PROGRESS_INTERVAL_MAX_S, max(PROGRESS_INTERVAL_S, age_s / PROGRESS_EVENTS))
