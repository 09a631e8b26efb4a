"""Mean time between failures, with its interval.

Failures come as a Poisson process over an observed time T with n failures, so that the true mean lies
between 2T / chi2(0.95, 2n + 2) and 2T / chi2(0.05, 2n) with 90 %; without any failure there is no upper end.
A chi-square quantile with 2k degrees of freedom is twice the Gamma(k) quantile, and for whole k

    P(Gamma(k) <= x) = 1 - exp(-x) * sum(x^i / i!, i < k)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEVEL = 0.90


@dataclass(frozen=True)
class Mtbf:
    """Seconds; `mean` and `high` are None without a failure, all are None before anything was observed."""

    failures: int
    observed_s: float
    mean_s: float | None
    low_s: float | None
    high_s: float | None


def poisson_below(k: int, x: float) -> float:
    """P(fewer than `k` events) when `x` are expected, summed in logarithms so that nothing overflows."""
    if x <= 0.0:
        return 1.0 if k > 0 else 0.0
    logs = [i * math.log(x) - x - math.lgamma(i + 1) for i in range(k)]
    return min(1.0, math.fsum(math.exp(value) for value in logs))


def gamma_quantile(k: int, probability: float) -> float:
    """x with P(Gamma(k) <= x) = `probability`, for whole k >= 1 and 0 < probability < 1."""
    low, high = 0.0, k + 10.0 * math.sqrt(k) + 10.0
    while 1.0 - poisson_below(k, high) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if 1.0 - poisson_below(k, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def mtbf(failures: int, observed_s: float, level: float = LEVEL) -> Mtbf:
    """MTBF after `failures` in `observed_s` seconds, with its interval at `level`."""
    if observed_s <= 0.0:
        return Mtbf(failures, 0.0, None, None, None)
    tail = (1.0 - level) / 2.0
    low = observed_s / gamma_quantile(failures + 1, 1.0 - tail)
    if failures == 0:
        return Mtbf(0, observed_s, None, low, None)
    return Mtbf(failures, observed_s, observed_s / failures, low, observed_s / gamma_quantile(failures, tail))
