"""Predicts what a run will lose to failures and saves: cadence, bytes, spares, goodput.

Three ways to save are compared. *blocking*: training waits for the write to shared storage. *asynchronous*:
it waits for a copy in memory, which is written in the background. *memory*: saves stay in memory, on two
nodes each, and only some are written; only failures of several nodes at once need those. Times are seconds,
rates failures per 1,000 node-days, bandwidths bytes per second, ratios 0..1.

How many spare nodes a run requests follows from the failure rate, the time a replacement takes, and the cost.
X, the number of nodes out of service at a time, is negative binomial with mean mu = N r L and variance mu +
mu^2 / kappa: failures come in bursts and some nodes fail again and again, which a Poisson count would miss
(in a production trace of 400 nodes the 99th percentile was 31; Poisson gives 17, kappa = 2 gives 33). The
rule is the smallest S with P(X > S) <= eps. The cap is the newsvendor's: while X > S, all N nodes wait, and a
spare costs one node all the time, so the S-th must prevent that for more than 1/N of the time: N P(X = S) >
1.

With recovery in process the ranks that live keep the newest step. New ranks have to start as after a restart,
and the others wait for them: of the failures that it serves, it spares the steps since the last save, and
nothing else. A run saves as often as without it.

Symbols in the formulas for how often to save: C is a save's cost while training waits, R the time from a
failure until training continues, M the mean time between failures of the whole run (1/M = lambda), tau the
training time between two saves, Delta = tau + C the time from save to save. Failures are exponential and may
happen during saves and recoveries, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from jurymast.core.state.failure_rate import DAY_S, PRIOR_RATE, Posterior, mtbf_s, prior

# ---- how often to save

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
    cheap: Saving, durable: Saving, mtbf_s: float, durable_share: float, interval_s: float | None = None,
    least_s: float = 0.0, most_s: float = math.inf,
) -> TwoLevels:  # fmt: skip
    """The pattern of Benoit et al., "Towards optimal multi-level checkpointing", 2017.

    `durable_share` of the failures destroy the cheap copies and lead back to the newest durable save. Each
    level alone has Delta_l = sqrt(2 C_l / lambda_l) (here: its exact form); a durable save is due every
    round(Delta_2 / Delta_1) cheap ones, and never before the previous one is complete. `interval_s` fixes the
    cheap interval; the durable one is at least `least_s` and, if that allows, at most `most_s`.
    `durable.stall_s` is what a durable save costs beyond the cheap one from which it is made. Goodput: the
    exact form with the mean restart, copy and rework of both kinds of failure.
    """
    share = min(1.0, max(0.0, durable_share))
    first_s = mtbf_s / (1.0 - share) if share < 1.0 else math.inf
    second_s = mtbf_s / share if share > 0.0 else math.inf
    if interval_s is None:
        interval_s = optimal_interval_s(cheap, first_s if share < 1.0 else mtbf_s)
    wanted_s = optimal_interval_s(durable, second_s) if share > 0.0 else math.inf
    # A durable save that no failure needs has no optimum. One a day is kept for unforeseen failures.
    wanted_s = min(wanted_s, max(86_400.0, durable.copy_s))
    wanted = round(wanted_s / interval_s)
    if wanted * interval_s > most_s:
        wanted = int(most_s / interval_s + 1e-9)
    every = max(1, wanted, math.ceil(max(least_s, durable.copy_s) / interval_s - 1e-9))
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


# ---- how many spares

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
    nodes only during its own length. No more nodes are out than there are."""
    span_s = replace_s if run_s is None else min(replace_s, run_s)
    return Outages(min(float(nodes), max(0.0, nodes * rate / 1000.0 * span_s / DAY_S)))


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


# ---- the forecast

