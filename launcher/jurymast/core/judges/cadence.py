"""When to save: the interval that loses least, and how a rank follows it, so that all ranks save at the same
steps. Also whether an attempt saves to memory.

In a run of jurymast the supervisor decides, from the cost of all ranks' saves and the failure rate, and sends
ranks a `Schedule` (`worker.link` describes how they agree on it). Under plain torchrun, rank 0's clock
decides, and the others learn its decision at steps on which all have agreed before (agreements). A script may
also name the steps itself.

Times are seconds; steps count from the start of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from jurymast.core.judges.forecast import (
    DURABLE_SHARE,
    Saving,
    async_goodput,
    optimal_interval_s,
    two_levels,
    young_s,
)
from jurymast.core.state.incident import APPLICATION, INFRASTRUCTURE, Incident
from jurymast.core.state.schedule import NEVER
from jurymast.core.state.texts import seconds_in

# Stalls may take at most a tenth of the time, however short the time between failures.
STALLS_PER_INTERVAL_MIN = 10.0
AUTO_INTERVAL_MAX_S = 1800.0
# The first automatic save comes early: it measures the stall, and shows that the storage can be written.
AUTO_FIRST_SAVE_S = 300.0
STALL_GUESS_S = 10.0
# Goodput is flat around the best interval: at 1.25 times it, a save and its rework cost 2.5 % more than they
# must. A cadence that moved with every measurement would be no cadence.
HYSTERESIS = 1.25
# The share of failures that only durable saves survive, where no copies are kept on other nodes: each lost
# node then is one, and that is about half of all failures.
DURABLE_SHARE_ALONE = 0.5
# After this many failures, observations weigh as much as the prior.
SHARE_WEIGHT = 20.0
# Until a run has a past, its durable copies are never further apart than this share of its age.
AGE_SHARE = 0.1

# So many failures, of whatever kind, in so small a share of the time in which as many are expected are no
# chance: of a Poisson process, three or more where 3/8 is expected have a probability of 0.6 %.
LATELY, LATELY_SHARE = 3, 1 / 8
# Then the first save comes after this share of the time that attempts live.
FIRST_SHARE = 0.5
# No attempt that did a step is taken to live for less, and no save follows another one sooner, in seconds:
# copies of that one are still on their way to other nodes.
SHORTEST_S = 1.0

_STEPS = re.compile(r"(\d+)\s*(?:steps?)?")


@dataclass(frozen=True)
class Cadence:
    """A save every `steps` steps, or every `seconds` seconds; both None is automatic."""

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
    """Parse "auto", "200 steps", a number of steps, or a time ("90s", "10m", "1.5h"). Raises ValueError."""
    if isinstance(text, int):
        return Cadence(steps=text)
    plain = text.strip().lower()
    if plain == "auto":
        return Cadence()
    if match := _STEPS.fullmatch(plain):
        return Cadence(steps=int(match[1]))
    if (seconds := seconds_in(plain)) is not None:
        return Cadence(seconds=seconds)
    raise ValueError(f"{text!r} is not a cadence; write '200 steps', '10m' or 'auto'")


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Return the time between saves that loses least: Young's sqrt(2 * stall * MTBF), within bounds.

    The bounds are `AUTO_INTERVAL_MAX_S`, and at most a tenth of the time spent in stalls.
    """
    best_s = young_s(max(0.0, stall_s), max(0.0, mtbf_s))
    return max(min(best_s, AUTO_INTERVAL_MAX_S), STALLS_PER_INTERVAL_MIN * stall_s)


def first_interval_s(mtbf_s: float) -> float:
    """Return the time to the first automatic save, while the stall is not known yet."""
    return min(AUTO_FIRST_SAVE_S, young_interval_s(STALL_GUESS_S, mtbf_s))


def lately_s(incidents: Sequence[Incident], up_s: float, mtbf_s: float) -> float | None:
    """Return the mean time between the last failures, in seconds, if they came so much closer to each other
    than every `mtbf_s` that this cannot be chance: bursts, and failures of the script, are not in that rate.
    `up_s`: how long the present ranks have been up. It grows again as they live."""
    lived_s, failures = up_s, 0
    for incident in reversed(incidents):
        lived_s += incident.lived_s
        failures += incident.steps_done > 0 and incident.charged in (INFRASTRUCTURE, APPLICATION)
        if failures == LATELY:
            return max(SHORTEST_S, lived_s / LATELY) if lived_s < LATELY_SHARE * LATELY * mtbf_s else None
    return None


