"""Decides whether the run hangs, from what every rank reported last, calibrated by the run's own step times.

Training is synchronous: one stuck rank stops all within a step, so the run hangs only if *no* rank steps. How
long is too long follows from the longest gap between steps seen so far (`longest`):

    every rank idle (a collective that waits, a deadlock):    2 x longest + IDLE_FLOOR_S
    some rank busy (an evaluation, a compilation, a spin):    3 x longest + BUSY_FLOOR_S

Silence alone proves nothing: a script may evaluate, upload or wait for a process of its own for the first
time, and a needless restart would cost more than any time-out saves. So from then on the ranks' stacks are
read again and again. The ranks hang if none of them moves: for `WAITING_S` if all are idle in collectives (no
rank is left to wake them), for `SPINNING_S` if they are busy there, otherwise for `UNMOVED_S`. torch's own
time-outs apply as well.

Before the first step there is no scale, and one rank may prepare something for the others. So stacks are read
after `START_IDLE_S` in which no rank used its processor (`START_BUSY_S` if one did), and ranks count as
hanging only after `START_WAITING_S` in collectives, or `START_UNMOVED_S` in the script's own code. A rank
whose data loader waits for a process that is stopped or gone hangs after `BLOCKED_S` at any time.

A process that somebody stopped (state T) needs no calibration, and a limit set by the policy needs no look at
stacks. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jurymast.core.nodes.stacks import BLOCKED, CODE, WAITING, Stand

FROZEN_S = 1.0
WAITING_S = 1.0
SPINNING_S = 30.0
UNMOVED_S = 120.0
START_IDLE_S = 20.0
START_BUSY_S = 300.0
START_WAITING_S = 10.0
START_UNMOVED_S = 300.0
BLOCKED_S = 10.0
# Between looks: soon, to see whether all waiting ranks still wait; otherwise rarely, as an evaluation may
# last for hours.
LOOK_AGAIN_S = 1.0
LOOK_SELDOM_S = 5.0
IDLE_FLOOR_S = 5.0
BUSY_FLOOR_S = 30.0
SAVE_FLOOR_S = 600.0
IDLE_SHARE = 0.05  # of one core
# More than this, read and written between two looks, is progress: a rank's processes always poll a little.
BUSY_BYTES = 256 * 1024


@dataclass(frozen=True)
class RankView:
    """One rank now. `quiet_s`: time since its last beat or change of phase; `stopped_s`: time in state T;
    `idle_s`: for how long its process has used less than `IDLE_SHARE` of a core."""

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
    """`certain`: no look at the ranks' stacks is needed. `idle`: no rank uses its processor. `starting`: some
    rank has not done a step yet."""

    ranks: tuple[int, ...]
    node: str
    silent_s: float
    limit_s: float
    evidence: str
    certain: bool = False
    idle: bool = False
    starting: bool = False


@dataclass(frozen=True)
class HangLimits:
    """`fixed_s`: the policy's own limit (None: calibrate, 0: off). `patience` grows after a false alarm."""

    fixed_s: float | None
    start_s: float
    patience: float = 1.0


def judge(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float = 0.0) -> HangVerdict | None:
    """Return the verdict on a run whose ranks all live, or None. `longest_before_s`: from earlier
    attempts."""
    if not ranks or limits.fixed_s == 0:
        return None
    stopped = [view for view in ranks if view.stopped_s >= FROZEN_S * limits.patience]
    if stopped:
        return _stopped_verdict(stopped, FROZEN_S * limits.patience)
    quiet_s = min(view.quiet_s for view in ranks)
    limit_s, why = _limit(ranks, limits, longest_before_s)
    if quiet_s <= limit_s:
        return None
    evidence = f"no rank stepped for {quiet_s:.1f} s; {why}"
    certain, starting = limit_s == limits.fixed_s, _before_first_step(ranks)
    return HangVerdict(
        (), "", quiet_s, limit_s, evidence, certain=certain, idle=_all_idle(ranks), starting=starting
    )


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
        certain=True,
    )


