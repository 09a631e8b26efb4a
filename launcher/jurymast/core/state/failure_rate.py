"""How often nodes fail: a Gamma-Poisson posterior over incidents and node-days.

Failures of a fleet are modeled as a Poisson process of unknown rate r per node-day. With the prior r ~
Gamma(a, b node-days), k incidents in E node-days give r ~ Gamma(w a + k, w b + E). The prior's weight w =
(a / (a + k))^2 falls from 1 as incidents come: a fleet may fail ten times as often as those that published
their rates, and with w = 1 the estimate would be half of the truth after twenty incidents. Fleets change, so
both k and E decay with a half-life, and without new evidence the estimate returns towards the prior.

The interval of the rate is that of the prior only until something was observed that could contradict it. Then
it rests on the observations alone, as that of the mean time between failures does, and so holds for any true
rate that does not change. (Decay makes it too wide, never too narrow.)

Rates shown to people are failures per 1,000 node-days; times are seconds unless a name says days.

The mean time between failures has an interval: with n failures of a Poisson process in an observed time T,
the true mean is between 2T / chi2(0.95, 2n + 2) and 2T / chi2(0.05, 2n) with 90 %; without any failure there
is no upper end. A chi-square quantile with 2k degrees of freedom is twice the Gamma(k) quantile, and for
whole k

    P(Gamma(k) <= x) = 1 - exp(-x) * sum(x^i / i!, i < k) = 1 - P(fewer than k events when x are expected)
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jurymast.core.state.incident import Incident

# ---- the mean time between failures

LEVEL = 0.90


# With fewer, an MTBF is told as the interval in which it lies: that spans a factor of six or more.
FEW_FAILURES = 5


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


def poisson_interval(count: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the numbers of events to be expected between which the true one is with probability `level` or
    more after `count` events, with equal tails (Garwood, Biometrika 28, 1936)."""
    tail = (1.0 - level) / 2.0
    low = gamma_quantile(count, tail) if count > 0.0 else 0.0
    return low, gamma_quantile(count + 1.0, 1.0 - tail)


def mtbf(failures: int, observed_s: float) -> Mtbf:
    """Return the MTBF after `failures` in `observed_s` seconds, with its interval at `LEVEL`."""
    if observed_s <= 0.0:
        return Mtbf(failures, 0.0, None, None, None)
    fewest, most = poisson_interval(failures)
    if failures == 0:
        return Mtbf(0, observed_s, None, observed_s / most, None)
    return Mtbf(failures, observed_s, observed_s / failures, observed_s / most, observed_s / fewest)


# ---- the rate

DAY_S = 86_400.0
PER = 1000.0
# Mean 5.0 failures per 1,000 node-days, 90 % between 1.1 and 11.1: what fleets report.
PRIOR_SHAPE = 2.5
PRIOR_NODE_DAYS = 500.0
PRIOR_RATE = PER * PRIOR_SHAPE / PRIOR_NODE_DAYS
# A rate that a policy states counts as much as this many incidents: 90 % within about half of it either way.
GIVEN_SHAPE = 10.0
# The interval of the rate rests on what was observed from so many incidents, or so many node-days, on. Before
# that, its upper end would be more than twenty times what fleets report.
TELLING_INCIDENTS = 3.0
TELLING_NODE_DAYS = 30.0
# Incidents that start this soon after one are the same trouble: a switch, a power feed, a filesystem.
MERGE_S = 600.0
HALF_LIFE_DAYS = 14.0
INFRASTRUCTURE = "infrastructure"
# Nodes differ: each one's rate is the fleet's times a factor ~ Gamma(shape, shape). With this shape the worst
# 1.2 % of the nodes cause an eighth of the failures, about what Meta reports of its lemon nodes (2024).
FRAILTY_SHAPE = 1.0 / 3.0
# In the day after a node returned from a failure, it fails this many times as often as later: 57 failures in
# 470 node-days against 377 in 135,890 in the trace of `sim/data`, with a rate of its own for each node (90 %:
# 20 to 32; the fit is in tests/sim/test_trace.py). Only the first failure of a burst counts, and a pause of
# less than an hour is no repair. The latter matters most: if every pause counts as a repair, the factor is
# 47; if only those of six hours or more do, 9.
AFTER_REPAIR = 25.0
AFTER_REPAIR_S = DAY_S


