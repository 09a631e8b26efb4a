#!/usr/bin/env python3
"""The goodput of one training with the same faults at the same steps: as a job that requeues itself, under
plain sbatch, and launched by jurymast; and what `submit --observe` foretold of the first.

Both jobs run on a real Slurm cluster with accounting on this machine (`slurm/testcluster`). For each, and for
what was foretold, the seconds since the first launch are told by category, so that a difference has a cause.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.core.goodput import cut_out, ordered
from jurymast.report.status import read_status
from jurymast.rundir import RunDirectory
from support.observed_jobs import Faults, Job
from support.slurm_runs import ACCOUNTS, jurymast
from testcluster import Cluster, ClusterError

PLAIN, FORETOLD = "sbatch --requeue", "foretold"
NODES, SPARES = 6, "2"
NEAR_POINTS = 2.0
EACH_STEPS = 100  # about 20 s
# Kills of all ranks, and two lost nodes, which is as many as there are spares: one crashes, one falls silent.
FAULTS: Faults = (
    ("kill", 1), ("crash", 2), ("kill", 0), ("kill", 2), ("kill", 1), ("kill", 0), ("kill", 2), ("kill", 1),
    ("kill", 0), ("power-loss", 1), ("kill", 2), ("kill", 1), ("kill", 0), ("kill", 2), ("kill", 0),
    ("kill", 1), ("kill", 2), ("kill", 0), ("kill", 1), ("kill", 2),
)  # fmt: skip
QUICK = 4


def play(cluster: Cluster, work: Path, faults: Faults, *more: str) -> tuple[Job, dict[str, Any]]:
    """A job with these faults, and its report; `more` are options of submit."""
    words = ("jurymast", "submit", "--parsable", "--spares", SPARES, *more, "job.sbatch")
    job = Job(cluster, work, *words, str(EACH_STEPS * (len(faults) + 1)))
    job.play(faults, EACH_STEPS)
    report = job.report()
    cluster.repair_all()
    return job, report


def seconds_of(directory: RunDirectory) -> dict[str, float]:
    """The seconds since a run's first launch, by category, of what its placed nodes did, and in the queue."""
    account = read_status(directory).ledger.account()
    spent: defaultdict[str, float] = defaultdict(float)
    for intervals in (account.timeline, account.waits):
        for one in cut_out(intervals, account.first_launch or 0, account.end):
            spent[one.category] += one.us / 1e6
    return {name: spent[name] for name in ordered(list(spent))}


def rows_of(plain: dict[str, Any], acting: dict[str, Any], gave: dict[str, float]) -> list[Row]:
    foretold = plain["instead"]["as_it_is"]
    ratios = {PLAIN: plain["ratios"], FORETOLD: foretold, JURYMAST: acting["ratios"]}
    rows = []
    for system, told in ratios.items():
        for name in ("runtime_goodput", "allocation_goodput"):
            high = plain["ratios_at_most"][name] if system == PLAIN else told[name]
            note = "a range: Slurm's accounts and the log do not tell all" if system == PLAIN else ""
            middle = None if system == PLAIN else told[name]
            rows.append(Row("goodput", system, name, "0..1", middle, told[name], high, 1, note))
    nodes = plain["nodes"]["active"]  # all of them did the same
    by_sbatch = {name: seconds / nodes for name, seconds in plain["categories"].items()}
    spent = {PLAIN: by_sbatch, FORETOLD: foretold["seconds"], JURYMAST: gave}
    rows += [
        Row("where it went", system, name, "s", seconds, seconds, seconds, 1)
        for system, found in spent.items()
        for name, seconds in found.items()
    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} faults")
    parser.add_argument(
        "--dir", type=Path, default=Path("/var/lib/jurymast-observed"), help="the cluster's directory"
    )
    arguments = parser.parse_args()
    faults = FAULTS[:QUICK] if arguments.quick else FAULTS
    try:
        cluster = Cluster.up(NODES, directory=arguments.dir, **ACCOUNTS)
    except ClusterError as error:
        parser.error(f"no Slurm cluster on this machine: {error}")
    try:
        work = cluster.shared / "test_benchmark"
        common.progress(f"{len(faults)} faults under plain sbatch")
        job, plain = play(cluster, work / "plain", faults, "--observe")
        common.progress(jurymast(cluster, "report", str(job.directory))[1])
        common.progress("the same under jurymast")
        job, acting = play(cluster, work / "acting", faults)
        spent = seconds_of(RunDirectory(job.directory))
    finally:
        cluster.down(purge=True)
    told, gave, was = (
        found["runtime_goodput"]
        for found in (plain["instead"]["as_it_is"], acting["ratios"], plain["ratios_at_most"])
    )
    targets = [
        Target("foretold against given, points", 100 * abs(told - gave), NEAR_POINTS, "lower"),
        Target("given beyond plain, points", 100 * (gave - was), 0.0, "higher"),
    ]
    about = {**common.machine(), "quick": arguments.quick, "faults": len(faults)}
    common.print_report("observed", rows_of(plain, acting, spent), targets, about, arguments.json)


if __name__ == "__main__":
    main()