# From a node's death to new steps, when nothing was measured. jurymast's own part takes seconds;
# communicators, compilation and data loaders of a real training take the rest.
RESTART_S = 60.0
# Speeds of a save, in bytes per second and node: of the copy while training waits (all GPUs of a node
# together), and of the hash and transfer to another node.
COPY_BYTES_PER_S = 10e9
REPLICATE_BYTES_PER_S = 2.5e9
STALL_GUESS_S = 1.0
REPLICATE_GUESS_S = 10.0
# Training slows by this share while a copy is written in the background: a guess, until a run has measured
# it.
SLOWDOWN = 0.01
# 3 to 10 % of incidents take several nodes at once, and with them both copies of something.
DURABLE_SHARE = 0.05
# The part of a step from a rank's update to the step's end, a guess: a rank that dies there takes along what
# the others need to go on in their processes without a lost step.
UPDATE_SHARE = 0.05
# Whatever interval loses least: after a write from memory the storage is left idle nine times as long.
IDLE_SHARE = 9.0
TARGET = 0.95
MAX_LOSS_S = 900.0
# Steps of trainings worth a plan take about a second; a save that costs nothing has no other bound.
LEAST_INTERVAL_S = 1.0
# Exponents of e are limited so that products of two still fit a float: far beyond any goodput.
EXPONENT_MAX = 300.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is known before the run. None: not known (`stall_s`: estimated from the bytes; `cadence_s` and
    `spares`: to be computed). `max_loss_s` limits each computed interval, that between durable saves
    as well. `write_bytes_per_s` is the storage's
    bandwidth for all nodes together; `replicated`: saves are kept in the memory of two nodes; `in_process`:
    ranks that live go on in their processes."""

    nodes: int
    gpus_per_node: int = 8
    rate: Posterior = prior()
    checkpoint_bytes: float | None = None
    write_bytes_per_s: float | None = None
    restart_s: float = RESTART_S
    stall_s: float | None = None
    slowdown: float = SLOWDOWN
    replicated: bool = True
    durable_share: float = DURABLE_SHARE
    cadence_s: float | None = None
    max_loss_s: float = MAX_LOSS_S
    spares: int | None = None
    replace_s: float = REPLACE_S
    run_s: float | None = None
    target: float = TARGET
    in_process: bool = False

    @cached_property
    def sized(self) -> Spares:
        return size_spares(self.nodes, self.rate.rate, self.replace_s, self.run_s)

    @property
    def spares_used(self) -> int:
        return self.sized.count if self.spares is None else self.spares

    @property
    def kept_share(self) -> float:
        """The share of the failures after which no step is lost in process: a spare is there, one copy of
        everything survives, and no rank dies in its update. Without another node nobody goes on."""
        if self.nodes < 2:
            return 0.0
        served = 1.0 - self.sized.outages.more_than(self.spares_used - 1)
        return served * (1.0 - self.durable_share) * (1.0 - UPDATE_SHARE)

    @property
    def mtbf_s(self) -> float:
        return self.rate.mtbf_s(self.nodes)

    @property
    def write_s(self) -> float | None:
        """The seconds to write one checkpoint; None if its size or the storage's speed is unknown."""
        if self.checkpoint_bytes is None or self.write_bytes_per_s is None:
            return None
        return self.checkpoint_bytes / self.write_bytes_per_s

    @property
    def stall_used_s(self) -> float:
        """How long training waits for the copy in memory: as given, else from the bytes, else a guess."""
        if self.stall_s is not None:
            return self.stall_s
        if self.checkpoint_bytes is None:
            return STALL_GUESS_S
        return self.checkpoint_bytes / self.nodes / COPY_BYTES_PER_S

    @property
    def by_target(self) -> bool:
        """Whether the cost of a save is unknown, so that the plan states the highest cost that reaches the
        target."""
        return self.checkpoint_bytes is not None and self.write_bytes_per_s is None and self.stall_s is None


@dataclass(frozen=True)
class Way:
    """One way to save: a save every `interval_s`, a durable one every `durable_interval_s`, and the resulting
    goodput. `stall_s`: how long training waits for each; `write_s`: duration of the durable write, None if
    unknown. `loss_s`: the most training time that a failure costs while a copy of the newest save survives,
    and `durable_loss_s` if only durable saves do; None if it depends on an unknown write."""

    name: str
    interval_s: float
    durable_interval_s: float
    stall_s: float
    write_s: float | None
    goodput: float
    loss_s: float | None
    durable_loss_s: float | None


