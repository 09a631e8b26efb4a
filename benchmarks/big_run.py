#!/usr/bin/env python3
"""What it takes to look at a run of thousands of nodes: six hours with a dozen incidents, 8 ranks a node; and
at thousands of runs of four nodes (`jurymast fleet`), read for the first time and again.

The run directory is made up (`tests/support/big_runs.py`): the real state machine's events and decisions,
through the real journal writer, and the logs of the newest attempt. Commands run as a user would run them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.journal import GATHER_S
from jurymast.rundir import RunDirectory
from support.big_runs import BigRun
from support.stories import Story

SIZES = (100, 1000, 12500)
QUICK_SIZES = (100, 1000)
RUNS, QUICK_RUNS = 10_000, 200
RUNS_STEPS = 4000
FLEET = ("fleet", "--by", "user,month", "--json")
FLEET_S = 10.0
HOURS = 6.0
RUN = "20261117-100000-gpt-abcd"
LIMIT_S = 300.0
COMMANDS = (
    ("status", RUN), ("status", RUN, "--json"), ("report", RUN), ("report", RUN, "--json"),
    ("report", RUN, "--html", "page.html"), ("events", RUN), ("events", RUN, "--all"), ("logs", RUN),
    ("logs", RUN, "--rank", "5"), ("logs", RUN, "--all", "-n", "1"), ("ps",), ("nodes",), ("nodes",),
    ("submit", "--dry-run", "--nodes", "{nodes}", "--gpus-per-node", "8", "--", "train.py"),
)  # fmt: skip
REPLAY = """
import sys
from jurymast.journal import replay
from jurymast.journal import GATHER_S
from jurymast.rundir import RunDirectory
replay(RunDirectory(sys.argv[1]))
"""
# Seconds that a person should not have to wait for, at any size.
WANTED = {"status": 1.0, "report": 10.0, "replay by a supervisor": 2.0}
PAGE_MB = 3.0
LINES_MAX = 1000.0


class Measured:
    """`rows` gathers what was measured, `seconds` each command's processor time at each size: these commands
    calculate more than they wait, and what else the machine does counts less in it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.seconds: dict[str, dict[int, float]] = {}

    def row(self, case: str, metric: str, unit: str, value: float, note: str = "") -> None:
        self.rows.append(Row(case, JURYMAST, metric, unit, value, value, value, 1, note))
        common.progress(f"{case}: {metric} {value:.4g} {unit}")

    def command(self, nodes: int, name: str, command: list[str], folder: Path, of: str = "nodes") -> float:
        """Run it and book its cost; the number of lines that it printed. `of`: what there are `nodes` of."""
        began = time.monotonic()
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "JURYMAST_RUNS": str(folder / "runs")},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            took_s = time.monotonic() - began
            out.seek(0)
            printed = out.read()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        case = f"{nodes} {of}: {name}"
        self.seconds.setdefault(name, {})[nodes] = used.ru_utime + used.ru_stime
        self.row(case, "time", "s", took_s)
        self.row(case, "processor time", "s", self.seconds[name][nodes])
        self.row(case, "peak memory", "MB", used.ru_maxrss / 1e3)
        if printed:
            self.row(case, "printed", "kB", len(printed) / 1e3)
            self.row(case, "printed", "lines", printed.count(b"\n"))
        return printed.count(b"\n")


def measure(found: Measured, nodes: int, folder: Path) -> list[Target]:
    directory = make(found, nodes, folder)
    targets = []
    seen: set[str] = set()
    for words in COMMANDS:
        asked = words[: words.index("--nodes")] if "--nodes" in words else words
        name = " ".join(word for word in asked if word not in (RUN, "page.html"))
        name += ", again" if name in seen else ""
        seen.add(name)
        command = [sys.executable, "-m", "jurymast", *(word.format(nodes=nodes) for word in words)]
        lines = found.command(nodes, name, command, folder)
        if name in ("status", "report", "events", "logs", "ps", "nodes"):
            targets.append(Target(f"{nodes} nodes: {name}, lines", lines, LINES_MAX, "lower"))
    found.command(
        nodes, "replay by a supervisor", [sys.executable, "-c", REPLAY, str(directory.root)], folder
    )
    page_mb = (folder / "page.html").stat().st_size / 1e6
    found.row(f"{nodes} nodes: report --html", "page", "MB", page_mb)
    targets.append(Target(f"{nodes} nodes: page of the report, MB", page_mb, PAGE_MB, "lower"))
    for name, limit_s in WANTED.items():
        targets.append(
            Target(f"{nodes} nodes: {name}, processor s", found.seconds[name][nodes], limit_s, "lower")
        )
    return targets


