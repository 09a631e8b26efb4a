"""How many spare nodes a run requests: from the failure rate, the time a replacement takes, and the cost.

X, the number of nodes out of service at a time, is negative binomial with mean mu = N r L and variance mu +
mu^2 / kappa: failures come in bursts and some nodes fail again and again, which a Poisson count would miss
(in a production trace of 400 nodes the 99th percentile was 31; Poisson gives 17, kappa = 2 gives 33). The
rule is the smallest S with P(X > S) <= eps. The cap is the newsvendor's: while X > S, all N nodes wait, and a
spare costs one node all the time, so the S-th must prevent that for more than 1/N of the time: N P(X = S) >
1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jurymast.core.planning.failure_rate import DAY_S, PRIOR_RATE

KAPPA = 2.0
EPSILON = 0.01
# How long a place stays empty. A repair takes most of a day (median 20 h in the trace above), but on a
# cluster with other work another node is free, or a job ends, within hours.
REPLACE_S = 6 * 3600.0


@dataclass(frozen=True)
class Outages:
    """The number of nodes out of service at a time, negative binomial with mean `mean`."""

    mean: float
    kappa: float = KAPPA

    def probability(self, count: int) -> float:
        """P(X = count)."""
        if self.mean <= 0.0:
            return 1.0 if count == 0 else 0.0
        logarithm = (
            math.lgamma(self.kappa + count) - math.lgamma(self.kappa) - math.lgamma(count + 1.0)
            - self.kappa * math.log1p(self.mean / self.kappa)
            - count * math.log1p(self.kappa / self.mean)
        )  # fmt: skip
        return math.exp(logarithm)

    def more_than(self, count: int) -> float:
        """P(X > count)."""
        return max(0.0, 1.0 - math.fsum(self.probability(i) for i in range(count + 1)))


@dataclass(frozen=True)
class Spares:
    """`count` is what to request; `rule` what the risk alone would request."""

    count: int
    rule: int
    outages: Outages


def outages(nodes: int, rate: float, replace_s: float, run_s: float | None = None) -> Outages:
    """Return the outages at `rate` failures per 1,000 node-days. A run shorter than a replacement can lose
    nodes only during its own length."""
    span_s = replace_s if run_s is None else min(replace_s, run_s)
    return Outages(max(0.0, nodes * rate / 1000.0 * span_s / DAY_S))


def by_risk(found: Outages) -> int:
    """Return the smallest S with P(X > S) <= `EPSILON`."""
    spares, covered = 0, found.probability(0)
    while covered < 1.0 - EPSILON:
        spares += 1
        covered += found.probability(spares)
    return spares


def size_spares(nodes: int, rate: float, replace_s: float, run_s: float | None = None) -> Spares:
    """Return the spares for `nodes` active nodes at `rate` failures per 1,000 node-days: the rule, limited by
    the cap."""
    found = outages(nodes, rate, replace_s, run_s)
    rule = by_risk(found)
    count = rule
    while count > 0 and nodes * found.probability(count) <= 1.0:
        count -= 1
    return Spares(count, rule, found)


def auto_spares(
    active: int, rate: float | None = None, replace_s: float = REPLACE_S, run_s: float | None = None
) -> int:
    """Return the spare nodes for `active` nodes under `spares: auto`; with `rate` None for the usual rate of
    fleets. 0 for a few nodes, which fail so rarely that a spare would idle for more than it saves."""
    return size_spares(active, PRIOR_RATE if rate is None else rate, replace_s, run_s).count
