#!/usr/bin/env python3
"""What training pays for its checkpoints: stalls, and steps that are slower while images are hashed, sent to
another node and written.

The same script as in `recovery.py` trains under `jurymast submit --cluster local` on two nodes of one rank
each, and saves as often as the automatic cadence wants it at a stated time between failures. Each interval
between two saves is held against its own last third, when nothing of the save goes on any more: what the
interval took longer than as many steps of that third is the save's cost. So a machine that gets slower
disturbs little. Ranks that compute all the time leave nothing for the background work on a machine of two
processors, as it would have on a node with GPUs; in the case `waits` a step waits as for a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import Stamp, StepFiles

TRAIN = Path(__file__).resolve().parent / "side_by_side" / "train_checkpointer.py"
RANKS = 2
# 24 bytes for each parameter of two square layers: with AdamW's state 100 MB, and about 0.1 s a step.
WIDTH, BATCH = 2048, 16
# Of a step that waits, in seconds.
WAITS_S = 0.15
CASES = {"computes": 0.0, "waits": WAITS_S}
# Times between failures of the whole run: of 100,000 and of 16,000 GPUs.
MTBF_S = {"20 min": 1200.0, "3 h": 10_800.0}
# How long each is watched after its last early save.
WATCHED_S = {"20 min": 180.0, "3 h": 400.0}
QUICK_S = 100.0
START_LIMIT_S, SAVES_LIMIT_S, END_LIMIT_S = 120.0, 300.0, 60.0
# So many are asked for, this far apart, to show what one costs: the automatic cadence goes by that.
EARLY, APART_S = 5, 5.0
STEPS_MIN = 12
TARGET = 0.01


@dataclass(frozen=True)
class Interval:
    """From a save to the next: `seconds`, how many steps, what the save cost in all, and for how long its
    step stood still."""

    seconds: float
    steps: int
    cost_s: float
    stall_s: float

    @property
    def share(self) -> float:
        return self.cost_s / (self.seconds - self.cost_s)


def intervals(stamps: Sequence[Stamp], saves: dict[int, float]) -> list[Interval]:
    """`stamps`: of one rank; `saves`: by the step that was saved, for how long it stood still."""
    times = {stamp.step: stamp.time for stamp in stamps}
    found, last = list[Interval](), sorted(saves)
    for begin, end in zip(last[EARLY:], last[EARLY + 1 :], strict=False):
        lasted = [times[step] - times[step - 1] for step in range(begin + 1, end + 1)]
        if len(lasted) >= STEPS_MIN:
            quiet_s = statistics.fmean(lasted[len(lasted) * 2 // 3 :])
            cost_s = sum(lasted) - len(lasted) * quiet_s
            found.append(Interval(sum(lasted), len(lasted), cost_s, saves[begin]))
    return found


def saves_of(folder: Path) -> dict[int, float]:
    """Of rank 0, by step."""
    path = folder / "saves-0.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): float(stood_s) for step, stood_s in map(str.split, lines)}


@contextmanager
def training(folder: Path, waits_s: float, mtbf_s: float) -> Iterator[Path]:
    """The run's directory. The run is over afterwards."""
    jurymast = [sys.executable, "-m", "jurymast"]
    policy = folder / "policy.yaml"
    # Failures per 1,000 node-days of two nodes.
    policy.write_text(f"failures: {{rate: {1000 * 86_400 / mtbf_s / RANKS:.0f}}}\n")
    words = {
        "--record": folder, "--save-every": 0, "--width": WIDTH, "--batch": BATCH, "--step-time": waits_s,
    }  # fmt: skip
    command = [*jurymast, "submit", "--cluster", "local", "--json", "--runs", str(folder / "runs")]
    command += ["--policy", str(policy), "--nodes", str(RANKS), "--spares", "0", "--nproc-per-node", "1"]
    command += ["--", str(TRAIN), *(str(word) for pair in words.items() for word in pair)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"jurymast submit: {done.stderr.strip()[-1000:]}")
    run = json.loads(done.stdout)["directory"]
    try:
        yield Path(run)
    finally:
        subprocess.run([*jurymast, "cancel", run], capture_output=True, timeout=END_LIMIT_S)
        end = time.monotonic() + END_LIMIT_S
        while status(run)["exit_code"] is None and time.monotonic() < end:
            time.sleep(0.5)
        # Its processes are not over yet, and need the directory until then.
        while _has_processes(run) and time.monotonic() < end:
            time.sleep(0.5)


