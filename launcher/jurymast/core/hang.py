"""Is the run hung? A decision over what every rank last said, calibrated by the run's own step times.

Training is synchronous: one stuck rank stops all within a step, so the run hangs only when *no* rank
steps. How long is too long follows from the longest gap between steps seen so far (`longest`):

    every rank idle (a collective that waits, a dead lock):   2 x longest + IDLE_FLOOR_S
    some rank busy (an evaluation, a compilation, a spin):    3 x longest + BUSY_FLOOR_S

A process that somebody stopped (state T) needs no calibration. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FROZEN_S = 1.0
IDLE_FLOOR_S = 5.0
BUSY_FLOOR_S = 30.0
SAVE_FLOOR_S = 600.0
IDLE_SHARE = 0.05  # of one core


@dataclass(frozen=True)
class RankView:
    """One rank now. `quiet_s`: since its last beat or change of phase; `stopped_s`: in state T for so long;
    `idle_s`: its process has used less than `IDLE_SHARE` of a core for so long."""

    rank: int
    node: str
    phase: str
    beats: int
    quiet_s: float
    longest_s: float
    idle_s: float
    stopped_s: float


@dataclass(frozen=True)
class HangVerdict:
    ranks: tuple[int, ...]
    node: str
    silent_s: float
    limit_s: float
    evidence: str


@dataclass(frozen=True)
class HangLimits:
    """`fixed_s`: the policy's own limit (None: calibrate, 0: off). `patience` doubles after a false alarm."""

    fixed_s: float | None
    start_s: float
    patience: float = 1.0


def judge(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float = 0.0) -> HangVerdict | None:
    """The verdict on a run whose ranks all live, or None. `longest_before_s`: from earlier attempts."""
    if not ranks or limits.fixed_s == 0:
        return None
    stopped = [view for view in ranks if view.stopped_s >= FROZEN_S * limits.patience]
    if stopped:
        return _stopped_verdict(stopped, FROZEN_S * limits.patience)
    quiet_s = min(view.quiet_s for view in ranks)
    limit_s, why = _limit(ranks, limits, longest_before_s)
    if quiet_s <= limit_s:
        return None
    return HangVerdict((), "", quiet_s, limit_s, f"no rank stepped for {quiet_s:.1f} s; {why}")


def _stopped_verdict(stopped: list[RankView], limit_s: float) -> HangVerdict:
    names = ", ".join(f"rank {view.rank} on {view.node}" for view in stopped)
    nodes = {view.node for view in stopped}
    silent_s = max(max(view.stopped_s, view.quiet_s) for view in stopped)
    return HangVerdict(
        tuple(view.rank for view in stopped),
        nodes.pop() if len(nodes) == 1 else "",
        silent_s,
        limit_s,
        f"stopped by a signal (process state T): {names}",
    )


def _limit(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float) -> tuple[float, str]:
    if any(view.phase in ("starting", "restoring") or view.beats == 0 for view in ranks):
        limit_s = limits.start_s * limits.patience
        return limit_s, f"limit {limit_s:.0f} s until the first step"
    if limits.fixed_s is not None:
        return limits.fixed_s, f"the policy's limit is {limits.fixed_s:g} s"
    longest_s = max(longest_before_s, *(view.longest_s for view in ranks))
    if any(view.phase == "saving" for view in ranks):
        limit_s = (SAVE_FLOOR_S + 3 * longest_s) * limits.patience
        return limit_s, f"limit {limit_s:.0f} s while a checkpoint is being saved"
    if all(view.idle_s >= IDLE_FLOOR_S / 2 for view in ranks):
        limit_s = (IDLE_FLOOR_S + 2 * longest_s) * limits.patience
        return limit_s, f"all ranks idle, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"
    limit_s = (BUSY_FLOOR_S + 3 * longest_s) * limits.patience
    return limit_s, f"ranks busy, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"