@dataclass(frozen=True)
class SpareChoice:
    """`waiting`: the share of the time in which a node is missing; `ettr`: goodput of the requested nodes'
    time; `allocation_goodput`: the same with the spares in the denominator."""

    spares: int
    waiting: float
    ettr: float
    allocation_goodput: float


@dataclass(frozen=True)
class Recovery:
    """What a run is worth whose failures are recovered from in this way. After the share `kept` of them no
    step is done again; the other figures are those of `Way` and `SpareChoice`."""

    name: str
    kept: float
    goodput: float
    ettr: float
    allocation_goodput: float


@dataclass(frozen=True)
class Needed:
    """Write bandwidths, bytes per second, with which `goodput` is reached if a recovery takes `restart_s`;
    None if no storage is fast enough."""

    goodput: float
    restart_s: float
    blocking: float | None
    asynchronous: float | None


@dataclass(frozen=True)
class Forecast:
    """The answer. `way` is the planned one of `ways`, which are `unlimited` without `max_loss_s`; `low` and
    `high` are its goodput at the ends of the 90 % interval of the failure rate; `faster_storage`: goodput
    gained by storage twice as fast, None if it plays no part; `sensitivity`: goodput lost if the cadence is
    chosen for a rate that is off by a factor of four. `needed` and `sensitivity` are those of a run whose
    ranks restart. `recoveries`: by restart, and in process."""

    question: Question
    mtbf_s: float
    way: Way
    ways: tuple[Way, ...]
    unlimited: tuple[Way, ...]
    low: float
    high: float
    spares: SpareChoice
    spare_rule: int
    more_spares: tuple[SpareChoice, ...]
    recoveries: tuple[Recovery, ...]
    needed: tuple[Needed, ...]
    faster_storage: float | None
    sensitivity: float


def forecast(question: Question) -> Forecast:
    """Return everything that `plan` shows. Raises ValueError for no nodes, and for a target outside [0.5,
    1)."""
    if question.nodes < 1:
        raise ValueError("a run has at least one node")
    # Below a half, the interval tau differs too much from the interval that includes the save.
    if not 0.5 <= question.target < 1.0:
        raise ValueError(f"a goodput of {question.target} cannot be planned for")
    mtbf = question.mtbf_s
    ways = _ways(question, mtbf)
    way = ways[0]
    low_rate, high_rate = question.rate.interval()
    at_high = _ways(question, mtbf_s(question.nodes, high_rate))[0]
    at_low = _ways(question, mtbf_s(question.nodes, low_rate))[0]
    count = question.spares_used
    around = range(max(0, count - 2), count + 4)
    return Forecast(
        question=question,
        mtbf_s=mtbf,
        way=way,
        ways=ways,
        unlimited=_ways(replace(question, max_loss_s=math.inf), mtbf),
        low=at_high.goodput,
        high=at_low.goodput,
        spares=_spare_choice(question, way, count),
        spare_rule=question.sized.rule,
        more_spares=tuple(_spare_choice(question, way, spares) for spares in around),
        recoveries=tuple(_recovery(replace(question, in_process=each), mtbf) for each in (False, True)),
        needed=tuple(_needed(question, restart_s) for restart_s in (0.0, question.restart_s)),
        faster_storage=_faster_storage(question, way),
        sensitivity=sensitivity(Saving(way.stall_s, restart_s=question.restart_s), mtbf),
    )


def goodput_at(question: Question, interval_s: float, rate: float) -> float:
    """Return the goodput with a save every `interval_s` at `rate`, for the planned way to save; for
    curves."""
    fixed = replace(question, cadence_s=interval_s)
    return _ways(fixed, mtbf_s(question.nodes, rate))[0].goodput


def _ways(question: Question, mtbf: float) -> tuple[Way, ...]:
    """Return all ways to save that the known values allow, at this MTBF; first the planned one."""
    ways = _ways_alone(question, mtbf)
    if not question.in_process:
        return ways
    return tuple(
        _ways_alone(*_losing(question, mtbf, way.interval_s))[place] for place, way in enumerate(ways)
    )


