"""Mean time between failures, with its interval.

Failures are modeled as a Poisson process with n failures in an observed time T, so the true mean is between
2T / chi2(0.95, 2n + 2) and 2T / chi2(0.05, 2n) with 90 %; without any failure there is no upper end. A
chi-square quantile with 2k degrees of freedom is twice the Gamma(k) quantile, and for whole k

    P(Gamma(k) <= x) = 1 - exp(-x) * sum(x^i / i!, i < k) = 1 - P(fewer than k events when x are expected)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEVEL = 0.90


@dataclass(frozen=True)
class Mtbf:
    """Mean time between failures, in seconds; `mean` and `high` are None without a failure, all are None
    before any observation."""

    failures: int
    observed_s: float
    mean_s: float | None
    low_s: float | None
    high_s: float | None


def gamma_below(shape: float, x: float) -> float:
    """Return P(Gamma(shape) <= x) at scale 1: the regularized lower incomplete gamma function, to about
    1e-14.

    It uses the power series below x = shape + 1 and Legendre's continued fraction above it (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 6.5.29 and 6.5.31), each where it converges fast.
    """
    if x <= 0.0:
        return 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        term = total = 1.0 / shape
        k = shape
        while term > 1e-17 * total:
            k += 1.0
            term *= x / k
            total += term
        return min(1.0, front * total)
    return max(0.0, 1.0 - front * _upper_fraction(shape, x))


def _upper_fraction(shape: float, x: float) -> float:
    """The continued fraction of the upper incomplete gamma function by Lentz's method, for x > shape."""
    b = x + 1.0 - shape
    c, d = 1e300, 1.0 / b
    value = d
    for i in range(1, 100_000):
        a = i * (shape - i)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def gamma_quantile(shape: float, probability: float) -> float:
    """Return x with P(Gamma(shape) <= x) = `probability`, for shape > 0 and 0 < probability < 1; by
    bisection."""
    low, high = 0.0, shape + 10.0 * math.sqrt(shape) + 10.0
    while gamma_below(shape, high) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if gamma_below(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def mtbf(failures: int, observed_s: float) -> Mtbf:
    """Return the MTBF after `failures` in `observed_s` seconds, with its interval at `LEVEL`."""
    if observed_s <= 0.0:
        return Mtbf(failures, 0.0, None, None, None)
    tail = (1.0 - LEVEL) / 2.0
    low = observed_s / gamma_quantile(failures + 1, 1.0 - tail)
    if failures == 0:
        return Mtbf(0, observed_s, None, low, None)
    return Mtbf(failures, observed_s, observed_s / failures, low, observed_s / gamma_quantile(failures, tail))
