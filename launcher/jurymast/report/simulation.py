"""The results of `jurymast simulate`, of one run or several, as text, and the assumptions behind them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jurymast.core.checkpoints.cadence import Cadence
from jurymast.core.goodput import MEANINGS, RATIOS, ordered
from jurymast.core.run.incident import Incident
from jurymast.report.plan import restart_lines
from jurymast.report.text import Block, Line, Table, count, duration, node_time, percent, size
from jurymast.sim.durations import Durations, Measured
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation

GOODPUT = "runtime_goodput"
Draw = Callable[[random.Random], list[TraceFault]]


def simulate(
    setup: Setup,
    draw: Draw,
    cadence: Cadence,
    seeds: int,
    told: Callable[[float], object] = lambda share: None,
) -> list[SimOutcome]:
    """Run the seeds 0 .. `seeds` - 1. Equal calls give equal results. `told` is called with the share done,
    0..1."""
    outcomes = []
    for seed in range(seeds):

        def tell(t: float, seed: int = seed) -> None:
            told((seed + t / setup.seconds) / seeds)

        outcomes.append(Simulation(setup, draw(random.Random(seed)), cadence, tell).run())
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
    restores: Counter[str] = Counter()
    causes: dict[str, list[Incident]] = {}
    for outcome in outcomes:
        totals.update(outcome.categories)
        restores.update(outcome.restores)
        for incident in outcome.incidents:
            causes.setdefault(incident.cause or "open", []).append(incident)
    incidents = sum(len(outcome.incidents) for outcome in outcomes)
    actions = Counter(i.action or "open" for outcome in outcomes for i in outcome.incidents)
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


def simulate_blocks(found: Mapping[str, Any]) -> list[Block]:
    runs = count(found["seeds"], "run")
    rate = "no failures" if not found["rate"] else f"{found['rate']:.2f} failures per 1,000 node-days"
    blocks: list[Block] = [
        Line(
            f"{count(found['nodes'], 'node')} and {count(found['spares'], 'spare')} for {found['days']:g} "
            f"days, {runs}; {rate}, {found['faults']}",
            "bold",
        ),
        Line(
            f"cadence {found['cadence']}; a failure costs {duration(found['restart_seconds'])} and the steps "
            f"since the last save, a save {duration(found['stall_seconds'])}"
        ),
        Line(""),
    ]
    rows = []
    for name, value in found["ratios"].items():
        spread = [percent(value[key]) for key in ("mean", "p5", "p95")]
        rows.append([name.replace("_", " ").replace("ettr", "ETTR"), *spread, RATIOS[name]])
    blocks += [Table(("RATIO", "MEAN", "5 %", "95 %", "MEANING"), rows, right=frozenset({1, 2, 3})), Line("")]
    total = found["total_node_seconds"]
    shares = [
        [name, node_time(seconds), f"{100 * seconds / total:.2f} %", MEANINGS.get(name, "")]
        for name, seconds in found["categories"].items()
    ]
    shares.append(["total", node_time(total), "100.00 %", ""])
    blocks += [
        Table(("CATEGORY", "NODE-TIME", "SHARE", "MEANING"), shares, right=frozenset({1, 2})),
        Line(""),
    ]
    mean = "none" if found["mtbf_hours"] is None else f"one in {duration(3600 * found['mtbf_hours'])}"
    actions = ", ".join(f"{name} {number:.1f}" for name, number in found["actions"].items())
    blocks.append(
        Line(f"incidents  {found['incidents']:.1f} a run ({mean})" + (f": {actions}" if actions else ""))
    )
    blocks.append(Line(f"saves      {found['saves']:.1f} a run; requeues {found['requeues']:.1f} a run"))
    if found["restores"]:
        restores = ", ".join(f"{name} {number:.1f}" for name, number in found["restores"].items())
        blocks.append(Line(f"restores   from {restores} a run"))
    for cause, cost in found["by_cause"].items():
        blocks.append(
            Line(f"{cause:<17} {cost['incidents']} in all runs, each {duration(cost['seconds'])} (median)")
        )
    for reason, number in found["gave_up"].items():
        blocks.append(Line(f"gave up    {count(number, 'run')} of {found['seeds']}: {reason}", "bold red"))
    blocks += [Line(""), Line("assumed:"), *(Line(f"  {line}") for line in found["assumed"])]
    blocks.append(Line(f"computed in {duration(found['wall_seconds'])}"))
    return blocks


def simulated_lines(
    measured: Measured, durations: Durations, setup: Mapping[str, Any], said: Mapping[str, Any]
) -> list[str]:
    """The assumptions of `simulate`. `setup` has nodes, rate and replicas; `said` has the options, with None
    for those that were not given."""
    lines = ["failures are detected and ranks restarted as fast on all these nodes as on four"]
    if said["restart"] is None:
        lines += restart_lines(measured, durations, setup["nodes"], said["checkpoint_bytes"])
    if said["stall"] is None:
        rate = f"{size(round(measured.copy))}/s"
        lines.append(
            f"training waits {duration(durations.stall_s)} for a save: {rate} a node, measured (--stall)"
        )
    if durations.write_s is not None:
        if said["storage_gb_per_s"] is None:
            written = duration(durations.write_s)
            lines.append(f"storage takes a whole checkpoint in {written} (--storage-gb-per-s)")
        held = f"replicas on {count(setup['replicas'], 'other node')}, a spare or half the run away"
        lines.append(
            f"{held if setup['replicas'] else 'no replicas'}: if all that hold a copy are lost at once, "
            "the run goes back to the newest save in storage"
        )
    for name, text in (
        ("step", f"a step takes {duration(durations.step_s)}"),
        ("repair", f"a lost node is replaced after {duration(durations.repair_s)}"),
        ("requeue", f"a requeue takes {duration(durations.requeue_s)}"),
    ):
        if said[name] is None:
            lines.append(f"{text} (--{name})")
    if said["rate"] is None and said["trace"] is None:
        lines.append(f"{setup['rate']:.3g} failures per 1,000 node-days, not measured here (--rate)")
    if not said["hang_rate"]:
        lines.append("nothing hangs (--hang-rate)")
    if not said["script_rate"]:
        lines.append("the script never fails (--script-rate)")
    return lines
