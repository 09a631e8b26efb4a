#!/usr/bin/env python3
"""What jurymast costs while nothing fails: step time against plain torchrun's, and the price of a heartbeat.

The same script runs by turns under `jurymast submit --cluster local` and under torchrun, without saves or
failures. Both runs of a pair follow each other closely, so that a machine that is slower now than it was a
minute ago slows both; the order changes from pair to pair. Each run gives the median of its steps after a
warm-up, each pair a ratio; the result is the median ratio, with a bootstrap interval over pairs.

Step times need a quiet machine. Processor times, which do not, are given beside them: of a rank's step, and
of everything that the launcher runs besides the ranks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import Stamp, StepFiles, done_by_all

TRAIN = Path(__file__).resolve().parent / "side_by_side" / "train.py"
WARM_UP = 0.2  # share of the steps
RUN_LIMIT_S = 300.0
END_LIMIT_S = 20.0
POLL_S = 0.2  # seldom: looking costs processor time too
RATIO_TARGET = 1.005
BEAT_TARGET_NS = 1000.0
BEATS = 20_000
BLOCKS = 15


@dataclass(frozen=True)
class Size:
    """How many pairs of runs, and how many steps a run."""

    pairs: int
    steps: int


FULL = Size(pairs=10, steps=600)
QUICK = Size(pairs=2, steps=150)
RANKS = (1, 2)
# A step of 5-10 ms that a processor's cache holds: what else runs on the machine disturbs it least.
WIDTH = 256
BATCH = 512


@dataclass(frozen=True)
class Running:
    """A launcher at work: `root` is the process that all others descend from."""

    root: psutil.Process

    def tree(self) -> list[psutil.Process]:
        """Every process, the root's descendants after it; none once the root has ended."""
        try:
            if self.root.status() == psutil.STATUS_ZOMBIE:
                return []
            return [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_without(self, ranks: set[int]) -> float:
        """Seconds of processor time of all processes but these."""
        total = 0.0
        for process in self.tree():
            if process.pid not in ranks:
                try:
                    used = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                total += used.user + used.system
        return total

    def end(self) -> None:
        """End whatever of it is left."""
        found = self.tree()
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=END_LIMIT_S)


def _script(size: Size, record: Path) -> list[str]:
    arguments = {"--record": record, "--steps": size.steps, "--width": WIDTH, "--batch": BATCH}
    return [str(TRAIN), *(str(word) for pair in arguments.items() for word in pair)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def torchrun(size: Size, ranks: int, folder: Path) -> Iterator[Running]:
    """The script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *_script(size, folder)], stdout=log, stderr=log, env=_environment(), cwd=folder
        )
    running = Running(psutil.Process(process.pid))
    try:
        yield running
    finally:
        running.end()
        process.wait(END_LIMIT_S)


@contextmanager
def jurymast(size: Size, ranks: int, folder: Path) -> Iterator[Running]:
    """The script under jurymast, on this machine."""
    command = [sys.executable, "-m", "jurymast", "submit", "--cluster", "local", "--json"]
    command += ["--runs", str(folder / "runs"), "--nodes", "1", "--spares", "0"]
    command += ["--nproc-per-node", str(ranks), "--", *_script(size, folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False, env=_environment(),
        cwd=folder,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"jurymast submit: {done.stderr.strip()[-1000:]}")
    running = Running(psutil.Process(int(json.loads(done.stdout)["pid"])))
    try:
        yield running
    finally:
        running.end()


LAUNCHERS = {common.JURYMAST: jurymast, f"torchrun {common.public_version('torch')}": torchrun}
Figures = dict[str, float]
Pair = dict[str, Figures]


def run_once(launcher: str, size: Size, ranks: int) -> Figures:
    """One run, after its warm-up. Raises RuntimeError when it does not do all its steps.

    `median_ms` and `mean_ms` of a step, `cpu_ms` of processor time of a rank's median step, and
    `launcher_cores`: processor time of everything but the ranks, per second.
    """
    folder = Path(tempfile.mkdtemp(prefix="jurymast-overhead-"))
    try:
        files = StepFiles(folder, ranks)
        warm, end = round(size.steps * WARM_UP), time.monotonic() + RUN_LIMIT_S
        used: list[tuple[float, float]] = []
        with LAUNCHERS[launcher](size, ranks, folder) as running:
            while running.tree() and time.monotonic() < end:
                done = done_by_all(files.poll(), ranks)
                if done is not None and warm <= done[0] < size.steps:
                    own = running.cpu_without({stamp.pid for stamp in files.stamps})
                    used.append((time.monotonic(), own))
                time.sleep(POLL_S)
        figures = _figures(files.poll(), size, ranks, folder)
        return {**figures, "launcher_cores": _share(used)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _share(used: list[tuple[float, float]]) -> float:
    """Processor seconds per second between the first look and the last; 0 when there was no second one."""
    if len(used) < 2:
        return 0.0
    return (used[-1][1] - used[0][1]) / (used[-1][0] - used[0][0])


def _figures(stamps: list[Stamp], size: Size, ranks: int, folder: Path) -> Figures:
    """Of rank 0's steps: the ranks go in step."""
    own = [stamp for stamp in stamps if stamp.rank == 0]
    if len(stamps) != size.steps * ranks:
        logs = "".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.rglob("*.log")))
        raise RuntimeError(f"{len(stamps)} of {size.steps * ranks} steps were recorded: {logs}")
    steps = list(zip(own, own[1:], strict=False))[round(size.steps * WARM_UP) :]
    lasted = [(after.time - before.time) * 1000 for before, after in steps]
    cpu = [(after.cpu - before.cpu) * 1000 for before, after in steps]
    return {
        "median_ms": statistics.median(lasted),
        "mean_ms": statistics.fmean(lasted),
        "cpu_ms": statistics.median(cpu),
    }


