"""How often a simulated run saves: a given time, the best for a known failure rate, or learnt on the way.

Times are seconds, rates failures per 1,000 node-days.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jurymast.core.cadence import parse_cadence
from jurymast.core.failure_rate import FailureRate, mtbf_s, prior
from jurymast.core.optimum import optimal_s, young_s
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
    """The best interval at the mean of the posterior of the failure rate."""

    def __init__(self, nodes: int, cost_s: float, start_s: float, prior_rate: float | None = None) -> None:
        self._nodes, self._cost_s = nodes, cost_s
        self.estimate = FailureRate(start_s, prior(prior_rate))

    def interval_s(self, now: float) -> float:
        self.estimate.watched(now, self._nodes)
        return optimal_s(self._cost_s, self.estimate.posterior.mtbf_s(self._nodes))

    def failed(self, now: float) -> None:
        self.estimate.watched(now, self._nodes)
        self.estimate.incident(now)


Factory = Callable[[], SimCadence]


def cadence_factory(
    text: str, nodes: int, rate: float, durations: Durations, prior_rate: float | None = None
) -> Factory:
    """What `--cadence` says: `fixed:60m` (or `60m`), `young` (at the true `rate`), `optimum` (the same with
    the exact formula) or `adaptive` (from `prior_rate`, None: what is usual). A new one for each run.

    Raises ValueError.
    """
    cost_s = durations.stall_s + durations.slowdown * durations.drain_s
    word = text.strip().lower()
    if word in ("adaptive", "auto"):
        return lambda: AdaptiveCadence(nodes, cost_s, START, prior_rate)
    if word in ("young", "optimum") and rate > 0.0:
        mean_s = mtbf_s(nodes, rate)
        best_s = young_s(cost_s, mean_s) if word == "young" else optimal_s(cost_s, mean_s)
        return lambda: FixedCadence(best_s)
    if word in ("young", "optimum"):
        return lambda: FixedCadence(math.inf)
    given = parse_cadence(word.removeprefix("fixed:"))
    if given.automatic:
        raise ValueError(f"{text!r} is not a cadence; write 'fixed:60m', 'young' or 'adaptive'")
    seconds = given.seconds if given.seconds is not None else (given.steps or 1) * durations.step_s
    return lambda: FixedCadence(seconds)