def _losing(question: Question, mtbf: float, interval_s: float) -> tuple[Question, float]:
    """The same run, if one counts only the failures after which steps are done again, and their MTBF. To each
    of them the recoveries from its share of the others are added. It saves every `interval_s`.

    In time per step, (e^(Delta/M') - 1) M' e^(R/M): only failures that lose steps, one in M' = M / (1 -
    kept), make work be done again, and all of them cost R. With R' = R M'/M that is the exact form."""
    left = 1.0 - question.kept_share
    rare = replace(
        question, restart_s=question.restart_s / left, durable_share=question.durable_share / left,
        cadence_s=interval_s, in_process=False,
    )  # fmt: skip
    return rare, mtbf / left


def _ways_alone(question: Question, mtbf: float) -> tuple[Way, ...]:
    """The same for ranks that restart."""
    if question.by_target:
        return (_allowed(question, mtbf),)
    ways = [_memory(question, mtbf)] if question.replicated else []
    if question.write_s is not None or not ways:
        ways.append(_asynchronous(question, mtbf))
    if question.write_s is not None:
        ways.append(_blocking(question, question.write_s, mtbf))
    return tuple(ways)


def _interval_s(question: Question, best_s: float, least_s: float = 0.0, copy_s: float = 0.0) -> float:
    """Return the policy's cadence, or the best one with which a failure costs at most `max_loss_s`, though a
    save protects only `copy_s` after its step; at least `least_s`, as no save begins before the last one is
    written."""
    if question.cadence_s is not None:
        return max(question.cadence_s, least_s)
    return max(min(best_s, question.max_loss_s - copy_s), least_s, LEAST_INTERVAL_S)


def _allowed(question: Question, mtbf: float) -> Way:
    """Return the cadence tau = M (1 - target), which is best if the target is just reached, and the blocking
    write that this leaves time for at the expected M (`mtbf` may differ: then the same write, and the cadence
    that suits it)."""
    expected_s = question.mtbf_s
    # A curve over cadences keeps the storage as it was planned.
    planned_s = _interval_s(replace(question, cadence_s=None), expected_s * (1.0 - question.target))
    write_s = max(0.0, _blocking_allowed_s(question.target, planned_s, expected_s, 0.0))
    chosen = mtbf == expected_s and question.cadence_s is None
    return _blocking(question, write_s, mtbf, planned_s if chosen else None)


def _blocking(question: Question, write_s: float, mtbf: float, interval_s: float | None = None) -> Way:
    saving = Saving(write_s, restart_s=question.restart_s)
    if interval_s is None:
        interval_s = _interval_s(question, optimal_interval_s(saving, mtbf), write_s)
    found = async_goodput(interval_s, saving, mtbf)
    return Way("blocking", interval_s, interval_s, write_s, write_s, found, interval_s, interval_s)


def _asynchronous(question: Question, mtbf: float) -> Way:
    write_s = question.write_s
    saving = Saving(question.stall_used_s, write_s or 0.0, question.slowdown, question.restart_s)
    interval_s = _interval_s(question, optimal_interval_s(saving, mtbf), saving.copy_s, saving.copy_s)
    found = async_goodput(interval_s, saving, mtbf)
    loss_s = None if write_s is None else interval_s + write_s
    return Way("asynchronous", interval_s, interval_s, saving.stall_s, write_s, found, loss_s, loss_s)


