"""How long everything takes in a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.core.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S

# A run begins here: a time of 0 would read as "not known".
START = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """All in seconds.

    A failure costs `restart_s` and the steps since the newest complete save. `drain_s` is how long after
    its stall a save becomes complete, while steps go on and take `slowdown` (0.1: a tenth) more time.
    `repair_s` is what passes until a lost node, or another in its place, joins as a spare again.
    """

    detection_s: float = 2.0
    stop_s: float = 1.0
    launch_s: float = 5.0
    restore_s: float = 30.0
    warm_up_s: float = 0.0  # of the first step, more than the others take
    step_s: float = 5.0
    stall_s: float = 1.0
    drain_s: float = 0.0
    slowdown: float = 0.0
    repair_s: float = 6 * 3600.0
    requeue_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises ValueError for times that cannot be, or that the run's own limits would cut short."""
        if self.step_s <= 0.0:
            raise ValueError("a step takes some time")
        if min(self.__dict__.values()) < 0.0:
            raise ValueError("no duration is negative")
        if self.stop_s >= STOP_LIMIT_S or self.launch_s >= LAUNCH_LIMIT_S:
            raise ValueError(
                f"ranks stop within {STOP_LIMIT_S:.0f} s and start within {LAUNCH_LIMIT_S:.0f} s"
            )

    @property
    def restart_s(self) -> float:
        """From a failure to the first step after it, without waiting for a node."""
        return self.detection_s + self.stop_s + self.launch_s + self.restore_s + self.warm_up_s

    def time_of(self, steps: float, *, draining: bool) -> float:
        """Seconds that `steps` take; `draining`: a save was made just before them."""
        slow = self._slow_steps() if draining else 0.0
        return self.step_s * (steps + self.slowdown * min(steps, slow))

    def steps_in(self, seconds: float, *, draining: bool) -> int:
        """Whole steps done in `seconds`; the inverse of `time_of`."""
        slow = self._slow_steps() if draining else 0.0
        slow_s = slow * self.step_s * (1.0 + self.slowdown)
        if seconds < slow_s:
            return int(seconds / (self.step_s * (1.0 + self.slowdown)) + 1e-9)
        return int(slow + (seconds - slow_s) / self.step_s + 1e-9)

    def _slow_steps(self) -> float:
        return self.drain_s / (self.step_s * (1.0 + self.slowdown)) if self.slowdown else 0.0
