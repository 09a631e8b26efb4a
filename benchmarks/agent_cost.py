#!/usr/bin/env python3
"""What looking after a node costs it: processor and memory of the agent and of its probes, with their guards.

A real run of one node on this machine, whose script only waits. Its probes look at their default intervals,
NVIDIA's through the real pynvml over a C fake of eight GPUs where a compiler is there to build it: what a
driver takes for an answer is not in the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from jurymast.report.which_run import find_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import Row, Target
from support.fake_gpus import FakeGpus

GPUS = 8
PROBES_TARGET = 0.2  # percent of one core
AGENT_TARGET_MB = 60.0
START_LIMIT_S = 120.0
POLL_S = 0.1
# The children of a run begin to look after the host is warm; the first looks are dearer.
SETTLE_S = 5.0


@dataclass(frozen=True)
class Size:
    windows: int
    window_s: float


FULL = Size(windows=5, window_s=60.0)  # the longest interval of a probe is a minute
QUICK = Size(windows=2, window_s=10.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="two windows of 10 s; for the shape, not the figures"
    )
    arguments = parser.parse_args()
    about = common.machine()
    with tempfile.TemporaryDirectory(prefix="jurymast-bench-") as folder:
        rows = list(measure(Path(folder), QUICK if arguments.quick else FULL))
    value = {(row.case, row.metric): row.median for row in rows}
    targets = [
        Target("probes, percent of one core", value["probes", "processor"], PROBES_TARGET, "lower"),
        Target("agent, resident MB", value["agent", "resident memory"], AGENT_TARGET_MB, "lower"),
    ]
    common.print_report("agent_cost", rows, targets, about, arguments.json)
    return 0


def measure(folder: Path, size: Size) -> Iterator[Row]:
    environment, note = fake_gpus(folder)
    with waiting_run(folder, environment) as root:
        wait_for(lambda: of(root, "jurymast.health"))
        time.sleep(SETTLE_S)
        groups = {"agent": of(root, "jurymast.agent"), "probes": of(root, "jurymast.health")}
        common.progress(f"up: { ({case: [p.pid for p in group] for case, group in groups.items()}) }")
        shares: dict[str, list[float]] = {case: [] for case in groups}
        for number in range(size.windows):
            used = {case: cpu_s(group) for case, group in groups.items()}
            began = time.monotonic()
            time.sleep(size.window_s)
            seconds = time.monotonic() - began
            for case, group in groups.items():
                shares[case].append(100.0 * (cpu_s(group) - used[case]) / seconds)
            common.progress(f"window {number + 1} of {size.windows}: {shares}")
        for case, group in groups.items():
            yield row(case, "processor", "% of one core", shares[case], note)
            yield row(case, "resident memory", "MB", [sum(map(resident_mb, group))], note)
            unique = sum(process.memory_full_info().uss for process in group) / 1e6
            yield row(case, "memory of its own", "MB", [unique], note)


def row(case: str, metric: str, unit: str, samples: list[float], note: str) -> Row:
    spread = common.spread(samples)
    return Row(
        case, "jurymast", metric, unit, spread.median, spread.low, spread.high, spread.n, note, list(samples)
    )


def fake_gpus(folder: Path) -> tuple[dict[str, str], str]:
    """(environment, note)."""
    if shutil.which("cc") is None:
        return {}, "without GPUs: no compiler for the fake library"
    fake = FakeGpus(folder / "gpus", gpus=GPUS)
    visible = ",".join(map(str, range(GPUS)))
    return {**fake.environment(), "CUDA_VISIBLE_DEVICES": visible}, f"{GPUS} GPUs of a fake library"


@contextmanager
def waiting_run(folder: Path, environment: dict[str, str]) -> Iterator[psutil.Process]:
    """A run on one node that only waits; gives the process that all its others descend from."""
    script = folder / "wait.py"
    script.write_text("import time\ntime.sleep(1e6)\n")
    runs = folder / "runs"
    done = subprocess.run(
        [
            sys.executable, "-m", "jurymast", "submit", "--cluster", "local", "--runs", str(runs),
            "--nodes", "1", "--spares", "0", "--nproc-per-node", "1", "--parsable", "--", str(script),
        ],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=START_LIMIT_S,
    )  # fmt: skip
    run = find_run(done.stdout.strip(), runs).root
    root = psutil.Process(json.loads((run / "slurm" / "local.json").read_text())["pid"])
    try:
        yield root
    finally:
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=10)


def of(root: psutil.Process, module: str) -> list[psutil.Process]:
    """The run's processes of `module`: each with its guard."""
    return [p for p in root.children(recursive=True) if module in command_of(p)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for(look: Callable[[], object]) -> None:
    end = time.monotonic() + START_LIMIT_S
    while not look():
        if time.monotonic() > end:
            raise SystemExit(f"the run has not started within {START_LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds of processes and of their threads that ended, to the nanosecond: the clock that
    clock_getcpuclockid(3) gives for each."""
    return sum(time.clock_gettime((~process.pid << 3) | 2) for process in processes)


def resident_mb(process: psutil.Process) -> float:
    """Without shared memory, which holds the ranks' checkpoints."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return sum(int(values[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
