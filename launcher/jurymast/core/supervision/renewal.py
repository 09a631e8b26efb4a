"""A job that is requeued before it reaches its time limit: whether, when, and how long its ranks have."""

from __future__ import annotations

from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase, RunState
from jurymast.core.supervision.limit import TimeLimit

# A requeue as if the job's time were up, which submitit's users request to test what a function keeps.
TIMEOUT = "timeout"
REQUESTS = frozenset({ev.REQUEUE, TIMEOUT})
# Of the time before the limit, this much is for what functions keep.
KEEP_SHARE = 0.5


class Renewal:
    """Runs that the policy has requeued (`failures.at_time_limit`), and functions that keep their own
    state."""

    def __init__(self, state: RunState, limit: TimeLimit) -> None:
        self._state, self._limit = state, limit

    @property
    def keeps(self) -> bool:
        """Whether this is a function that keeps its own state, and may be requeued once more for that."""
        return self._state.timeouts < self._state.timeouts_most

    @property
    def is_wanted(self) -> bool:
        return self._state.settings.renews or self.keeps

    @property
    def left_s(self) -> float:
        """How long before the limit it begins, besides the last write."""
        return self._limit.renew_s(self._state.allocated_at)

    def is_due(self, write_s: float, now: float) -> bool:
        """Whether the job is requeued now: not if this life of it has done no new step, so that no run goes
        on for ever without getting anywhere. Functions do no steps, and are counted."""
        state = self._state
        keeps = self.keeps and state.phase is Phase.RUNNING and self._allowed
        wanted = keeps or self.may_begin_anew
        return wanted and self._limit.is_up(state.allocated_at, write_s, now)

    @property
    def may_begin_anew(self) -> bool:
        """Whether the policy has the job requeued now, if it would end otherwise."""
        state = self._state
        steady = state.phase is Phase.RUNNING and state.incident is None
        got_on = steady and state.first_step_at is not None and state.without_progress == 0
        return state.settings.renews and got_on and self._allowed

    @property
    def _allowed(self) -> bool:
        return self._state.requeue_allowed and self._state.end_order is None

    def order(self, by: str, left_s: float, now: float, *, timeout: bool) -> ev.Asked:
        """The order to requeue the job within `left_s`."""
        grace_s = KEEP_SHARE * left_s if self._state.timeouts_most else 0.0
        return ev.Asked(t=now, what=ev.REQUEUE, by=by, timeout=timeout, grace_s=grace_s)

    def refusal(self) -> str:
        """Why the job cannot be requeued now; or ""."""
        if self._state.phase is not Phase.RUNNING:
            return f"the run is {self._state.public_state}, and its ranks do not run"
        return "" if self._state.requeue_allowed else "its job was submitted with --no-requeue"

    def requested(self, what: str, by: str, now: float) -> ev.Event:
        """What follows from a user's request: at a function's last time limit, the run's end."""
        if what == TIMEOUT and not self.keeps:
            return ev.Signalled(t=now, signal="timeout")
        return self.order(by, self._limit.most_s, now, timeout=what == TIMEOUT)