def make(found: Measured, nodes: int, folder: Path) -> RunDirectory:
    """In a process of its own: what this one holds would count as the memory of all that it starts."""
    directory = RunDirectory(folder / "runs" / RUN)
    (folder / "runs").mkdir()
    (folder / "train.py").write_text("")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds, events = pool.submit(write, nodes, directory.root).result()
    case = f"{nodes} nodes: run directory"
    found.row(case, "state machine, all events", "s", seconds)
    found.row(case, "events", "", events)
    size_bytes = sum(path.stat().st_size for path in directory.journal_files())
    found.row(case, "journal", "MB", size_bytes / 1e6)
    folders = [len(files) + len(below) for _, below, files in os.walk(directory.root)]
    found.row(case, "files, with the logs of one attempt", "", sum(folders))
    found.row(case, "most entries in a directory", "", max(folders))
    return directory


def write(nodes: int, root: Path) -> tuple[float, int]:
    """Seconds of the state machine, and its events."""
    began = time.monotonic()
    run = BigRun(nodes).train(HOURS)
    took_s = time.monotonic() - began
    run.write(root, gather_s=GATHER_S)
    return took_s, len(run.events)


def measure_runs(found: Measured, runs: int, folder: Path) -> list[Target]:
    """`jurymast fleet` over so many runs of a few nodes, all with the same journal."""
    story = Story(active=4, spares=1, ranks_per_node=8).running()
    for step in range(20, RUNS_STEPS, 10):
        story.stepped(step)
    story.saved(step).lost("n2")
    model = story.stopped().recovered(step, RUNS_STEPS).finished().write(folder / "model")
    plan, journals = model.plan_file.read_text(), list(model.journal_files())
    for number in range(runs):
        run = RunDirectory(folder / "runs" / f"20261117-100000-gpt-{number:05d}")
        run.journal.mkdir(parents=True)
        run.plan_file.write_text(plan.replace(RUN, run.root.name))
        for journal in journals:
            (run.journal / journal.name).hardlink_to(journal)
    found.row(f"{runs} runs", "journal of each", "kB", sum(path.stat().st_size for path in journals) / 1e3)
    for name in ("fleet, first", "fleet, again"):
        found.command(runs, name, [sys.executable, "-m", "jurymast", *FLEET], folder, of="runs")
    took_s = found.seconds["fleet, again"][runs]
    return [Target(f"{runs} runs: fleet, again, processor s", took_s, FLEET_S, "lower")]


def growth(found: Measured, sizes: list[int]) -> list[Target]:
    """Between the two largest sizes no command may take more than in proportion."""
    if len(sizes) < 2:
        return []
    *_, small, large = sizes
    return [
        Target(
            f"{name}: processor time, {large} over {small} nodes",
            took[large] / took[small],
            large / small,
            "lower",
        )
        for name, took in found.seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SIZES} nodes, for the shape")
    parser.add_argument("--nodes", type=int, nargs="*", help=f"sizes; {SIZES} unless said otherwise")
    parser.add_argument("--runs", type=int, help=f"runs of a fleet; {RUNS} unless said otherwise")
    arguments = parser.parse_args()
    usual = QUICK_SIZES if arguments.quick else SIZES
    sizes = sorted(usual if arguments.nodes is None else arguments.nodes)
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    found = Measured()
    targets: list[Target] = []
    for nodes in sizes:
        with tempfile.TemporaryDirectory(prefix="jurymast-bench-") as folder:
            targets += measure(found, nodes, Path(folder))
    targets += growth(found, sizes)
    with tempfile.TemporaryDirectory(prefix="jurymast-bench-") as folder:
        targets += measure_runs(found, runs, Path(folder))
    about = {**common.machine(), "hours": HOURS, "ranks_per_node": 8, "quick": arguments.quick}
    common.print_report("big_run", found.rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