def _memory(question: Question, mtbf: float) -> Way:
    """Return the two-level way. Reading a durable save takes as long as writing it."""
    size, write_s = question.checkpoint_bytes, question.write_s
    copy_s = REPLICATE_GUESS_S if size is None else size / question.nodes / REPLICATE_BYTES_PER_S
    cheap = Saving(question.stall_used_s, copy_s, question.slowdown, question.restart_s)
    read_s = write_s or 0.0
    durable = Saving(0.0, read_s, question.slowdown, question.restart_s + read_s)
    # The best cadence of the cheap level depends on the failures it can recover alone.
    best_s = optimal_interval_s(cheap, mtbf / max(1e-9, 1.0 - question.durable_share))
    interval_s = _interval_s(question, best_s, cheap.copy_s, cheap.copy_s)
    found = two_levels(
        cheap, durable, mtbf, question.durable_share, interval_s,
        least_s=(1.0 + IDLE_SHARE) * read_s, most_s=question.max_loss_s,
    )  # fmt: skip
    durable_s = found.durable_interval_s
    # A write may begin when the save that it writes is about to be followed by the next one.
    durable_loss_s = None if write_s is None else durable_s + interval_s + write_s
    loss_s = interval_s + cheap.copy_s
    return Way(
        "memory", interval_s, durable_s, cheap.stall_s, write_s, found.goodput, loss_s, durable_loss_s
    )  # fmt: skip


def _spare_choice(question: Question, way: Way, spares: int) -> SpareChoice:
    found = outages(question.nodes, question.rate.rate, question.replace_s, question.run_s)
    waiting = found.more_than(spares)
    ettr = way.goodput * (1.0 - waiting)
    return SpareChoice(spares, waiting, ettr, ettr * question.nodes / (question.nodes + spares))


def _recovery(question: Question, mtbf: float) -> Recovery:
    way, spares = _ways(question, mtbf)[0], question.spares_used
    choice = _spare_choice(question, way, spares)
    name, kept = ("in process", question.kept_share) if question.in_process else ("restart", 0.0)
    return Recovery(name, kept, way.goodput, choice.ettr, choice.allocation_goodput)


def _needed(question: Question, restart_s: float) -> Needed:
    if question.checkpoint_bytes is None:
        return Needed(question.target, restart_s, None, None)
    mtbf, size = question.mtbf_s, question.checkpoint_bytes
    left = question.target * math.exp(min(EXPONENT_MAX, restart_s / mtbf))  # what saves and rework must leave
    interval_s = _interval_s(question, mtbf * (1.0 - left)) if left < 1.0 else 0.0
    blocking_s = _blocking_allowed_s(question.target, interval_s, mtbf, restart_s)

    def reached(copy_s: float) -> bool:
        saving = Saving(question.stall_used_s, copy_s, question.slowdown, restart_s)
        interval_s = _interval_s(question, optimal_interval_s(saving, mtbf), copy_s, copy_s)
        return async_goodput(interval_s, saving, mtbf) >= question.target

    copy_s = _largest(reached, mtbf)
    blocking = size / blocking_s if blocking_s > 0.0 else None
    return Needed(question.target, restart_s, blocking, size / copy_s if copy_s else None)


def _blocking_allowed_s(target: float, interval_s: float, mtbf: float, restart_s: float) -> float:
    """C from goodput = (Delta - C) / (M e^(R/M) (e^(Delta/M) - 1)); 0 or less if it cannot be reached."""
    first, second = (min(EXPONENT_MAX, t / mtbf) for t in (restart_s, interval_s))
    return interval_s - target * mtbf * math.exp(first) * math.expm1(second)


def _largest(holds: Callable[[float], bool], most: float) -> float | None:
    """Return the largest x up to `most` for which `holds`, which is true up to some x only; None if it never
    is."""
    low, high = 0.0, most
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low or None


def _faster_storage(question: Question, way: Way) -> float | None:
    if way.write_s is None:
        return None
    if question.by_target:
        write_s, mtbf = way.write_s / 2.0, question.mtbf_s
        better = _blocking(question, write_s, mtbf)
        if question.in_process:
            rare, mtbf = _losing(question, mtbf, better.interval_s)
            better = _blocking(rare, write_s, mtbf)
    else:
        speed = question.write_bytes_per_s or 0.0
        better = _ways(replace(question, write_bytes_per_s=2.0 * speed), question.mtbf_s)[0]
    return better.goodput - way.goodput


def durable_per_day(way: Way) -> float:
    """Return the number of writes to the storage per day."""
    return DAY_S / way.durable_interval_s