def measure_pairs(size: Size, ranks: int) -> list[Pair]:
    """The figures of both launchers, pair by pair; who goes first alternates."""
    pairs: list[Pair] = []
    for number in range(size.pairs):
        order = list(LAUNCHERS) if number % 2 else list(reversed(LAUNCHERS))
        pair = {launcher: run_once(launcher, size, ranks) for launcher in order}
        told = ", ".join(f"{launcher} {pair[launcher]['median_ms']:.3f} ms" for launcher in LAUNCHERS)
        common.progress(f"{_case(ranks)}, pair {number + 1} of {size.pairs}: {told}")
        pairs.append(pair)
    return pairs


def _case(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks > 1 else "")


def rows_of(pairs: list[Pair], ranks: int) -> tuple[list[Row], Target]:
    """What both took, and jurymast over torchrun: of the median step (which the target is about), of the
    mean, which rare long steps move, and of processor time."""
    case = _case(ranks)
    rows = []
    for metric, figure, unit in (
        ("step time", "median_ms", "ms"),
        ("processor time of a step", "cpu_ms", "ms"),
        ("processors used by the launcher", "launcher_cores", "cores"),
    ):
        for launcher in LAUNCHERS:
            samples = [pair[launcher][figure] for pair in pairs]
            found = common.spread(samples)
            rows.append(
                Row(case, launcher, metric, unit, found.median, found.low, found.high, found.n,
                    samples=list(samples))
            )  # fmt: skip
    rows.append(_ratio_row(case, "processor time ratio", "cpu_ms", pairs))
    rows.append(_ratio_row(case, "mean step time ratio", "mean_ms", pairs))
    ratio = _ratio_row(case, "step time ratio", "median_ms", pairs)
    interval = f"95 % interval {ratio.low:.4f} to {ratio.high:.4f} over {len(pairs)} pairs"
    name = f"step_time_ratio_{case.replace(' ', '_')}"
    return [*rows, ratio], Target(name, ratio.median, RATIO_TARGET, "lower", interval)


def _ratio_row(case: str, metric: str, figure: str, pairs: list[Pair]) -> Row:
    own, other = LAUNCHERS
    ratios = [pair[own][figure] / pair[other][figure] for pair in pairs]
    low, high = common.bootstrap(ratios)
    note = "low and high: 95 % bootstrap interval of the median over pairs"
    value = statistics.median(ratios)
    return Row(case, own, metric, "ratio", value, low, high, len(ratios), note, list(ratios))


def beat_rows() -> list[Row]:
    """The price of a heartbeat by itself, and of the hook that gives it in an unmodified script."""
    from jurymast.worker import link

    page = mmap.mmap(-1, link.SLOT_BYTES)
    own = link.Link(page, -1, 0)

    def nothing() -> None:
        for _ in range(BEATS):
            pass

    def beats() -> None:
        for step in range(BEATS):
            own.beat(step)

    bare = statistics.median(_nanoseconds(nothing))
    price = [value - bare for value in _nanoseconds(beats)]
    if link.read_slot(page, 0).step != BEATS - 1:
        raise RuntimeError("the heartbeats did not arrive")
    return [_beat_row("heartbeat", "link.beat", price), _hook_row(own)]


def _hook_row(own: Any) -> Row:
    """An optimizer's step that does nothing, with the hook less before it was there."""
    import torch

    from jurymast.worker import hooks

    class Idle(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            """Nothing: only what torch does around a step is timed."""

    optimizer = Idle([torch.nn.Parameter(torch.zeros(1))], {})

    def steps() -> None:
        for _ in range(BEATS):
            optimizer.step()

    without = statistics.median(_nanoseconds(steps))
    hooks.count_optimizer_steps(own)
    return _beat_row("heartbeat", "optimizer hook", [value - without for value in _nanoseconds(steps)])


def _nanoseconds(work: Callable[[], None]) -> list[float]:
    """ns a beat, of `BLOCKS` blocks of `BEATS`, after one to warm up."""
    found = []
    for _ in range(BLOCKS + 1):
        began = time.perf_counter_ns()
        work()
        found.append((time.perf_counter_ns() - began) / BEATS)
    return found[1:]


def _beat_row(case: str, metric: str, price: list[float]) -> Row:
    found = common.spread(price)
    return Row(
        case, common.JURYMAST, metric, "ns", found.median, found.low, found.high, found.n, samples=list(price)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same shape, in a minute")
    parser.add_argument("--pairs", type=int, help=f"pairs of runs for each number of ranks [{FULL.pairs}]")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    size = Size(arguments.pairs or size.pairs, size.steps)
    about = {**common.machine(), "steps_of_a_run": size.steps, "low_and_high": "lowest and highest sample"}
    rows = beat_rows()
    targets = [Target("beat_ns", rows[0].median, BEAT_TARGET_NS, "lower")]
    for ranks in RANKS:
        more, target = rows_of(measure_pairs(size, ranks), ranks)
        rows += more
        targets.append(target)
    common.print_report("overhead", rows, targets, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
