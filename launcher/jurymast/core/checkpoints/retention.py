"""Which states count, and which checkpoints of a directory may be removed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass


def superfluous(complete: Sequence[int], keep: int, pinned: Set[int], bad: Set[int]) -> list[int]:
    """Return, from the steps of complete checkpoints, newest first, those that may be removed: all but the
    newest `keep`. Steps in `bad` neither count nor are removed, because they are evidence; `pinned` ones
    count and stay."""
    good = [step for step in complete if step not in bad]
    return [step for step in good[max(1, keep) :] if step not in pinned]


@dataclass(frozen=True)
class Rollback:
    """Every state newer than `step` that attempts up to `attempt` saved is void. `at`: Unix time."""

    step: int
    attempt: int
    at: float

    def voids(self, step: int, attempt: int) -> bool:
        return step > self.step and attempt <= self.attempt
