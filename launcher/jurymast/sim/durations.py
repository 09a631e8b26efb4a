"""How long everything takes in a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jurymast.core.run.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S

# A run begins here: a time of 0 would read as "not known".
START = 86_400.0

# Kinds of failure. A power loss is noticed by silence, a crash by a connection that is reset, a killed rank
# and a failure of the script by the node's agent, a hang by steps that do not come.
POWER_LOSS, NODE_CRASH, WORKER_KILL, SCRIPT, HANG = KINDS = (
    "power_loss", "node_crash", "worker_kill", "script", "hang",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds from a failure until it is noticed, until all ranks are stopped, and from the order to launch
    until new ones have started."""

    detect_s: float = 0.0
    stop_s: float = 0.0
    launch_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """All in seconds.

    A failure costs `restart_s` and the steps since the newest complete save. `copy_s` is how long after
    its stall a save becomes complete, while steps go on and take `slowdown` (0.1: a tenth) more time.
    `repair_s` is what passes until a lost node, or another in its place, joins as a spare again.

    `detection_s`, `stop_s` and `launch_s` are those of a node that falls silent. `kinds` has the parts of
    others; a kind without an entry is noticed at once and else takes the same. How long a hang goes
    unnoticed is the hang detector's own decision.

    Saves are in two tiers when `write_s` is given: complete means two copies in memory, and now and then one
    is written to durable storage, which takes so long and costs training nothing; `read_s` is a restore from
    there. None: a complete save survives everything.
    """

    detection_s: float = 2.0
    stop_s: float = 1.0
    launch_s: float = 5.0
    restore_s: float = 30.0
    warm_up_s: float = 0.0  # of the first step, more than the others take
    step_s: float = 5.0
    stall_s: float = 1.0
    copy_s: float = 0.0
    slowdown: float = 0.0
    repair_s: float = 6 * 3600.0
    requeue_s: float = 600.0
    write_s: float | None = None
    read_s: float = 0.0
    kinds: Mapping[str, Parts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for times that cannot be, or that the run's own limits would cut short."""
        if self.step_s <= 0.0:
            raise ValueError("a step takes some time")
        parts = [self.parts(kind) for kind in KINDS]
        times = [value for value in self.__dict__.values() if isinstance(value, int | float)]
        if min(*times, *(value for each in parts for value in vars(each).values())) < 0.0:
            raise ValueError("no duration is negative")
        if any(each.stop_s >= STOP_LIMIT_S or each.launch_s >= LAUNCH_LIMIT_S for each in parts):
            raise ValueError(
                f"ranks stop within {STOP_LIMIT_S:.0f} s and start within {LAUNCH_LIMIT_S:.0f} s"
            )

    def parts(self, kind: str) -> Parts:
        if kind in self.kinds and kind != POWER_LOSS:
            return self.kinds[kind]
        noticed_s = self.detection_s if kind == POWER_LOSS else 0.0
        return Parts(detect_s=noticed_s, stop_s=self.stop_s, launch_s=self.launch_s)

    @property
    def restart_s(self) -> float:
        """From a node's loss to the first step after it, without waiting for a node."""
        return self.detection_s + self.stop_s + self.launch_s + self.restore_s + self.warm_up_s

    def time_of(self, steps: float, *, copying: bool) -> float:
        """Seconds that `steps` take; `copying`: a save was made just before them."""
        slow = self._slow_steps() if copying else 0.0
        return self.step_s * (steps + self.slowdown * min(steps, slow))

    def steps_in(self, seconds: float, *, copying: bool) -> int:
        """Whole steps done in `seconds`; the inverse of `time_of`."""
        slow = self._slow_steps() if copying else 0.0
        slow_s = slow * self.step_s * (1.0 + self.slowdown)
        if seconds < slow_s:
            return int(seconds / (self.step_s * (1.0 + self.slowdown)) + 1e-9)
        return int(slow + (seconds - slow_s) / self.step_s + 1e-9)

    def _slow_steps(self) -> float:
        return self.copy_s / (self.step_s * (1.0 + self.slowdown)) if self.slowdown else 0.0
