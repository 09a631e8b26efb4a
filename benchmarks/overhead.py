#!/usr/bin/env python3
"""What jurymast costs while nothing fails: step time against plain torchrun's, and the price of a heartbeat.

The same script runs under `jurymast submit --cluster local` and under torchrun at the same time, in turns
of a second: while one has its turn, every process of the other is stopped. So a machine that is slower now
than it was a minute ago slows both, and what a launcher's own processes take shows in its own turns only.
Two turns in a row give a ratio (who goes first alternates). Where a process's memory happens to lie makes
it some percent faster or slower for all its life, so both are started anew many times: a start gives the
median of its ratios, the result is the median over starts, with a bootstrap interval.

What jurymast's own processes cost is also measured within the same ranks, which that cannot disturb: the
ranks run on while all the rest of it is stopped and continued five times a second, and the steps of a slot
are compared with those of the slot beside it: as under a launcher that costs nothing. What its timers missed
while they were stopped they catch up with, so the cost is rather overstated. What is left then is what runs
in a rank itself: the price of a heartbeat.

Processor times are given beside them: of a rank's step, and of everything that the launcher runs besides the
ranks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import StepFiles, done_by_all

TRAIN = Path(__file__).resolve().parent / "side_by_side" / "train.py"
WARM_UP_STEPS = 100
START_LIMIT_S = 120.0
END_LIMIT_S = 20.0
POLL_S = 0.1
# The first part of a turn fills the processor's caches again.
SETTLE_S = 0.1
STEPS_MAX = 10_000_000
RATIO_TARGET = 1.005
BEAT_TARGET_NS = 1000.0
BEATS = 20_000
BLOCKS = 15


@dataclass(frozen=True)
class Size:
    """How often both are started anew, how many pairs of turns, how long each, they then have, and how many
    pairs of slots jurymast with and without its launcher."""

    starts: int
    pairs: int
    turn_s: float
    slots: int


FULL = Size(starts=15, pairs=10, turn_s=1.0, slots=75)
QUICK = Size(starts=2, pairs=4, turn_s=0.6, slots=10)
SLOT_S = 0.2
SLOT_STEPS_MIN = 3
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

    def signal(self, number: signal.Signals, ranks: set[int], *, ranks_first: bool) -> None:
        """To every process. A launcher that sees its ranks stopped would have something to look into."""
        for process in sorted(self.tree(), key=lambda process: (process.pid in ranks) != ranks_first):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def end(self) -> None:
        """End whatever of it is left."""
        found = self.tree()
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=END_LIMIT_S)


def _script(record: Path) -> list[str]:
    arguments = {"--record": record, "--steps": STEPS_MAX, "--width": WIDTH, "--batch": BATCH}
    return [str(TRAIN), *(str(word) for pair in arguments.items() for word in pair)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def torchrun(ranks: int, folder: Path) -> Iterator[Running]:
    """The script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *_script(folder)], stdout=log, stderr=log, env=_environment(), cwd=folder
        )
    running = Running(psutil.Process(process.pid))
    try:
        yield running
    finally:
        running.end()
        process.wait(END_LIMIT_S)


