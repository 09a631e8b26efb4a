"""Measures how much copies of saves slow the training: images that are hashed, sent to other nodes and
written while steps go on.

Each heartbeat shows when a step ended. From one save to the next, the steps during which no copy was under
way say how long a step takes by itself; whatever the others took longer, except for the stall, the copies
have cost. That includes all that copies take from ranks: processors, memory, network and disks. Other load
on the machine slows both kinds of steps; what it does to single intervals is left out by the median of the
last ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Fewer steps without copies say too little of how long one takes.
QUIET_STEPS = 4
# From so many saves on it is known; of so many it is the median.
LEAST_SAVES, RECENT_SAVES = 3, 15
SLOWDOWN_MAX = 1.0
# Step ends that are kept of one interval, at two a second: more of a long one say nothing new.
ENDS_MAX = 2000


@dataclass(frozen=True)
class StepEnd:
    """When the last of `step` steps ended."""

    step: int
    at: float


@dataclass(frozen=True)
class Copying:
    """A copy was under way from `since` to `until`."""

    since: float
    until: float


@dataclass(frozen=True)
class Between:
    """What the steps from a save to the next show: how long a step takes while no copy is under way, None if
    there were too few; the other steps, and for how long they took together, without the stall."""

    quiet_step_s: float | None
    steps: int
    seconds: float


def between(ends: Sequence[StepEnd], saved: int, stall_s: float, copies: Sequence[Copying]) -> Between:
    """Judge the time from the first of `ends` to the last. Within it step `saved` was saved, for which the
    training stood still for `stall_s`."""
    quiet_steps, quiet_s, steps, seconds = 0, 0.0, 0, -stall_s
    for begin, end in pairwise(ends):
        done, took_s = end.step - begin.step, end.at - begin.at
        disturbed = begin.step <= saved < end.step or any(
            one.since < end.at and one.until > begin.at for one in copies
        )
        if disturbed:
            steps, seconds = steps + done, seconds + took_s
        else:
            quiet_steps, quiet_s = quiet_steps + done, quiet_s + took_s
    quiet_step_s = quiet_s / quiet_steps if quiet_steps >= QUIET_STEPS else None
    return Between(quiet_step_s, steps, seconds)


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of (value, weight)."""
    half = sum(weight for _, weight in values) / 2.0
    passed = 0.0
    for value, weight in sorted(values):
        passed += weight
        if passed >= half:
            return value
    return 0.0


class Slowdown:
    """The share by which steps are slower while copies are under way. Times are the supervisor's clock."""

    def __init__(self) -> None:
        # Of each interval: the share, and for how long copies were under way in it.
        self._found = deque[tuple[float, float]](maxlen=RECENT_SAVES)
        self._quiet_step_s: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begin anew with other ranks: what was measured before still holds."""
        self._ends = list[StepEnd]()
        self._copies = list[Copying]()
        self._saved: tuple[int, float] | None = None  # the step, and the stall
        self._seconds = 0.0  # of copies that ended since then

    @property
    def share(self) -> float | None:
        """None: not known yet."""
        if len(self._found) < LEAST_SAVES:
            return None
        return min(SLOWDOWN_MAX, max(0.0, weighted_median(self._found)))

    def on_step(self, step: int, at: float) -> None:
        """A heartbeat shows that the last of `step` steps ended then."""
        ends = self._ends
        if ends and (step <= ends[-1].step or at <= ends[-1].at):
            return
        if self._saved is None or len(ends) >= ENDS_MAX:
            del ends[-1:]
        ends.append(StepEnd(step, at))

    def on_copied(self, now: float, seconds: float) -> None:
        """A copy is complete, or was given up, after so many seconds."""
        self._copies.append(Copying(now - seconds, now))
        self._seconds += seconds

    def on_saved(self, step: int, stall_s: float, copying_since: float, now: float) -> None:
        """All ranks have saved `step`. A copy to storage has been under way since `copying_since` (inf:
        none)."""
        # The end of a step that was saved is told as before the save or as after it.
        before = [end for end in self._ends if end.step < step]
        if self._saved is not None and len(before) > 1:
            self._judge(before, *self._saved, [*self._copies, Copying(copying_since, now)])
        self._ends = [*before[-1:], *(end for end in self._ends if end.step > step)]
        since = self._ends[0].at if self._ends else now
        self._copies = [one for one in self._copies if one.until > since]
        self._saved, self._seconds = (step, stall_s), 0.0

    def _judge(self, ends: list[StepEnd], saved: int, stall_s: float, copies: list[Copying]) -> None:
        found = between([end for end in ends if end.step != saved], saved, stall_s, copies)
        self._quiet_step_s = found.quiet_step_s or self._quiet_step_s
        if self._quiet_step_s is not None and self._seconds > 0.0:
            longer_s = found.seconds - found.steps * self._quiet_step_s
            self._found.append((longer_s / self._seconds, self._seconds))