def next_save_step(step: int, every: int) -> int:
    """Return the first multiple of `every` after `step`: the same on every rank, whatever step it
    restored."""
    return (step // every + 1) * every


def next_agreement(step: int, gap: int, remaining_s: float, step_s: float) -> int:
    """Return the step after `step` at which ranks that save by time should meet; `step` itself means: save
    now.

    A save is due in `remaining_s`, steps took `step_s` lately, and the last agreement is `gap` steps old.
    Only one rank's clock counts, so ranks must meet to learn what it says, but not often. Gaps at most
    double, so that slow first steps do not mislead, and end half-way to the save, so that a changed step
    time is noticed. That makes about two agreements for every doubling of the number of steps between saves.
    """
    if remaining_s <= 0.5 * step_s:
        return step
    half_way = remaining_s / step_s / 2.0 if step_s > 0.0 else math.inf
    return step + int(max(1.0, min(2.0 * gap, half_way)))


def best_interval_s(saving: Saving, mtbf_s: float, max_loss_s: float) -> float:
    """Return the time between saves that loses least, within bounds: a failure costs at most `max_loss_s` of
    training, unless stalls would then take more than a tenth of the time, or saves would overlap."""
    best_s = optimal_interval_s(saving, mtbf_s)
    return max(
        min(best_s, max_loss_s - saving.copy_s), STALLS_PER_INTERVAL_MIN * saving.stall_s, saving.copy_s
    )


def why_interval(saving: Saving, mtbf_s: float, max_loss_s: float) -> str:
    """Say which of the bounds of `best_interval_s` applies."""
    chosen_s = best_interval_s(saving, mtbf_s, max_loss_s)
    if chosen_s > max_loss_s - saving.copy_s:
        return "as often as the cost of a save allows"
    if chosen_s < optimal_interval_s(saving, mtbf_s):
        return "so that no failure costs more than max_loss"
    return "what loses least at this failure rate"


def moved(before: float, now: float) -> bool:
    """Return whether a cadence is so far from the wanted one that a change is worth it."""
    return before <= 0.0 or not 1.0 / HYSTERESIS < now / before < HYSTERESIS


def cost_if(interval_s: float, saving: Saving, mtbf_s: float, factor: float = 2.0) -> float:
    """Return the goodput lost, 0..1, if failures come `factor` times as often and the interval stays."""
    true_s = mtbf_s / factor
    best = async_goodput(optimal_interval_s(saving, true_s), saving, true_s)
    return max(0.0, best - async_goodput(interval_s, saving, true_s))


def durable_share(failures: int, durable: int, copies_elsewhere: bool) -> float:
    """Return the share of failures that only durable saves survive, after `durable` of `failures` were such:
    the mean of a Beta posterior."""
    expected = DURABLE_SHARE if copies_elsewhere else DURABLE_SHARE_ALONE
    return (SHARE_WEIGHT * expected + durable) / (SHARE_WEIGHT + failures)


def durable_interval_s(
    cheap: Saving, durable: Saving, mtbf_s: float, share: float, max_loss_s: float, age_s: float
) -> float:
    """Return the time between durable saves by the two-level optimum. As the share is a guess at first, the
    time is bounded by `max_loss_s` and by a tenth of what the run can lose, its age; but it is not shorter
    than what would lose least if no copies on other nodes survived anything."""
    interval_s = best_interval_s(cheap, mtbf_s, max_loss_s) or 1.0
    found = two_levels(cheap, durable, mtbf_s, share, interval_s, most_s=max_loss_s)
    alone_s = optimal_interval_s(durable, mtbf_s / DURABLE_SHARE_ALONE)
    return min(found.durable_interval_s, max(AGE_SHARE * age_s, alone_s))


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
        return next_agreement(step, self._gap, self._due_at - now, step_s)

    def agreed(self, step: int, following: int, now: float) -> None:
        """Take rank 0's proposal."""
        if following > step:
            self._agree_at(following, step, now)
        else:
            self._agreed = step

    def saved(self, step: int, now: float, *, stall_s: float | None = None, again: bool = False) -> None:
        """Note a save, or that it failed. `stall_s`: how long training stood still, if it was saved now.
        `again`: try again at the next step, because memory will soon be ready."""
        self._stall_s = self._stall_s if stall_s is None else stall_s
        self._agreed = -1
        if again:
            self._due_at = now
            self._agree_at(step + 1, step, now)
        elif self._by_clock:
            self._due_at = now + self._interval_s()
            self._agree_at(step + self._gap, step, now)
        else:
            self._at = self._next_own(step)

    def _agree_at(self, following: int, step: int, now: float) -> None:
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
