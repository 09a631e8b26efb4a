"""`python -m jurymast.sim.cluster --plans 10000`: random plans of faults against simulated clusters.

Every plan has a seed (`--seed N` is the first; with `--plans 1` the only one). A plan that breaks a rule is
reduced to the shortest one that still breaks it, and printed as a line of JSON, which `--plan JSON` runs
again. `--run DIRECTORY` plays the faults that the journal of a real run shows, once for each seed. With
`--first` the first plan that breaks a rule ends the search, and is printed as it is. Exit code 1 if any plan
broke a rule.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from jurymast.errors import RunDirectoryError
from jurymast.interpreter import run_module
from jurymast.journal import events, read
from jurymast.rundir import RunDirectory
from jurymast.sim.cluster.cluster import Result, run, smallest
from jurymast.sim.cluster.field import read_field
from jurymast.sim.cluster.plans import (
    Plan,
    mixed_plan,
    pooled_plan,
    random_plan,
    refilled_plan,
    shrinking_plan,
)

AT_ONCE = 20
TOLD_EVERY_S = 10.0


PlanOf = Callable[[int], Plan]


def several(seeds: range, plan_of: PlanOf = random_plan) -> list[Result]:
    """Run one plan per seed; returns the results, with the shortest plan for those that broke a rule."""
    results = []
    for seed in seeds:
        result = run(plan_of(seed))
        results.append(smallest(result) if result.broken else result)
    return results


def until_first(seeds: range, plan_of: PlanOf) -> Iterator[Result]:
    for seed in seeds:
        yield (result := run(plan_of(seed)))
        if result.broken:
            return


def every(seeds: range, processes: int, plan_of: PlanOf) -> Iterator[Result]:
    parts = [seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)]
    if processes < 2:
        for part in parts:
            yield from several(part, plan_of)
        return
    # From Python 3.14 on the usual way starts a Python, which imports from the directory it is started in.
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        for results in pool.map(partial(several, plan_of=plan_of), parts):
            yield from results


def tell(result: Result, *, as_json: bool) -> None:
    if as_json:
        line = {"seed": result.plan.seed, "broken": result.broken, "plan": json.loads(result.plan.to_json())}
        print(json.dumps(line), flush=True)
    else:
        print(f"seed {result.plan.seed}: {result.broken}\n  --plan '{result.plan.to_json()}'", flush=True)


def of_run(directory: str) -> PlanOf:
    """The plan of a real run's faults. Raises RunDirectoryError, and ValueError if its journal shows none."""
    field = read_field(events(read(RunDirectory(directory))))
    print(f"the run's faults: --plan '{field.plan.to_json()}'", file=sys.stderr)
    for kind, times in field.left_out.items():
        print(f"left out, as no simulated fault stands for it: {times} times {kind}", file=sys.stderr)
    return partial(with_seed, field.plan)


def with_seed(plan: Plan, seed: int) -> Plan:
    return replace(plan, seed=seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.sim.cluster", description=__doc__)
    parser.add_argument("--plans", type=int, default=200, metavar="N", help="so many (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first (0)")
    parser.add_argument("--plan", default="", metavar="JSON", help="this one only")
    parser.add_argument(
        "--run", default="", metavar="DIRECTORY", help="the faults of this run, by its journal"
    )
    parser.add_argument(
        "--refill", action="store_true", help="the policy has refill, and other nodes are free"
    )
    parser.add_argument("--shrink", action="store_true", help="the policy lets runs go on with fewer nodes")
    parser.add_argument("--pool", action="store_true", help="nodes wait in a pool that the run shares")
    parser.add_argument("--mixed", action="store_true", help="these three, in three plans of five")
    parser.add_argument("--first", action="store_true", help="end with the first that fails; one process")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each plan that fails")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    if arguments.plan:
        try:
            plan = Plan.from_json(arguments.plan)
        except ValueError as error:
            print(f"--plan: {error}", file=sys.stderr)
            return 2
        result = run(plan)
        tell(result, as_json=arguments.json)
        return int(bool(result.broken))
    plan_of: PlanOf = refilled_plan if arguments.refill else random_plan
    plan_of = shrinking_plan if arguments.shrink else plan_of
    plan_of = pooled_plan if arguments.pool else plan_of
    plan_of = mixed_plan if arguments.mixed else plan_of
    if arguments.run:
        try:
            plan_of = of_run(arguments.run)
        except (RunDirectoryError, ValueError) as error:
            print(f"--run: {error}", file=sys.stderr)
            return 2
    began = told_at = time.monotonic()
    broken: Counter[str] = Counter()
    seconds, done = 0.0, 0
    seeds = range(arguments.seed, arguments.seed + arguments.plans)
    alone = arguments.first
    for result in until_first(seeds, plan_of) if alone else every(seeds, arguments.processes, plan_of):
        done, seconds = done + 1, seconds + result.seconds
        if result.broken:
            broken[result.rule] += 1
            tell(result, as_json=arguments.json)
        if time.monotonic() > told_at + TOLD_EVERY_S:
            told_at = time.monotonic()
            print(f"{done} plans, {sum(broken.values())} broken", file=sys.stderr, flush=True)
    took_s = time.monotonic() - began
    print(
        f"{done} plans, {seconds / 3600:.1f} simulated hours, {took_s:.0f} s "
        f"({done / took_s:.1f} plans a second): {sum(broken.values())} broken {dict(broken) or ''}",
        file=sys.stderr,
    )
    return int(bool(broken))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # else sets have another order in each process
        command = run_module("jurymast.sim.cluster", *sys.argv[1:])
        os.execve(command[0], command, {**os.environ, "PYTHONHASHSEED": "0"})
    logging.disable(logging.CRITICAL)  # of the shells, which plans make complain all the time
    sys.exit(main())
