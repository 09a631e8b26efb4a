#!/usr/bin/env python3
"""What jurymast costs while nothing fails: step time against plain torchrun's, and the price of a heartbeat.

The same script runs by turns under `jurymast submit --cluster local` and under torchrun, without saves or
failures. Both runs of a pair follow each other closely, so that a machine that is slower now than it was a
minute ago slows both; the order changes from pair to pair. Each run gives one figure, the median of its
steps after a warm-up; each pair one ratio; the result is the median ratio with a bootstrap interval.
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
from benchmarks.side_by_side.steps import Stamp, StepFiles

TRAIN = Path(__file__).resolve().parent / "side_by_side" / "train.py"
WARM_UP = 0.2  # share of the steps
RUN_LIMIT_S = 300.0
END_LIMIT_S = 20.0
RATIO_TARGET = 1.005
BEAT_TARGET_NS = 1000.0
BEATS = 20_000
BLOCKS = 15


@dataclass(frozen=True)
class Size:
    """How much to run: the steps of each run, and `width` of the model, which sets a step's length."""

    pairs: int
    steps: int
    width: int


FULL = Size(pairs=10, steps=600, width=1024)
QUICK = Size(pairs=2, steps=120, width=1024)
RANKS = (1, 2)


def arguments_of(size: Size, record: Path) -> list[str]:
    return [str(TRAIN), "--record", str(record), "--steps", str(size.steps), "--width", str(size.width)]


@contextmanager
def torchrun(size: Size, ranks: int, folder: Path) -> Iterator[Callable[[], bool]]:
    """Run the script under torchrun; yields a question: has it ended?"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments_of(size, folder)], stdout=log, stderr=log, env=_environment(), cwd=folder,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield lambda: process.poll() is not None
    finally:
        _end(process.pid)
        process.wait(END_LIMIT_S)


@contextmanager
def jurymast(size: Size, ranks: int, folder: Path) -> Iterator[Callable[[], bool]]:
    """Run the script under jurymast on this machine; yields a question: has it ended?"""
    command = [
        sys.executable,
        "-m",
        "jurymast",
        "submit",
        "--cluster",
        "local",
        "--runs",
        str(folder / "runs"),
    ]
    command += ["--json", "--nodes", "1", "--spares", "0", "--nproc-per-node", str(ranks), "--"]
    done = subprocess.run(
        [*command, *arguments_of(size, folder)], capture_output=True, text=True, timeout=RUN_LIMIT_S,
        check=False, env=_environment(), cwd=folder,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"jurymast submit: {done.stderr.strip()[-1000:]}")
    pid = int(json.loads(done.stdout)["pid"])
    try:
        yield lambda: not _alive(pid)
    finally:
        _end(pid)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(pid: int) -> None:
    """End a process that this script started and everything below it; gone already is fine."""
    try:
        process = psutil.Process(pid)
        found = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in found:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=END_LIMIT_S)


LAUNCHERS = {common.JURYMAST: jurymast, f"torchrun {common.public_version('torch')}": torchrun}


def run_once(launcher: str, size: Size, ranks: int) -> dict[str, float]:
    """One run: median and mean of its step times, in ms, after the warm-up. Raises RuntimeError."""
    folder = Path(tempfile.mkdtemp(prefix="jurymast-overhead-"))
    try:
        files = StepFiles(folder, ranks)
        end = time.monotonic() + RUN_LIMIT_S
        with LAUNCHERS[launcher](size, ranks, folder) as ended:
            while not ended() and time.monotonic() < end:
                time.sleep(0.2)  # seldom: looking costs processor time too
        return _figures(files.poll(), size, ranks, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figures(stamps: list[Stamp], size: Size, ranks: int, folder: Path) -> dict[str, float]:
    """Of rank 0's steps: ranks go in step."""
    times = [stamp.time for stamp in stamps if stamp.rank == 0]
    if len(stamps) != size.steps * ranks:
        logs = "".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.rglob("*.log")))
        raise RuntimeError(f"{len(stamps)} of {size.steps * ranks} steps were recorded: {logs}")
    lasted = [(b - a) * 1000 for a, b in zip(times, times[1:], strict=False)][round(size.steps * WARM_UP) :]
    return {"median_ms": statistics.median(lasted), "mean_ms": statistics.fmean(lasted)}