@dataclass(frozen=True)
class Posterior:
    """What is believed of the rate: a prior, which is Gamma(`shape`, `node_days`) failures per node-day, and
    the evidence after decay, which is `incidents` in `exposure_node_days`."""

    shape: float = PRIOR_SHAPE
    node_days: float = PRIOR_NODE_DAYS
    incidents: float = 0.0
    exposure_node_days: float = 0.0

    @property
    def rate(self) -> float:
        """The mean, in failures per 1,000 node-days."""
        shape, node_days = self._gamma()
        return PER * shape / node_days

    def _gamma(self) -> tuple[float, float]:
        """The shape and the node-days of the prior and the evidence together."""
        weight = (self.shape / (self.shape + self.incidents)) ** 2
        return weight * self.shape + self.incidents, weight * self.node_days + self.exposure_node_days

    @property
    def observed(self) -> bool:
        """Whether so much was observed that the interval rests on it alone."""
        return self.incidents >= TELLING_INCIDENTS or self.exposure_node_days >= TELLING_NODE_DAYS

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the rates between which the true one is with probability `level`, in failures per 1,000
        node-days, with equal tails; the mean is between them, too."""
        if self.observed and self.exposure_node_days > 0.0:
            low, high = (
                PER * count / self.exposure_node_days for count in poisson_interval(self.incidents, level)
            )
            return min(low, self.rate), max(high, self.rate)
        shape, node_days = self._gamma()
        tail = (1.0 - level) / 2.0
        low, high = (PER * gamma_quantile(shape, at) / node_days for at in (tail, 1.0 - tail))
        return low, high

    def mtbf_s(self, nodes: float) -> float:
        """Return the mean time between failures of a run on `nodes` nodes, at the mean rate."""
        return mtbf_s(nodes, self.rate)

    def learned(self, incidents: float, exposure_node_days: float) -> Posterior:
        """Return the posterior after this many more incidents in this many more node-days."""
        return replace(
            self, incidents=self.incidents + incidents,
            exposure_node_days=self.exposure_node_days + exposure_node_days,
        )  # fmt: skip

    def evidence(self) -> str:
        """Say what the rate rests on: "3 incidents in 812 node-days"."""
        if self.exposure_node_days <= 0.0 and self.incidents <= 0.0:
            return "nothing observed yet"
        # Forgetting leaves fractions of incidents.
        count = f"{self.incidents:.3g}"
        return f"{count} incident{'' if count == '1' else 's'} in {self.exposure_node_days:.3g} node-days"


def prior(rate: float | None = None) -> Posterior:
    """Return the belief before any observation: usual for fleets, or around a given `rate` (failures per
    1,000 node-days). Raises ValueError for a rate that is not positive."""
    if rate is None:
        return Posterior()
    if not 0.0 < rate < math.inf:
        raise ValueError(f"a failure rate of {rate} per 1,000 node-days is not positive")
    return Posterior(GIVEN_SHAPE, PER * GIVEN_SHAPE / rate)


@dataclass(frozen=True)
class Watched:
    """`nodes` nodes could have failed from `start_s` to `end_s`, and did at `failures_s`; seconds since the
    epoch. A node that is more likely to fail counts as several."""

    start_s: float
    end_s: float
    nodes: float
    failures_s: tuple[float, ...] = ()


def learned_before(
    watched: Iterable[Watched], now_s: float, half_life_days: float = HALF_LIFE_DAYS
) -> tuple[float, float]:
    """Return what earlier runs teach: (incidents, exposure in node-days), each decayed since it happened.
    Failures close to each other count once even if they hit several runs, because those share switches and
    power; the time in which further ones would not have counted is no exposure."""
    half_life_s = half_life_days * DAY_S

    def left(at_s: float) -> float:
        return float(0.5 ** (max(0.0, now_s - at_s) / half_life_s))

    spans = list(watched)
    failures = merged(at_s for span in spans for at_s in span.failures_s)
    node_days = sum(
        span.nodes * half_life_days / math.log(2.0) * max(0.0, left(end_s) - left(start_s))
        for span in spans
        for start_s, end_s in between_bursts(span, failures)
    )
    return sum(map(left, failures)), node_days


def between_bursts(span: Watched, bursts: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The parts of the span in which a failure would have counted, with the starts of all `bursts` in
    order."""
    start_s = span.start_s
    first = bisect_left(bursts, span.start_s - MERGE_S)
    for burst_s in bursts[first : bisect_left(bursts, span.end_s)]:
        if burst_s > start_s:
            yield start_s, burst_s
        start_s = max(start_s, burst_s + MERGE_S)
    if span.end_s > start_s:
        yield start_s, span.end_s


def mtbf_s(nodes: float, rate: float) -> float:
    """Return the mean time between failures of `nodes` nodes at `rate` per 1,000 node-days; infinite for a
    rate of 0."""
    return PER / (nodes * rate) * DAY_S if nodes > 0 and rate > 0.0 else math.inf


def node_rate(fleet: float, failures: float, node_days: float) -> float:
    """Return the expected rate of one node that failed `failures` times in `node_days`, in a fleet whose
    nodes fail at the rate `fleet` on average; both rates per 1,000 node-days. It is the mean of the Gamma
    posterior of the node's factor. The rate does not apply to the day after a repair, and each such day is
    `AFTER_REPAIR` of the `node_days`."""
    return fleet * (FRAILTY_SHAPE + failures) / (FRAILTY_SHAPE + fleet / PER * node_days)


def counted(nodes: int, fresh_until: Iterable[float], now_s: float) -> float:
    """Return how many nodes `nodes` count as, some of which are in the day after a repair until
    `fresh_until`."""
    return nodes + (AFTER_REPAIR - 1.0) * sum(now_s < until_s for until_s in fresh_until)


