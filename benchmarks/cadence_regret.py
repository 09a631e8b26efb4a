#!/usr/bin/env python3
"""What is lost by not knowing the failure rate: the adaptive cadence against fixed ones, on real failures.

Failures of a production cluster are replayed with time running so quickly that the rate per node stays; each
repeat begins at another day of the trace. Needs nothing but some seconds of one processor.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import optimal_s
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import FailureRate, mtbf_s, prior
from jurymast.core.state.images import MEMORY
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.settings import Settings
from jurymast.sim.checkpoints import SimRanks
from jurymast.sim.faults import BUNDLED_TRACE, read_trace

TRACE = read_trace(BUNDLED_TRACE)
SIZES = (400, 4000, 12_000)
SAVE_S, RESTART_S = 30.0, 600.0
HAND_PICKED_S = 3600.0
TWO_WEEKS_S = 14 * 86_400.0
OFF = 4.0
# Fixed intervals tried in hindsight: so many either way of the best for the true mean, to a factor of REACH.
TRIED, REACH = 12, 4.0
REGRET_MAX, REGRET_OFF_MAX = 0.003, 0.005


class Interval(Protocol):
    """`seconds` is the time from a save's end to the next save, from now on; `failed` tells of a failure."""

    def seconds(self, now: float) -> float: ...

    def failed(self, now: float) -> None: ...


@dataclass
class Fixed:
    every_s: float

    def seconds(self, now: float) -> float:
        return self.every_s

    def failed(self, now: float) -> None:
        """It learns nothing."""


class Adaptive:
    """As a run decides by itself that knows what a save costs. A step takes a second."""

    def __init__(self, nodes: int, prior_rate: float | None) -> None:
        settings = Settings(rate=prior_rate, max_loss_s=math.inf)
        self._state = RunState(
            settings, active=1, unnamed=nodes - 1, phase=Phase.RUNNING, placement=("all",), attempt=1,
            failures=FailureRate(0.0, prior(prior_rate)),
        )  # fmt: skip
        step(self._state, ev.Saved(t=0.0, attempt=1, step=0, tier=MEMORY, ok=True, stall_s=SAVE_S))
        self._ranks = SimRanks(self._state, Cadence(), 0.0)

    def seconds(self, now: float) -> float:
        again_s: float | None = 0.0
        while again_s is not None:
            now += again_s
            events, again_s = self._ranks.look(int(now), now)
            for event in events:
                step(self._state, event)
        cadence = self._state.cadence
        assert cadence is not None
        return cadence.interval_s - SAVE_S

    def failed(self, now: float) -> None:
        self._state.attempt += 1
        self._state.cadence = None
        assert self._state.failures is not None
        self._state.failures.watched(now, self._state.exposed)
        self._state.failures.incident(now)


def goodput_of(
    cadence: Interval, failures_s: Sequence[float], seconds: float, save_s: float, restart_s: float,
    since_s: float = 0.0,
) -> float:  # fmt: skip
    """Share of the time from `since_s` to `seconds` in training that counted, when failures strike at these
    times, in order, and nothing but the cadence and `restart_s` (begun anew by a failure during it) matters:
    to compare thousands of cadences where a simulation of the whole run would take its time."""
    at = kept_s = 0.0
    for failure in (*(t for t in failures_s if t < seconds), seconds):
        interval_s = cadence.seconds(at)
        while at + interval_s + save_s <= failure:
            kept_s += max(0.0, min(interval_s, at + interval_s - since_s))
            at += interval_s + save_s
            interval_s = cadence.seconds(at)
        if failure < seconds:
            cadence.failed(failure)
            at = failure + restart_s
        else:  # what the end finds is not lost
            kept_s += max(0.0, min(interval_s, seconds - at))
    return kept_s / (seconds - since_s)


@dataclass(frozen=True)
class Replay:
    """Goodputs, 0..1, on the same failures. `best` is that of the best of many fixed intervals, which is
    `best_s` seconds; the prior of `adaptive` is the usual one, or a rate of one's own."""

    best: float
    best_s: float
    hand_picked: float
    adaptive: float

    @property
    def regret(self) -> float:
        return self.best - self.adaptive