def _has_processes(run: str) -> bool:
    found = psutil.process_iter(["cmdline"])
    return any(run in word for process in found for word in process.info["cmdline"] or ())


def status(run: str) -> Any:
    command = [sys.executable, "-m", "jurymast", "status", run, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=END_LIMIT_S).stdout)


def trial(waits_s: float, mtbf_s: float, watched_s: float) -> list[dict[str, Any]]:
    """What each save cost. Raises RuntimeError if there were none."""
    with tempfile.TemporaryDirectory(prefix="jurymast-saves-") as name:
        folder = Path(name)
        with training(folder, waits_s, mtbf_s) as run:
            end = time.monotonic() + SAVES_LIMIT_S
            while len(saves_of(folder)) <= EARLY:
                if time.monotonic() > end:
                    logs = "".join(path.read_text(errors="replace")[-500:] for path in run.rglob("*.log"))
                    raise RuntimeError(f"no saves within {SAVES_LIMIT_S:g} s: {logs}")
                if len(saves_of(folder)) < EARLY:  # else it would take minutes to the first
                    save = [sys.executable, "-m", "jurymast", "save", str(run)]
                    subprocess.run(save, capture_output=True, timeout=SAVES_LIMIT_S)
                time.sleep(APART_S)
            time.sleep(watched_s)
            told = status(str(run))
        stamps = [stamp for stamp in StepFiles(folder, RANKS).poll() if stamp.rank == 0]
        found = intervals(stamps, saves_of(folder))
    if not found:
        raise RuntimeError(f"too few steps between saves to say anything: {told['cadence']}")
    size_bytes = max(tier["size_bytes"] for tier in told["tiers"].values())
    return [
        {"seconds": one.seconds, "step_s": one.seconds / one.steps, "cost_s": one.cost_s,
         "stall_s": one.stall_s, "share": one.share, "size_bytes": size_bytes}
        for one in found
    ]  # fmt: skip


METRICS = (
    ("share of the step time", "ratio", "share"), ("cost of a save", "s", "cost_s"),
    ("stall of its step", "s", "stall_s"), ("time between saves", "s", "seconds"), ("step", "s", "step_s"),
)  # fmt: skip


def rows(case: str, samples: list[dict[str, Any]]) -> list[Row]:
    cost_s, seconds = (sum(one[name] for one in samples) for name in ("cost_s", "seconds"))
    all_of_it = cost_s / (seconds - cost_s)
    found = [Row(case, common.JURYMAST, "share over all saves", "ratio", all_of_it, all_of_it, all_of_it, 1)]
    for metric, unit, name in METRICS:
        spread = common.spread([one[name] for one in samples])
        found.append(
            Row(case, common.JURYMAST, metric, unit, spread.median, spread.low, spread.high, spread.n)
        )
    found[1].samples.extend(samples)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--quick", action="store_true", help="the shorter time between failures alone, and not as long"
    )
    arguments = parser.parse_args()
    found, targets = list[Row](), list[Target]()
    for mtbf, mtbf_s in [*MTBF_S.items()][: 1 if arguments.quick else None]:
        for name, waits_s in CASES.items():
            case = f"{name}, a failure every {mtbf}"
            samples = trial(waits_s, mtbf_s, QUICK_S if arguments.quick else WATCHED_S[mtbf])
            found += rows(case, samples)
            share = statistics.median(one["share"] for one in samples)
            common.progress(f"{case}: {share:.2%} of the step time, {len(samples)} saves")
            targets.append(Target(f"share of the step time: {case}", share, TARGET, "lower"))
    about = {**common.machine(), "nodes": RANKS, "ranks_a_node": 1, "state_bytes": 24 * WIDTH**2}
    common.print_report("saves", found, targets, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
