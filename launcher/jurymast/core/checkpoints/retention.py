"""Which checkpoints of a directory may go."""

from __future__ import annotations

from collections.abc import Sequence, Set


def superfluous(complete: Sequence[int], keep: int, pinned: Set[int], bad: Set[int]) -> list[int]:
    """Of the steps of complete checkpoints, newest first, those that may go: all but the newest `keep`. Those
    in `bad` neither count nor go, as they are somebody's evidence; `pinned` ones count, and stay."""
    good = [step for step in complete if step not in bad]
    return [step for step in good[max(1, keep) :] if step not in pinned]
