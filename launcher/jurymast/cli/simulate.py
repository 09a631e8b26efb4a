"""`jurymast simulate`: simulate failures with the decisions of real runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast.cli.options import (
    MOST_NODES,
    POSITIVE,
    Number,
    charts_option,
    checkpoint_bytes_option,
    durations_option,
    examples,
    file_option,
    json_option,
    read_by,
    recovery_option,
    resolved_policy,
    show,
    show_json,
    spares_option,
    storage_option,
    write_page,
)
from jurymast.errors import UsageError

if TYPE_CHECKING:
    from random import Random

    from jurymast.core.state.settings import Settings
    from jurymast.policy.resolve import Resolved
    from jurymast.sim.checkpoints import Durations, Measured
    from jurymast.sim.faults import TraceFault
    from jurymast.sim.simulation import SimOutcome

    Draw = Callable[[int, Random], list[TraceFault]]

# Points of the page's curves.
PARTS = 120


def _seconds(text: str) -> float:
    """Seconds of a time as policies write it: 90s, 10m, 6h, 2d; also 0."""
    from jurymast.policy.model import read_positive_duration

    return 0.0 if text.strip() == "0" else read_positive_duration(text)


def _time(flag: str, text: str) -> Callable[[Any], Any]:
    return click.option(flag, callback=read_by(_seconds), metavar="TIME", help=text)


@click.command(
    epilog=examples(
        "jurymast simulate --nodes 2048 --days 54 --rate 3.79 --seeds 5",
        "jurymast simulate --nodes 400 --days 30 --trace infinitehbd --html page.html",
    )
)
@click.option("--nodes", type=click.IntRange(1, MOST_NODES), required=True, metavar="N", help="Active nodes.")
@click.option(
    "--days",
    type=POSITIVE,
    default=30.0,
    metavar="D",
    help="Length of a run in days.  [30]",
)
@click.option("--rate", type=Number(0.0), metavar="R", help="Failures per 1,000 node-days.  [5]")
@click.option(
    "--faults",
    metavar="KINDS",
    default="exponential",
    show_default=True,
    help="exponential, weibull, bursts, multi (several nodes at once) or lemons; with a number: lemons:0.1; "
    "several: lemons,multi.",
)
@click.option(
    "--script-rate",
    type=Number(0.0),
    default=0.0,
    metavar="R",
    help="Failures of the script itself, per 1,000 node-days.",
)
@click.option("--hang-rate", type=Number(0.0), default=0.0, metavar="R", help="Hangs, per 1,000 node-days.")
@click.option("--trace", metavar="CSV", help="Replay faults (node,start_day,end_day), or `infinitehbd`.")
@click.option(
    "--trace-nodes", type=click.IntRange(1), metavar="N", help="How many nodes the traced cluster had."
)
@click.option("--trace-repairs", is_flag=True, help="Keep nodes down for as long as in the trace.")
@click.option("--seeds", type=click.IntRange(1), default=3, metavar="N", help="Runs to simulate.  [3]")
@file_option("--policy", help="Policy file: what to do about failures.")
@spares_option("Spare nodes.  [the policy's]")
@click.option(
    "--cadence", metavar="C", help="fixed:60m, young (at the true rate), optimum or adaptive.  [the policy's]"
)
@click.option(
    "--prior",
    type=POSITIVE,
    metavar="R",
    help="Failures per 1,000 node-days that adaptive starts from.",
)
@checkpoint_bytes_option
@storage_option
@durations_option
@_time("--restart", "Time from a failure to the first step after it.")
@_time("--stall", "Stall: time for which a save stops training.")
@_time("--copy", "Time from the end of the stall until the save is complete.")
@_time("--step", "Time of a training step.")
@_time("--repair", "Time from a failure until the node, or its replacement, is a spare.")
@_time("--requeue", "Time from a requeue to the next allocation.")
@recovery_option
@charts_option
@json_option
def command(
    nodes: int, days: float, seeds: int, policy: Path | None, html: Path | None, as_json: bool, **options: Any
) -> None:
    """Simulate runs with failures, with the decisions, the cadence and the accounting of real runs."""
    from jurymast.core.judges.forecast import auto_spares
    from jurymast.report.simulation import (
        recovery_view,
        simulate,
        simulate_blocks,
        simulated_lines,
        summary,
    )
    from jurymast.sim.checkpoints import asked_cadence, read_measured
    from jurymast.sim.simulation import Setup

    began = time.perf_counter()
    resolved = resolved_policy(policy, options["spares"])
    settings = resolved.settings()
    if options["prior"] is not None:
        settings = replace(settings, rate=options["prior"])
    measured = read_measured(options["figures"])
    durations = _durations(measured, nodes, settings, options)
    rate, faults, draw = _faults(options, resolved, days * 86_400.0)
    spares = resolved.policy.spares
    if spares is None:
        spares = auto_spares(nodes, rate, durations.repair_s, days * 86_400.0)
    cadence = options["cadence"] or _policy_cadence(settings)
    try:
        asked = asked_cadence(cadence, nodes, rate, durations)
    except ValueError as error:
        raise UsageError(f"--cadence: {error}") from error
    try:
        setup = Setup(
            nodes=nodes, spares=spares, seconds=days * 86_400.0, durations=durations, settings=settings,
            parts=PARTS if html is not None else 0, in_process=options["in_process"],
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--days {days:g}: {error}") from error
    bar: Any = nullcontext()
    if not as_json and sys.stderr.isatty():
        bar = click.progressbar(length=1000, label="simulating", file=sys.stderr)
    ways = [setup, replace(setup, in_process=False, parts=0)] if setup.in_process else [setup]
    found_by_way: list[list[SimOutcome]] = []
    with bar as shown:

        def tell(share: float) -> None:
            if shown is not None:
                shown.update(int(1000 * (len(found_by_way) + share) / len(ways)) - shown.pos)

        for way in ways:
            found_by_way.append(simulate(way, lambda rng: draw(nodes + spares, rng), asked, seeds, tell))
    outcomes = found_by_way[0]
    about = {"nodes": nodes, "spares": spares, "days": days, "rate": rate, "replicas": settings.replicas}
    found = {
        **summary(outcomes), **recovery_view(*found_by_way), **about, "faults": faults,
        "cadence": cadence, "restart_seconds": durations.restart_s, "stall_seconds": durations.stall_s,
        "definitions": "goodput: time in steps that counted / time since the first launch",
        "assumed": simulated_lines(measured, durations, about, options),
        "wall_seconds": round(time.perf_counter() - began, 3),
    }  # fmt: skip
    if html is not None:
        from jurymast.report.simulation import page

        write_page(page(found, outcomes), html)
    if as_json:
        show_json(found)
    elif html is None:
        show(simulate_blocks(found))


def _policy_cadence(settings: Settings) -> str:
    if settings.cadence_steps is not None:
        return f"{settings.cadence_steps} steps"
    return "adaptive" if settings.cadence_s is None else f"{settings.cadence_s:g}s"


def _durations(measured: Measured, nodes: int, settings: Settings, options: dict[str, Any]) -> Durations:
    """The measured durations at this size, with the values of options in their place."""
    storage = options["storage_gb_per_s"] and options["storage_gb_per_s"] * 1e9
    try:
        durations = measured.durations(nodes, options["checkpoint_bytes"], storage, settings)
        if not settings.memory:  # saves go to storage in the background
            durations = replace(durations, copy_s=durations.read_s, restore_s=durations.read_s, write_s=None)
        names = [name for name in ("stall", "copy", "step", "repair", "requeue") if options[name] is not None]
        durations = replace(durations, **{f"{name}_s": options[name] for name in names})
        if options["restart"] is not None:
            rest_s = options["restart"] - (durations.restart_s - durations.warm_up_s)
            if rest_s < 0.0:  # the usual parts, shortened in proportion
                part = options["restart"] / durations.restart_s
                parts = ("detection_s", "stop_s", "launch_s", "restore_s", "warm_up_s")
                return replace(durations, **{name: part * getattr(durations, name) for name in parts})
            return replace(durations, warm_up_s=rest_s)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return durations


def _faults(options: dict[str, Any], resolved: Resolved, seconds: float) -> tuple[float, str, Draw]:
    """The failure rate, a name for the faults, and how to draw them for a number of nodes."""
    from jurymast.core.state.failure_rate import PRIOR_RATE
    from jurymast.sim.faults import FaultModel, parse_patterns, read_trace

    if options["trace"] is not None:
        if options["rate"] is not None:
            raise UsageError("--rate and --trace exclude each other")
        trace = read_trace(options["trace"], options["trace_nodes"])
        repair = options["trace_repairs"]

        def replay(nodes: int, rng: Random) -> list[TraceFault]:
            return trace.draw(nodes, seconds, rng, repair=repair)

        return trace.rate, f"faults as in {options['trace']}", replay
    name = options["faults"]
    rate = resolved.policy.failures.rate if options["rate"] is None else options["rate"]
    rate = PRIOR_RATE if rate is None else rate
    model = FaultModel(
        rate=rate, application_rate=options["script_rate"], hang_rate=options["hang_rate"],
        **parse_patterns(name),
    )  # fmt: skip
    return rate, f"{name} faults", lambda nodes, rng: model.draw(nodes, seconds, rng)