def default_mtbf_s(nodes: int) -> float:
    """Return the mean time between failures of `nodes` nodes before anything was measured."""
    return prior().mtbf_s(max(1, nodes))


def merged(times_s: Iterable[float]) -> list[float]:
    """Return the starts of bursts, in order: a failure within `MERGE_S` of a burst's first belongs to it."""
    starts: list[float] = []
    for at_s in sorted(times_s):
        if not starts or at_s - starts[-1] > MERGE_S:
            starts.append(at_s)
    return starts


def failure_times(incidents: Sequence[Incident]) -> list[float]:
    """Return when failures happened that are charged to the infrastructure, with bursts merged. A user's
    request is charged to nobody and is no failure."""
    return merged(incident.fault_at for incident in incidents if incident.charged == INFRASTRUCTURE)


class FailureRate:
    """The running estimate. Report the time that nodes were watched, and each incident, in order of time.

    Old evidence halves every `half_life_days`: an exposure of n nodes over t days counts as n * h / ln 2 * (1
    - 2^(-t/h)) node-days at its end. Failures within `merge_s` of one belong to it. `earlier`: incidents and
    node-days of other runs, as of the start.
    """

    def __init__(
        self,
        start_s: float,
        believed: Posterior | None = None,
        half_life_days: float = HALF_LIFE_DAYS,
        merge_s: float = MERGE_S,
        earlier: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._believed = prior() if believed is None else believed
        self._half_life_days = half_life_days
        self._merge_s = merge_s
        self._until_s = start_s
        self._burst_s = -math.inf
        self._counted: list[float] = []  # the first failures of bursts, in order
        self._incidents, self._node_days = earlier

    def __eq__(self, other: object) -> bool:
        """A replayed run's estimate equals the original one."""
        return isinstance(other, FailureRate) and vars(self) == vars(other)

    @property
    def posterior(self) -> Posterior:
        return self._believed.learned(self._incidents, self._node_days)

    def posterior_at(self, now_s: float, nodes: int, fresh_until: Sequence[float] = ()) -> Posterior:
        """Return the posterior if `nodes` nodes are watched until `now_s`; this estimate does not change."""
        ahead = copy.copy(self)
        ahead.watched(now_s, nodes, fresh_until)
        return ahead.posterior

    def watched(self, until_s: float, nodes: int, fresh_until: Sequence[float] = ()) -> None:
        """`nodes` nodes could have failed since the last report, until `until_s` (ignored if that is past).
        `fresh_until`: for those in the day after a repair, when that day ends; they count as more."""
        # Failures within a burst's window are not counted, so this time is no exposure, either. At 100,000
        # GPUs, where something fails every 18 minutes, the rate would otherwise come out a third too low.
        self._pass(min(until_s, self._burst_s + self._merge_s), 0)
        for next_s in (*sorted(end_s for end_s in fresh_until if self._until_s < end_s < until_s), until_s):
            self._pass(next_s, counted(nodes, fresh_until, self._until_s))

    def _pass(self, until_s: float, nodes: float) -> None:
        days = (until_s - self._until_s) / DAY_S
        if days <= 0.0:
            return
        kept = 0.5 ** (days / self._half_life_days)
        self._incidents *= kept
        # 1 - kept without cancellation, as most of these spans are short.
        lost = -math.expm1(-math.log(2.0) * days / self._half_life_days)
        self._node_days = kept * self._node_days + nodes * self._half_life_days / math.log(2.0) * lost
        self._until_s = until_s

    def incident(self, at_s: float) -> bool:
        """Count one failure; returns False if it belongs to the burst before it."""
        if at_s - self._burst_s <= self._merge_s:
            return False
        self._burst_s = at_s
        self._counted.append(at_s)
        self._incidents += self._left(at_s)
        return True

    def withdraw(self, at_s: float) -> None:
        """What was counted at `at_s` was no failure. (That the time after it was no exposure stays: it is
        little.)"""
        if at_s in self._counted:
            self._counted.remove(at_s)
            self._incidents = max(0.0, self._incidents - self._left(at_s))
            self._burst_s = self._counted[-1] if self._counted else -math.inf

    def _left(self, at_s: float) -> float:
        """What a failure at `at_s` counts now."""
        age_days = max(0.0, (self._until_s - at_s) / DAY_S)
        return float(0.5 ** (age_days / self._half_life_days))


# A smaller difference may be chance, and does not justify an order other than Slurm's.
FRAIL_FROM = 2.0


@dataclass(frozen=True, kw_only=True)
class FrailNode:
    """`node` fails `factor` times as often as the fleet's nodes on average, and `AFTER_REPAIR` times that
    until `fresh_until`; None: for a day once it serves again. `why`: the evidence."""

    node: str
    factor: float = 1.0
    fresh_until: float | None = 0.0
    why: str = ""

    def times(self, now: float) -> float:
        """Return how many times as often as others it is expected to fail at `now`; 1.0 if that hardly
        differs."""
        fresh = self.fresh_until is None or now < self.fresh_until
        times = self.factor * (AFTER_REPAIR if fresh else 1.0)
        return times if times >= FRAIL_FROM else 1.0
