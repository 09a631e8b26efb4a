"""How often a simulated run saves: a given time, the best for a known failure rate, or learnt on the way.

Times are seconds, rates failures per 1,000 node-days.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jurymast.core.checkpoints.cadence import best_interval_s, moved, parse_cadence
from jurymast.core.planning.failure_rate import FailureRate, mtbf_s, prior
from jurymast.core.planning.optimum import Saving, optimal_s, young_s
from jurymast.sim.durations import START, Durations


class SimCadence(Protocol):
    """`interval_s` is the time between two saves from now on; `failed` tells of a lost node."""

    def interval_s(self, now: float) -> float: ...

    def failed(self, now: float) -> None: ...


@dataclass
class FixedCadence:
    seconds: float

    def interval_s(self, now: float) -> float:
        return self.seconds

    def failed(self, now: float) -> None:
        """It learns nothing."""


class AdaptiveCadence:
    """As a run decides it: the best interval at the mean of the posterior of the failure rate, changed when
    that has moved far enough to be worth it. `max_loss_s` bounds it as the policy's does."""

    def __init__(
        self, nodes: int, saving: Saving, prior_rate: float | None = None, max_loss_s: float = math.inf
    ) -> None:
        self._nodes, self._saving, self._max_loss_s = nodes, saving, max_loss_s
        self._interval_s = 0.0
        self.estimate = FailureRate(START, prior(prior_rate))

    def interval_s(self, now: float) -> float:
        self.estimate.watched(now, self._nodes)
        mean_s = self.estimate.posterior.mtbf_s(self._nodes)
        wanted_s = best_interval_s(self._saving, mean_s, self._max_loss_s)
        if moved(self._interval_s, wanted_s):
            self._interval_s = wanted_s
        return max(0.0, self._interval_s - self._saving.stall_s)

    def failed(self, now: float) -> None:
        self.estimate.watched(now, self._nodes)
        self.estimate.incident(now)


def goodput_of(
    cadence: SimCadence, failures_s: Sequence[float], seconds: float, save_s: float, restart_s: float,
    since_s: float = 0.0,
) -> float:  # fmt: skip
    """Share of the time from `since_s` to `seconds` in training that counted, when failures strike at these
    times, in order, and nothing but the cadence and `restart_s` (begun anew by a failure during it) matters:
    to compare thousands of cadences where a simulation of the whole run would take its time."""
    at = kept_s = 0.0
    for failure in (*(t for t in failures_s if t < seconds), seconds):
        interval_s = cadence.interval_s(START + at)
        while at + interval_s + save_s <= failure:
            kept_s += max(0.0, min(interval_s, at + interval_s - since_s))
            at += interval_s + save_s
            interval_s = cadence.interval_s(START + at)
        if failure < seconds:
            cadence.failed(START + failure)
            at = failure + restart_s
        else:  # what the end finds is not lost
            kept_s += max(0.0, min(interval_s, seconds - at))
    return kept_s / (seconds - since_s)


Factory = Callable[[], SimCadence]


def cadence_factory(
    text: str, nodes: int, rate: float, durations: Durations, prior_rate: float | None = None,
    max_loss_s: float = math.inf,
) -> Factory:  # fmt: skip
    """What `--cadence` says: `fixed:60m` (or `60m`), `young` (at the true `rate`), `optimum` (the same with
    the exact formula) or `adaptive` (from `prior_rate`, None: what is usual; a failure costs at most
    `max_loss_s` of training). A new one for each run.

    Raises ValueError.
    """
    saving = Saving(durations.stall_s, durations.drain_s, durations.slowdown, durations.restart_s)
    word = text.strip().lower()
    if word in ("adaptive", "auto"):
        return lambda: AdaptiveCadence(nodes, saving, prior_rate, max_loss_s)
    if word in ("young", "optimum") and rate > 0.0:
        mean_s = mtbf_s(nodes, rate)
        best_s = young_s(saving.cost_s, mean_s) if word == "young" else optimal_s(saving.cost_s, mean_s)
        return lambda: FixedCadence(best_s)
    if word in ("young", "optimum"):
        return lambda: FixedCadence(math.inf)
    given = parse_cadence(word.removeprefix("fixed:"))
    if given.automatic:
        raise ValueError(f"{text!r} is not a cadence; write 'fixed:60m', 'young' or 'adaptive'")
    seconds = given.seconds if given.seconds is not None else (given.steps or 1) * durations.step_s
    return lambda: FixedCadence(seconds)
