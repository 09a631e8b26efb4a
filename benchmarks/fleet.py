#!/usr/bin/env python3
"""How long `jurymast fleet` takes over many runs: the first time, from the summary that each run has left at
its end; again, from what was kept; and without either, when each journal is read.

The runs are stories as the tests write them: a swap or a crash loop, of some dozens of entries each.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.report.fleet import kept_file, leave_summary
from jurymast.rundir import RunDirectory
from support.commands import crash_loop, swapped

RUNS, QUICK_RUNS = 10_000, 500
WANTED_S = 10.0


def make_runs(runs: Path, number: int) -> None:
    """Write them, each with a name of its own."""
    models = [
        story.write(runs / f"20261117-100000-model-{kind}")
        for kind, story in enumerate((swapped(), crash_loop()))
    ]
    for model in models:
        leave_summary(model)
    for n in range(number - len(models)):
        name = f"20261117-{n:06d}-gpt-x"
        shutil.copytree(models[n % len(models)].root, runs / name)
        plan = json.loads((runs / name / "plan.json").read_text())
        (runs / name / "plan.json").write_text(json.dumps({**plan, "run": name}))
        leave_summary(RunDirectory(runs / name))  # as each run does at its end


def seconds(runs: Path) -> tuple[float, float]:
    """What it took by the clock, and of processors, which other work on this machine hardly changes."""
    began, before = time.perf_counter(), _processor_s()
    command = [sys.executable, "-m", "jurymast", "fleet", "--runs", str(runs), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    took = time.perf_counter() - began
    found = json.loads(done.stdout)
    assert found["total"]["runs"] > 0, found["warnings"]
    return took, _processor_s() - before


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forget(runs: Path) -> None:
    """As if all runs had died, or were of an earlier version."""
    kept_file(runs).unlink()
    for summary in runs.glob("*/summary.json"):
        summary.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RUNS} runs")
    arguments = parser.parse_args()
    number = QUICK_RUNS if arguments.quick else RUNS
    about = {**common.machine(), "quick": arguments.quick, "runs": number}
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        runs.mkdir(mode=0o700)
        make_runs(runs, number)
        times = {"first": seconds(runs), "again": seconds(runs)}
        forget(runs)
        times["journals"] = seconds(runs)
    rows = [
        Row("fleet", JURYMAST, name if of == "clock" else f"{name}, processors", "s", took, took, took, 1)
        for name, both in times.items()
        for of, took in zip(("clock", "processors"), both, strict=True)
    ]
    targets = [
        Target("10,000 runs, first time", times["first"][0] * RUNS / number, WANTED_S, "lower"),
        Target("10,000 runs, every journal read", times["journals"][0] * RUNS / number, WANTED_S, "lower"),
        Target("10,000 runs, again", times["again"][0] * RUNS / number, WANTED_S, "lower"),
    ]
    common.print_report("fleet", rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