def measure_pairs(size: Size, ranks: int) -> list[dict[str, dict[str, float]]]:
    """The figures of both launchers, pair by pair; who goes first alternates."""
    pairs = []
    for number in range(size.pairs):
        order = list(LAUNCHERS) if number % 2 else list(reversed(LAUNCHERS))
        pair = {launcher: run_once(launcher, size, ranks) for launcher in order}
        told = ", ".join(f"{launcher} {pair[launcher]['median_ms']:.3f} ms" for launcher in LAUNCHERS)
        common.progress(f"{_case(ranks)}, pair {number + 1} of {size.pairs}: {told}")
        pairs.append(pair)
    return pairs


def _case(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks > 1 else "")


def rows_of(pairs: list[dict[str, dict[str, float]]], ranks: int) -> tuple[list[Row], Target]:
    """Step times of both, and the ratios: of the median step, and of the mean, which rare long steps move."""
    case = _case(ranks)
    own, other = LAUNCHERS
    rows = []
    for launcher in LAUNCHERS:
        samples = [pair[launcher] for pair in pairs]
        found = common.spread([sample["median_ms"] for sample in samples])
        rows.append(
            Row(case, launcher, "step time", "ms", found.median, found.low, found.high, found.n,
                samples=list(samples))
        )  # fmt: skip
    value = 0.0
    for figure, metric in (("mean_ms", "mean step time ratio"), ("median_ms", "step time ratio")):
        ratios = [pair[own][figure] / pair[other][figure] for pair in pairs]
        low, high = common.bootstrap(ratios)
        value = statistics.median(ratios)
        note = "low and high: 95 % bootstrap interval of the median over pairs"
        rows.append(Row(case, own, metric, "ratio", value, low, high, len(ratios), note, list(ratios)))
    interval = f"95 % interval {rows[-1].low:.4f} to {rows[-1].high:.4f} over {len(pairs)} pairs"
    name = f"step_time_ratio_{ranks}_rank{'s' if ranks > 1 else ''}"
    return rows, Target(name, value, RATIO_TARGET, "lower", interval)


def beat_rows() -> list[Row]:
    """The price of a heartbeat by itself, and of the hook that gives it in an unmodified script."""
    from jurymast.worker import link

    page = mmap.mmap(-1, link.SLOT_BYTES)
    own = link.Link(page, -1, 0)

    def beats() -> None:
        for step in range(BEATS):
            own.beat(step)

    bare = _nanoseconds(lambda: [None for _ in range(BEATS)])
    with_beats = _nanoseconds(beats)
    price = [value - statistics.median(bare) for value in with_beats]
    if link.read_slot(page, 0).step != BEATS - 1:
        raise RuntimeError("the heartbeats did not arrive")
    return [_beat_row("heartbeat", "link.beat, its loop's own time taken off", price), _hook_row(own)]


def _hook_row(own: Any) -> Row:
    """An optimizer's step that does nothing, with the hook and before it was there."""
    import torch

    from jurymast.worker import hooks

    class Idle(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Nothing: only what torch does around a step is timed."""

    optimizer = Idle([torch.nn.Parameter(torch.zeros(1))], {})

    def steps() -> None:
        for _ in range(BEATS):
            optimizer.step()

    without = _nanoseconds(steps)
    hooks.count_optimizer_steps(own)
    price = [value - statistics.median(without) for value in _nanoseconds(steps)]
    return _beat_row("optimizer hook", "with the hook less without, an optimizer that does nothing", price)


def _nanoseconds(work: Callable[[], Any]) -> list[float]:
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
    size = Size(arguments.pairs or size.pairs, size.steps, size.width)
    about = {**common.machine(), "steps_of_a_run": size.steps, "width": size.width}
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