def _limit(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float) -> tuple[float, str]:
    if _before_first_step(ranks):
        return _start_limit(ranks, limits)
    if limits.fixed_s is not None:
        return limits.fixed_s, f"the policy's limit is {limits.fixed_s:g} s"
    longest_s = max(longest_before_s, *(view.longest_s for view in ranks))
    if any(view.phase == "saving" for view in ranks):
        limit_s = (SAVE_FLOOR_S + 3 * longest_s) * limits.patience
        return limit_s, f"limit {limit_s:.0f} s while a checkpoint is being saved"
    if _all_idle(ranks):
        limit_s = (IDLE_FLOOR_S + 2 * longest_s) * limits.patience
        return limit_s, f"all ranks idle, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"
    limit_s = (BUSY_FLOOR_S + 3 * longest_s) * limits.patience
    return limit_s, f"ranks busy, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"


def _before_first_step(ranks: Sequence[RankView]) -> bool:
    return any(view.phase in ("starting", "restoring") or view.beats == 0 for view in ranks)


def _start_limit(ranks: Sequence[RankView], limits: HangLimits) -> tuple[float, str]:
    limit_s, why = limits.start_s * limits.patience, "until the first step"
    if all(view.phase not in ("restoring", "saving") for view in ranks):
        idle = all(view.idle_s >= START_IDLE_S / 2 for view in ranks)
        floor_s = (START_IDLE_S if idle else START_BUSY_S) * limits.patience
        if floor_s < limit_s:
            limit_s, why = floor_s, f"{why} with {'all ranks idle' if idle else 'ranks busy'}"
    return limit_s, f"limit {limit_s:.0f} s {why}"


def _all_idle(ranks: Sequence[RankView]) -> bool:
    return all(view.idle_s >= IDLE_FLOOR_S / 2 for view in ranks)


def works(passed_s: float, cpu_s: float, size: int) -> bool:
    """Return whether a rank and the processes it has started did something in `passed_s`: they used `cpu_s`
    seconds of processors, and read and wrote `size` bytes."""
    return cpu_s > IDLE_SHARE * passed_s or size > BUSY_BYTES


@dataclass
class Looks:
    """Where the ranks were at each look at a silent run."""

    stands: dict[int, Stand] = field(default_factory=dict)
    since_s: float = 0.0  # the first look that found them as they are now
    until_s: float = 0.0

    def add(self, at_s: float, stands: Mapping[int, Stand]) -> None:
        if stands != self.stands:
            self.stands, self.since_s = dict(stands), at_s
        self.until_s = at_s

    def interval_s(self) -> float:
        """Return the seconds until the next look."""
        soon = self._all_wait() or any(stand.kind == BLOCKED for stand in self.stands.values())
        return LOOK_AGAIN_S if soon else LOOK_SELDOM_S

    def stuck(self, patience: float, *, idle: bool, starting: bool = False) -> bool:
        """Whether no rank has moved for long enough."""
        return bool(self.stands) and self.until_s - self.since_s >= self._limit_s(patience, idle, starting)

    def _limit_s(self, patience: float, idle: bool, starting: bool) -> float:
        kinds = {stand.kind for stand in self.stands.values()}
        if BLOCKED in kinds:
            return BLOCKED_S * patience
        if self._all_wait():
            wait_s = START_WAITING_S if starting else WAITING_S
            return wait_s if idle else max(wait_s, SPINNING_S * patience)
        return (START_UNMOVED_S if starting and CODE in kinds else UNMOVED_S) * patience

    def evidence(self) -> str:
        who = "all ranks wait for each other" if self._all_wait() else "no rank moved"
        return f"{who}, seen for {self.until_s - self.since_s:.1f} s"

    def _all_wait(self) -> bool:
        return all(stand.kind in WAITING for stand in self.stands.values())
