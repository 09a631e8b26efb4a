"""At which steps all ranks save, as the supervisor tells ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

NEVER = sys.maxsize


@dataclass(frozen=True)
class Schedule:
    """From step `at` on: save at step `first`, and every `every` steps after it (0: not again).

    `number` grows from one schedule to the next. What a rank saves depends only on the schedule and the step,
    so a rank that learns of it late does the same as the others from then on. `stays`: after the save of
    `first` the ranks wait, because they are about to be placed anew: what they did then would be done again.
    """

    number: int
    at: int
    first: int
    every: int
    stays: bool = False

    def due_after(self, step: int) -> int:
        """Return the first step after `step` that is to be saved; NEVER if there is none."""
        if step < self.first:
            return self.first
        if self.every <= 0:
            return NEVER
        return self.first + ((step - self.first) // self.every + 1) * self.every
