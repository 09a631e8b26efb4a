"""When to save: the formulas, and how ranks agree on a step without talking at every step.

Times are seconds, steps count from the start of the run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jurymast.core.failure_rate import DAY_S
from jurymast.core.optimum import young_s

# Stalls may take at most a tenth of the time, however short the time between failures.
STALLS_PER_INTERVAL_MIN = 10.0
AUTO_INTERVAL_MAX_S = 1800.0
# The first automatic save comes early: it measures the stall, and shows that the storage can be written.
AUTO_FIRST_SAVE_S = 300.0
STALL_GUESS_S = 10.0

_UNITS_S = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY_S}
_STEPS = re.compile(r"(\d+)\s*(?:steps?)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)")


@dataclass(frozen=True)
class Cadence:
    """Every `steps` steps, or every `seconds` seconds; both None is automatic."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise ValueError("a cadence is in steps or in time, not both")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a cadence of {self.steps} steps is not positive")
        if self.seconds is not None and not 0.0 < self.seconds < math.inf:
            raise ValueError(f"a cadence of {self.seconds} s is not positive")

    @property
    def automatic(self) -> bool:
        return self.steps is None and self.seconds is None


def parse_cadence(text: str | int) -> Cadence:
    """Read "auto", "200 steps", a number of steps, or a time ("90s", "10m", "1.5h"). Raises ValueError."""
    if isinstance(text, int):
        return Cadence(steps=text)
    plain = text.strip().lower()
    if plain == "auto":
        return Cadence()
    if match := _STEPS.fullmatch(plain):
        return Cadence(steps=int(match[1]))
    if match := _DURATION.fullmatch(plain):
        return Cadence(seconds=float(match[1]) * _UNITS_S[match[2]])
    raise ValueError(f"{text!r} is not a cadence; write '200 steps', '10m' or 'auto'")


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Time between saves that loses least: Young's sqrt(2 * stall * MTBF), within bounds.

    At most `AUTO_INTERVAL_MAX_S`, but never so often that stalls take more than a tenth of the time.
    """
    best_s = young_s(max(0.0, stall_s), max(0.0, mtbf_s))
    return max(min(best_s, AUTO_INTERVAL_MAX_S), STALLS_PER_INTERVAL_MIN * stall_s)


def first_interval_s(mtbf_s: float) -> float:
    """Time to the first automatic save, when the stall is not known yet."""
    return min(AUTO_FIRST_SAVE_S, young_interval_s(STALL_GUESS_S, mtbf_s))


def next_save_step(step: int, every: int) -> int:
    """First multiple of `every` after `step`: the same on every rank, whatever step it restored."""
    return (step // every + 1) * every


def next_meeting(step: int, gap: int, remaining_s: float, step_s: float) -> int:
    """The step at which ranks that save by time should meet after `step`; `step` itself means: save now.

    A save is due in `remaining_s`, steps took `step_s` lately, and the last meeting was `gap` steps ago. Only
    one rank's clock is asked, so ranks must meet to learn what it says, but not often: gaps at most double,
    so that slow first steps mislead nobody, and end half-way to the save, so that a changed step time is
    noticed. That makes about two meetings for every doubling of the number of steps between saves.
    """
    if remaining_s <= 0.5 * step_s:
        return step
    half_way = remaining_s / step_s / 2.0 if step_s > 0.0 else math.inf
    return step + int(max(1.0, min(2.0 * gap, half_way)))
