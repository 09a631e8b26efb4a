"""Has a pool of waiting nodes, which all runs of a user share, kept as large as the policy says, while the
run goes on. How nodes of it come to the run is `core.supervision.refilling`'s affair."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Effect, Record, TopUpPool
from jurymast.core.state.run import Phase, RunState

# Between two looks at the pool, in seconds: each also shows its nodes that a run may need them, several times
# before they would end.
LOOK_S, LOOKS_LEAST = 60.0, 3


class Pooling:
    """`now` is the supervisor's clock. One question is open at a time."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._due = 0.0
        self._asking = False
        self._trouble = ""  # told last

    def on_time(self, now: float) -> list[Effect]:
        state = self._state
        goes_on = state.phase is Phase.RUNNING and state.end_order is None
        if not (state.pooled and goes_on) or self._asking or now < self._due:
            return []
        self._due, self._asking = now + min(LOOK_S, state.settings.pool_idle_s / LOOKS_LEAST), True
        return [TopUpPool(tuple(dict.fromkeys((*state.nodes, *state.excluded))))]

    def on_claimed(self) -> None:
        """The run has taken a node of the pool."""
        self._due = 0.0

    def on_topped_up(self, jobs: Sequence[str], why: str, now: float) -> list[Effect]:
        """These jobs were submitted for the pool. `why`: what went wrong, or ""."""
        self._asking = False
        out = list[Effect]()
        if jobs:
            many = f"jobs {', '.join(jobs)} were" if len(jobs) > 1 else f"job {jobs[0]} was"
            out.append(Record(ev.Noted(t=now, message=f"pool: {many} submitted, to wait for any run")))
        if why and why != self._trouble:
            out.append(Record(ev.Noted(t=now, message=f"pool: {why}")))
        self._trouble = why
        return out
