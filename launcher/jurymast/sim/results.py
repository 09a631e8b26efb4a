"""Results of several simulated runs, as `jurymast simulate` shows them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jurymast.core.checkpoints.cadence import Cadence
from jurymast.core.goodput.accounting import ordered
from jurymast.core.run.incident import Incident
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation

GOODPUT = "runtime_goodput"
Draw = Callable[[random.Random], list[TraceFault]]


def simulate(
    setup: Setup, draw: Draw, cadence: Cadence, seeds: int, told: Callable[[float], None] | None = None
) -> list[SimOutcome]:
    """Run the seeds 0 .. `seeds` - 1. Equal calls give equal results. `told` is called with the share done,
    0..1."""
    outcomes = []
    for seed in range(seeds):
        done = seed / seeds

        def tell(t: float, done: float = done) -> None:
            if told is not None:
                told(done + t / setup.seconds / seeds)

        outcomes.append(Simulation(setup, draw(random.Random(seed)), cadence, tell).run())
        if told is not None:
            told((seed + 1) / seeds)
    return outcomes


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between the two nearest values."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": sum(values) / len(values), "p5": quantile(values, 0.05), "p95": quantile(values, 0.95),
    }  # fmt: skip


def _cost(incidents: Sequence[Incident]) -> dict[str, float]:
    """Return the number of incidents of a cause, and the median seconds from the failure until training is
    back where it was."""
    times = [sum(incident.seconds().values()) for incident in incidents]
    return {"incidents": len(incidents), "seconds": quantile(times, 0.5)}


def summary(outcomes: Sequence[SimOutcome]) -> dict[str, Any]:
    """Summarize the runs by means. `categories` and `total_node_seconds` are those of a mean run; `by_cause`
    counts the incidents of all runs."""
    runs = len(outcomes)
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        totals.update(outcome.categories)
    incidents = sum(len(outcome.incidents) for outcome in outcomes)
    actions = Counter(i.action or "open" for outcome in outcomes for i in outcome.incidents)
    restores: Counter[str] = Counter()
    causes: dict[str, list[Incident]] = {}
    for outcome in outcomes:
        restores.update(outcome.restores)
        for incident in outcome.incidents:
            causes.setdefault(incident.cause or "open", []).append(incident)
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    ends = Counter(outcome.reason for outcome in outcomes if outcome.state == "failed")
    return {
        "goodput": spread([outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes]),
        "ratios": {
            name: spread([outcome.ratios[name] or 0.0 for outcome in outcomes]) for name in outcomes[0].ratios
        },
        "mtbf_hours": wall_s / incidents / 3600.0 if incidents else None,
        "categories": {name: totals[name] / runs / 1e6 for name in ordered(list(totals))},
        "total_node_seconds": sum(outcome.total_us for outcome in outcomes) / runs / 1e6,
        "incidents": incidents / runs,
        "actions": {name: number / runs for name, number in sorted(actions.items())},
        "requeues": sum(outcome.requeues for outcome in outcomes) / runs,
        "saves": sum(outcome.saves for outcome in outcomes) / runs,
        "restores": {name: number / runs for name, number in sorted(restores.items())},
        "by_cause": {name: _cost(found) for name, found in sorted(causes.items())},
        "gave_up": dict(ends),
        "seeds": runs,
    }
