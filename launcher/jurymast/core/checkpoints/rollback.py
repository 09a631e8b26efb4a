"""Going back by hand: which states do not count any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rollback:
    """Every state newer than `step` that attempts up to `attempt` saved is void. `at`: Unix time."""

    step: int
    attempt: int
    at: float

    def voids(self, step: int, attempt: int) -> bool:
        return step > self.step and attempt <= self.attempt