@contextmanager
def jurymast(ranks: int, folder: Path) -> Iterator[Running]:
    """The script under jurymast, on this machine."""
    command = [sys.executable, "-m", "jurymast", "submit", "--cluster", "local", "--json"]
    command += ["--runs", str(folder / "runs"), "--nodes", "1", "--spares", "0"]
    command += ["--nproc-per-node", str(ranks), "--", *_script(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False, env=_environment(),
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


@dataclass
class Contender:
    """A launcher with its training, stopped but for its turns."""

    running: Running
    files: StepFiles
    folder: Path
    ranks: int
    pids: set[int] = field(default_factory=set)

    def warm_up(self) -> None:
        """Until its first steps are done; then it is stopped. Raises RuntimeError when they do not come."""
        end = time.monotonic() + START_LIMIT_S
        while (done_by_all(self.files.poll(), self.ranks) or (0, 0.0))[0] < WARM_UP_STEPS:
            if time.monotonic() > end or not self.running.tree():
                found = sorted(self.folder.rglob("*.log"))
                logs = "".join(path.read_text(errors="replace")[-500:] for path in found)
                raise RuntimeError(f"the training did not get going: {logs}")
            time.sleep(POLL_S)
        self.pids = {stamp.pid for stamp in self.files.stamps}
        self.running.signal(signal.SIGSTOP, self.pids, ranks_first=False)

    def turn(self, turn_s: float) -> Figures:
        """Let it run for so long.

        `median_ms` and `mean_ms` of a step, `cpu_ms` of processor time of a rank's median step, and
        `launcher_cores`: processor time of everything but the ranks, per second.
        """
        pids, before = self.pids, len(self.files.stamps)
        used = self.running.cpu_without(pids)
        self.running.signal(signal.SIGCONT, pids, ranks_first=True)
        began = time.time()
        time.sleep(turn_s)
        ended = time.time()
        self.running.signal(signal.SIGSTOP, pids, ranks_first=False)
        used = self.running.cpu_without(pids) - used
        new = self.files.poll()[before:]
        own = [s for s in new if s.rank == 0 and began + SETTLE_S < s.time < ended]  # ranks go in step
        if len(own) < 10:
            raise RuntimeError(f"{len(own)} steps in {turn_s:.1f} s: too few to say anything")
        steps = list(zip(own, own[1:], strict=False))
        return {
            "median_ms": statistics.median((after.time - before.time) * 1000 for before, after in steps),
            "mean_ms": (own[-1].time - own[0].time) * 1000 / len(steps),
            "cpu_ms": statistics.median((after.cpu - before.cpu) * 1000 for before, after in steps),
            "launcher_cores": used / (ended - began),
        }

    def with_and_without(self, pairs: int) -> list[float]:
        """Mean step time with the launcher at work over that with all of it stopped, of pairs of slots."""
        first, slots = len(self.files.stamps), list[tuple[float, float]]()
        self.running.signal(signal.SIGCONT, self.pids, ranks_first=True)
        for number in range(2 * pairs):
            self._launcher(signal.SIGCONT if _at_work(number) else signal.SIGSTOP)
            began = time.time()
            time.sleep(SLOT_S)
            slots.append((began, time.time()))
        self.running.signal(signal.SIGSTOP, self.pids, ranks_first=False)
        times = [stamp.time for stamp in self.files.poll()[first:] if stamp.rank == 0]
        means = [_mean_step([t for t in times if began < t < ended]) for began, ended in slots]
        ratios = [
            pair[0] / pair[1] if _at_work(number) else pair[1] / pair[0]
            for number in range(0, 2 * pairs, 2)
            if all(pair := means[number : number + 2])
        ]
        if not ratios:
            raise RuntimeError(f"{len(times)} steps in {2 * pairs * SLOT_S:.0f} s: too few to say anything")
        return ratios

    def _launcher(self, number: signal.Signals) -> None:
        for process in self.running.tree():
            if process.pid not in self.pids:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue


def _at_work(slot: int) -> bool:
    """On, off, off, on: a machine that gets slower all the time favours neither."""
    return slot % 4 in (0, 3)


def _mean_step(times: list[float]) -> float:
    """Seconds; 0.0 of too few to say anything."""
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > SLOT_STEPS_MIN else 0.0


@dataclass(frozen=True)
class Start:
    """What a start gave: `pairs` of turns of both launchers, and ratios of jurymast's slots with and without
    its launcher."""

    pairs: list[Pair]
    own: list[float]


def measure_start(size: Size, ranks: int, number: int) -> Start:
    """Start both launchers, and give them their turns."""
    pairs: list[Pair] = []
    names = list(LAUNCHERS) if number % 2 else list(reversed(LAUNCHERS))
    with ExitStack() as stack:
        contenders = {}
        for launcher in names:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jurymast-overhead-")))
            running = stack.enter_context(LAUNCHERS[launcher](ranks, folder))
            contenders[launcher] = Contender(running, StepFiles(folder, ranks), folder, ranks)
            contenders[launcher].warm_up()
        for _ in range(size.pairs):
            names.reverse()
            pairs.append({launcher: contenders[launcher].turn(size.turn_s) for launcher in names})
        own = contenders[common.JURYMAST].with_and_without(size.slots)
    return Start(pairs, own)


def measure_starts(size: Size, ranks: int) -> list[Start]:
    starts: list[Start] = []
    for number in range(size.starts):
        starts.append(measure_start(size, ranks, number))
        ratio = _ratio(starts[-1].pairs, "mean_ms", *LAUNCHERS)
        own = statistics.median(starts[-1].own)
        common.progress(
            f"{_case(ranks)}, start {number + 1} of {size.starts}: ratio {ratio:.3f}, "
            f"with the launcher over without it {own:.3f}"
        )
    return starts


def _case(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks > 1 else "")


def rows_of(starts: list[Start], ranks: int) -> tuple[list[Row], list[Target]]:
    """What both took, and jurymast over torchrun: of the mean step (which the targets are about, for what a
    launcher takes now and then is in it), of the median step, and of processor time."""
    case = _case(ranks)
    rows = []
    for metric, figure, unit in (
        ("step time", "mean_ms", "ms"),
        ("processor time of a step", "cpu_ms", "ms"),
        ("processors used by the launcher", "launcher_cores", "cores"),
    ):
        for launcher in LAUNCHERS:
            samples = [statistics.fmean(pair[launcher][figure] for pair in start.pairs) for start in starts]
            found = common.spread(samples)
            rows.append(
                Row(case, launcher, metric, unit, found.median, found.low, found.high, found.n,
                    samples=list(samples))
            )  # fmt: skip
    rows.append(_ratio_row(case, "processor time ratio", "cpu_ms", starts))
    rows.append(_ratio_row(case, "median step time ratio", "median_ms", starts))
    ratio = _ratio_row(case, "step time ratio", "mean_ms", starts)
    own, name = _own_row(case, starts), case.replace(" ", "_")
    return [*rows, ratio, own], [
        _target(f"step_time_ratio_{name}", ratio, "starts"),
        _target(f"launcher_at_work_over_stopped_{name}", own, "pairs of slots"),
    ]


def _target(name: str, ratio: Row, what: str) -> Target:
    interval = f"95 % interval {ratio.low:.4f} to {ratio.high:.4f} over {ratio.n} {what}"
    return Target(name, ratio.median, RATIO_TARGET, "lower", interval)


def _ratio(pairs: list[Pair], figure: str, own: str, other: str) -> float:
    return statistics.median(pair[own][figure] / pair[other][figure] for pair in pairs)


def _ratio_row(case: str, metric: str, figure: str, starts: list[Start]) -> Row:
    return _of_ratios(case, metric, [_ratio(start.pairs, figure, *LAUNCHERS) for start in starts], "starts")


def _own_row(case: str, starts: list[Start]) -> Row:
    """Each pair of slots counts by itself: both are of the same ranks, so nothing of a start is in it."""
    pairs = [ratio for start in starts for ratio in start.own]
    return _of_ratios(case, "step time, launcher at work over stopped", pairs, "pairs of slots")


def _of_ratios(case: str, metric: str, ratios: list[float], what: str) -> Row:
    low, high = common.bootstrap(ratios)
    note = f"low and high: 95 % bootstrap interval of the median over {what}"
    value = statistics.median(ratios)
    return Row(case, common.JURYMAST, metric, "ratio", value, low, high, len(ratios), note, list(ratios))


def beat_rows() -> list[Row]:
    """The price of a heartbeat by itself, and of the hook that gives it in an unmodified script."""
    from jurymast.worker import link

    page = mmap.mmap(-1, link.SLOT_BYTES)
    own = link.Link(page, "", 0)

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
    hooks.watch_steps(own)
    return _beat_row("heartbeat", "optimizer hooks", [value - without for value in _nanoseconds(steps)])


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
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks [1 2]")
    parser.add_argument("--starts", type=int, help=f"starts for each number of ranks [{FULL.starts}]")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    size = replace(size, starts=arguments.starts or size.starts)
    about = {**common.machine(), "turn_s": size.turn_s, "low_and_high": "lowest and highest sample"}
    rows = beat_rows()
    targets = [Target("beat_ns", rows[0].median, BEAT_TARGET_NS, "lower")]
    for ranks in arguments.ranks:
        more, found = rows_of(measure_starts(size, ranks), ranks)
        rows += more
        targets += found
    common.print_report("overhead", rows, targets, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