@dataclass(frozen=True)
class Case:
    """The cadence's prior is around `prior_rate` (None: the usual one); goodput counts from `since_s` to
    `seconds`, and may be `allowed` below the best (None: shown only)."""

    name: str
    nodes: int
    seconds: float
    since_s: float
    prior_rate: float | None
    allowed: float | None


def replay(case: Case, seed: int) -> Replay:
    """Seed 0 begins with the trace, others at a random day of it; it starts over at its end."""
    nodes, seconds = case.nodes, case.seconds
    rng = random.Random(seed)
    times = [fault.t for fault in TRACE.draw(nodes, seconds, rng, shift=seed > 0)]

    def fixed(interval_s: float) -> float:
        return goodput_of(Fixed(interval_s), times, seconds, SAVE_S, RESTART_S, case.since_s)

    middle_s = optimal_s(SAVE_S, mtbf_s(nodes, TRACE.rate))
    tried = [middle_s * REACH ** (i / TRIED) for i in range(-TRIED, TRIED + 1)]
    best, best_s = max((fixed(interval_s), interval_s) for interval_s in tried)
    found = goodput_of(Adaptive(nodes, case.prior_rate), times, seconds, SAVE_S, RESTART_S, case.since_s)
    return Replay(best, best_s, fixed(HAND_PICKED_S), found)


def cases() -> Iterator[Case]:
    for nodes in SIZES:
        whole_s = TRACE.days * 86_400.0 * TRACE.nodes / nodes
        yield Case(f"{nodes} nodes, usual prior", nodes, whole_s, 0.0, None, REGRET_MAX)
        for word, factor in (("high", OFF), ("low", 1.0 / OFF)):
            name, rate = f"{nodes} nodes, prior {OFF:g} times too {word}", factor * TRACE.rate
            yield Case(f"{name}, first two weeks", nodes, TWO_WEEKS_S, 0.0, rate, None)
            until_s = max(whole_s, 2.0 * TWO_WEEKS_S)
            yield Case(f"{name}, after two weeks", nodes, until_s, TWO_WEEKS_S, rate, REGRET_OFF_MAX)


def measure(repeats: int) -> tuple[list[Row], list[Target]]:
    rows, targets = [], []
    for case in cases():
        common.progress(case.name)
        found = [replay(case, seed) for seed in range(repeats)]
        best_s = common.spread([each.best_s for each in found])
        rows += [
            _row(case.name, common.JURYMAST, [each.adaptive for each in found]),
            _row(case.name, "limit", [each.best for each in found],
                 f"the best fixed interval in hindsight, {2 * TRIED + 1} tried"),
            _row(case.name, "fixed 60 min", [each.hand_picked for each in found]),
            Row(case.name, "limit", "interval", "s", best_s.median, best_s.low, best_s.high, best_s.n),
        ]  # fmt: skip
        if case.allowed is not None:
            regret = common.spread([each.regret for each in found]).median
            targets.append(Target(f"{case.name}: lost to the best, median", regret, case.allowed, "lower"))
            above = min(each.adaptive - each.hand_picked for each in found)
            targets.append(Target(f"{case.name}: least above 60 min", above, 0.0, "higher"))
    return rows, targets


def _row(case: str, system: str, values: list[float], note: str = "") -> Row:
    found = common.spread(values)
    return Row(case, system, "goodput", "ratio", found.median, found.low, found.high, found.n, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="three replays of each instead of nine")
    arguments = parser.parse_args()
    rows, targets = measure(3 if arguments.quick else 9)
    about = {
        **common.machine(), "trace": BUNDLED_TRACE, "save_s": SAVE_S, "restart_s": RESTART_S,
        "rate": round(TRACE.rate, 3), "interval_factor": math.exp(math.log(REACH) / TRIED),
    }  # fmt: skip
    common.print_report("cadence_regret", rows, targets, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
