"""Formulas for how often to save, and what it costs. All times in seconds, goodput as a ratio 0..1.

Symbols: C is a save's cost while training waits, R the time from a failure until training continues, M the
mean time between failures of the whole run (1/M = lambda), tau the training time between two saves, Delta =
tau + C the time from save to save. Failures are exponential and may happen during saves and recoveries, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# A rate that is known to a factor of four is what a prior alone gives.
RATE_FACTOR = 4.0


def young_s(save_s: float, mtbf_s: float) -> float:
    """tau = sqrt(2 C M): Young, "A first order approximation to the optimum checkpoint interval", 1974."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def optimal_share(cost: float) -> float:
    """x = 1 + W0(-e^-(1 + cost)), where W0 is Lambert's W: the best tau / M for a save of cost = C / M.

    x solves x + cost + ln(1 - x) = 0. That form stays precise where W's argument is close to its branch point
    (cheap saves). It is concave, so Newton's method from the right stays on the right.
    """
    if cost <= 0.0:
        return 0.0
    # Below 1e-16 a further Newton step would only add rounding errors to Young's own result.
    x = min(math.sqrt(2.0 * cost), -math.expm1(-1.0 - cost))
    for _ in range(60):
        if x < 1e-7 or x >= 1.0:
            break
        step = (x + cost + math.log1p(-x)) * (1.0 - x) / x
        x += step
        if abs(step) < 1e-15 * x:
            break
    return x


def optimal_s(save_s: float, mtbf_s: float) -> float:
    """The tau that loses least, exactly: M (1 + W0(-e^-(1 + C/M))). It does not depend on R."""
    if math.isinf(mtbf_s):
        return math.inf if save_s > 0.0 else 0.0
    return mtbf_s * optimal_share(save_s / mtbf_s)


def goodput(tau_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """tau / (M e^(R/M) (e^((tau + C)/M) - 1)): training's share of the time, exact for exponential failures
    (Daly 2006, equation 20). 0 if it is too small for a float."""
    if tau_s <= 0.0:
        return math.exp(-restart_s / mtbf_s) if save_s <= 0.0 else 0.0
    if math.isinf(mtbf_s):
        return tau_s / (tau_s + save_s)
    try:
        return tau_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((tau_s + save_s) / mtbf_s))
    except OverflowError:
        return 0.0


@dataclass(frozen=True)
class Saving:
    """The cost of one kind of save. `stall_s`: training waits; `copy_s`: the copy continues in the
    background, slows training by the share `slowdown`, and only then protects; `restart_s`: from detection to
    training."""

    stall_s: float
    copy_s: float = 0.0
    slowdown: float = 0.0
    restart_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """The training time that one save takes, s + sigma d."""
        return self.stall_s + self.slowdown * self.copy_s


def async_goodput(interval_s: float, saving: Saving, mtbf_s: float) -> float:
    """The exact form with Delta = `interval_s`: training's part of an interval is Delta - s - sigma d, and a
    failure costs d more than R, because it destroys the unfinished save."""
    tau_s = interval_s - saving.cost_s
    return max(0.0, goodput(tau_s, saving.cost_s, mtbf_s, saving.restart_s + saving.copy_s))


def optimal_interval_s(saving: Saving, mtbf_s: float) -> float:
    """The Delta that loses least: max(d, tau + s + sigma d with the exact tau). A save does not begin before
    the one before it is complete."""
    return max(saving.copy_s, optimal_s(saving.cost_s, mtbf_s) + saving.cost_s)


@dataclass(frozen=True)
class TwoLevels:
    """A durable save every `durable_every` cheap ones, each `interval_s` long; `goodput` at that."""

    interval_s: float
    durable_every: int
    goodput: float

    @property
    def durable_interval_s(self) -> float:
        return self.interval_s * self.durable_every


def two_levels(
    cheap: Saving, durable: Saving, mtbf_s: float, durable_share: float, interval_s: float | None = None
) -> TwoLevels:
    """The pattern of Benoit et al., "Towards optimal multi-level checkpointing", 2017.

    `durable_share` of the failures destroy the cheap copies and lead back to the newest durable save. Each
    level alone has Delta_l = sqrt(2 C_l / lambda_l) (here: its exact form); a durable save is due every
    round(Delta_2 / Delta_1) cheap ones, and never before the previous one is complete. `interval_s` fixes the
    cheap interval. `durable.stall_s` is what a durable save costs beyond the cheap one from which it is made.
    Goodput: the exact form with the mean restart, copy and rework of both kinds of failure.
    """
    share = min(1.0, max(0.0, durable_share))
    first_s = mtbf_s / (1.0 - share) if share < 1.0 else math.inf
    second_s = mtbf_s / share if share > 0.0 else math.inf
    if interval_s is None:
        interval_s = optimal_interval_s(cheap, first_s if share < 1.0 else mtbf_s)
    wanted_s = optimal_interval_s(durable, second_s) if share > 0.0 else math.inf
    # A durable save that no failure needs has no optimum. One a day is kept for unforeseen failures.
    wanted_s = min(wanted_s, max(86_400.0, durable.copy_s))
    every = max(1, round(wanted_s / interval_s), math.ceil(durable.copy_s / interval_s - 1e-9))
    # Failures of the second kind lose half a durable interval instead of half a cheap one, and its copy.
    further_s = share * ((every - 1) * interval_s / 2.0 + durable.copy_s - cheap.copy_s)
    restart_s = (1.0 - share) * cheap.restart_s + share * durable.restart_s
    mean = replace(
        cheap,
        stall_s=cheap.stall_s + durable.cost_s / every,
        restart_s=restart_s + further_s,
    )
    return TwoLevels(interval_s, every, async_goodput(interval_s, mean, mtbf_s))


def sensitivity(saving: Saving, mtbf_s: float) -> float:
    """Return the goodput lost, 0..1, by the worse of two mistakes: the cadence was chosen for a failure rate
    that is too high, or too low, by `RATE_FACTOR`."""
    best = async_goodput(optimal_interval_s(saving, mtbf_s), saving, mtbf_s)
    wrong = (optimal_interval_s(saving, mtbf_s * off) for off in (RATE_FACTOR, 1.0 / RATE_FACTOR))
    return max(0.0, *(best - async_goodput(interval_s, saving, mtbf_s) for interval_s in wrong))
