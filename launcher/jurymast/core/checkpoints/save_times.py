"""When the ranks of an attempt save, as each rank computes it for itself, and whether to memory.

All ranks must save at the same step, although none knows another's clock. There are three ways: the script
names the steps; agents name them; or the ranks meet at a step on which they have agreed, and use rank 0's
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from jurymast.core.checkpoints.cadence import (
    NEVER,
    Cadence,
    first_interval_s,
    next_meeting,
    next_save_step,
    young_interval_s,
)


class Due(Enum):
    """What is due at a step."""

    NOTHING = "go on"
    MEASURE = "ask for memory: how large the state is can be seen now; `measured`"
    AGREE = "ask rank 0 for its `proposal`; `agreed`"
    SAVE = "save; `saved`"


class SaveTimes:
    """The times of one rank. `follows`: agents say when to save. Times are monotonic, in seconds; of values
    computed from them, rank 0's counts."""

    def __init__(self, cadence: Cadence, mtbf_s: float) -> None:
        self._cadence, self._mtbf_s = cadence, mtbf_s
        self.follows = False
        self._at = -1  # the step
        self._unmeasured = False
        self._agreed = -1  # at this step: it is time to save
        self._due_at = self._met_at = 0.0
        self._met_step, self._gap = -1, 1
        self._stall_s: float | None = None

    @property
    def begun(self) -> bool:
        return self._at >= 0

    @property
    def _by_clock(self) -> bool:
        """Whether only rank 0's clock says when to save."""
        return self._cadence.steps is None and not self.follows

    def begin(self, step: int, now: float) -> None:
        """Begin anew: nothing was saved, and the step time is not known."""
        self._gap = 1
        self.saved(step, now)

    def measure_after(self, step: int) -> None:
        """Measure after the first step: before it the state is incomplete, because optimizers have none
        yet."""
        self._unmeasured = True
        self._at = min(self._at, step + 1)

    def due(self, step: int, *, told: bool) -> Due:
        """Return what is due. `told`: agents say that this is a step to save at."""
        if step < self._at and not told:
            return Due.NOTHING
        if self._unmeasured:
            return Due.MEASURE
        return Due.AGREE if self._by_clock and self._agreed != step else Due.SAVE

    def measured(self, step: int) -> None:
        self._unmeasured = False
        if not self._by_clock:
            self._at = self._next_own(step - 1)

    def proposal(self, step: int, now: float) -> int:
        """Return where by this rank's clock the ranks should meet next: here, to save, or later."""
        step_s = (now - self._met_at) / max(1, step - self._met_step)
        return next_meeting(step, self._gap, self._due_at - now, step_s)

    def agreed(self, step: int, following: int, now: float) -> None:
        """Take rank 0's proposal."""
        if following > step:
            self._meet_at(following, step, now)
        else:
            self._agreed = step

    def saved(self, step: int, now: float, *, stall_s: float | None = None, again: bool = False) -> None:
        """Note a save, or that it failed. `stall_s`: how long training stood still, if it was saved now.
        `again`: try again at the next step, because memory will soon be ready."""
        self._stall_s = self._stall_s if stall_s is None else stall_s
        self._agreed = -1
        if again:
            self._due_at = now
            self._meet_at(step + 1, step, now)
        elif self._by_clock:
            self._due_at = now + self._interval_s()
            self._meet_at(step + self._gap, step, now)
        else:
            self._at = self._next_own(step)

    def _meet_at(self, following: int, step: int, now: float) -> None:
        self._at, self._gap = following, following - step
        self._met_step, self._met_at = step, now

    def _next_own(self, step: int) -> int:
        """The next step to save at that the script itself names."""
        return NEVER if self._cadence.steps is None else next_save_step(step, self._cadence.steps)

    def _interval_s(self) -> float:
        if self._cadence.seconds is not None:
            return self._cadence.seconds
        if self._stall_s is None:
            return first_interval_s(self._mtbf_s)
        return young_interval_s(self._stall_s, self._mtbf_s)


@dataclass(frozen=True)
class MemoryUse:
    """Whether an attempt saves to memory. None: that must wait, because some of these `ranks` have no memory
    yet. False: nodes of these `ranks` have none to give."""

    used: bool | None
    ranks: tuple[int, ...] = ()


def memory_of(answers: Sequence[tuple[bool, bool]]) -> MemoryUse:
    """Decide from `answers`: for each rank, whether its node has refused memory, and whether it is ready."""
    if refusing := tuple(rank for rank, (refused, _) in enumerate(answers) if refused):
        return MemoryUse(False, refusing)
    waiting = tuple(rank for rank, (_, ready) in enumerate(answers) if not ready)
    return MemoryUse(None, waiting) if waiting else MemoryUse(True)
