"""What the journal is told of a run that goes on as usual: less and less often, so that a journal of months
is still read in a second. What is out of the ordinary it is always told at once."""

from __future__ import annotations

from statistics import median

from jurymast.core import events as ev
from jurymast.core.run.state import Phase, RunState

# Everything is told while a run is young; then about so many lines of a kind until it is twice as old. What
# nobody wrote down is lost if all nodes die at once: never more than the longest pause.
YOUNG_S = 600.0
LINES = 500
PAUSE_MAX_S = 600.0
# Training stood still for a save much longer than usual: so many times as long, and this much more.
LONG_TIMES, LONG_S = 3.0, 0.1
SIZE_MOVED = 0.1


def pause_s(state: RunState, now: float) -> float:
    """Seconds from one line about the usual to the next of its kind, at `now`."""
    return min(PAUSE_MAX_S, max(0.0, now - state.submitted_at - YOUNG_S) / LINES)


def is_news(state: RunState, save: ev.Saved, last: ev.Saved | None) -> bool:
    """Whether a save is told at once. `last`: the one before it of its kind, told or not; None: nobody here
    knows of any."""
    if last is None or (last.attempt, last.tier) != (save.attempt, save.tier) or not (save.ok and last.ok):
        return True
    if state.phase is not Phase.RUNNING or state.incident is not None:
        return True
    asked_for = state.cadence is not None and state.cadence.by and save.step == state.cadence.first_step
    usual_s = median(state.stalls) if state.stalls else 0.0
    return (
        bool(asked_for)
        or save.stall_s > LONG_TIMES * usual_s + LONG_S
        or abs(save.size_bytes - last.size_bytes) > SIZE_MOVED * last.size_bytes
    )
