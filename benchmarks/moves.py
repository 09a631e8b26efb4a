#!/usr/bin/env python3
"""What a planned move costs: how long the training stands still, and how many steps it does again.

Brings up a real Slurm cluster of six nodes on this machine (root, Debian or Ubuntu) and takes it down again.
A training on three nodes with a spare is asked to leave one of them, by its user (`jurymast drain`) or by an
administrator (`scontrol update State=DRAIN`). Times come from the training's own time stamps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import Stamp, StepFiles, done_by_all
from benchmarks.side_by_side.systems import (
    ACTIVE,
    JURYMAST,
    STEP_S,
    TRAIN,
    TRAIN_CHECKPOINTER,
    TRAIN_IN_PROCESS,
    Place,
    Started,
    submit_jurymast,
)
from benchmarks.side_by_side.trial import clear
from testcluster import Cluster, ClusterError

DIRECTORY = Path("/var/lib/jurymast-bench")
NODES = 6
START_LIMIT_S, MOVE_LIMIT_S = 90.0, 120.0
SETTLED_STEPS = 100
# After the move the training goes on for so many steps, which belong to what is measured.
AFTER_STEPS = 40
POLL_S = 0.05

Ask = Callable[[Cluster, Started, str], None]


def by_user(cluster: Cluster, started: Started, node: str) -> None:
    """As whoever started the run."""
    cluster.login([str(cluster.python.parent / "jurymast"), "drain", str(started.run), node])


def by_admin(cluster: Cluster, started: Started, node: str) -> None:
    """As root, who knows nothing of the run."""
    cluster.slurm(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=maintenance"])


ASKED: dict[str, Ask] = {"user": by_user, "admin": by_admin}
SCRIPTS = {"restart": TRAIN_CHECKPOINTER, "in process": TRAIN_IN_PROCESS, "own checkpoints": TRAIN}


@dataclass(frozen=True)
class Move:
    """`stall_s`: the longest time without a new step; `step_s`: the usual time of one; `again`: steps that
    were done twice; `after_s`: from the request to the first step on the spare."""

    stall_s: float
    step_s: float
    again: int
    after_s: float

    @property
    def stall_steps(self) -> float:
        return self.stall_s / self.step_s

    def to_json(self) -> dict[str, float]:
        found = {"stall_s": self.stall_s, "step_s": self.step_s, "again": self.again, "after_s": self.after_s}
        return {name: round(value, 4) for name, value in found.items()}


def firsts(stamps: Sequence[Stamp]) -> dict[int, float]:
    """By step: when the last rank had done it for the first time; those that all ranks have done."""
    times: dict[int, dict[int, float]] = {}
    for stamp in stamps:
        of = times.setdefault(stamp.step, {})
        of[stamp.rank] = min(stamp.time, of.get(stamp.rank, stamp.time))
    return {step: max(of.values()) for step, of in sorted(times.items()) if len(of) == ACTIVE}


def measure(stamps: Sequence[Stamp], asked_at: float, node: str) -> Move | None:
    """The move away from `node`; None as long as it is not over."""
    rank = next(stamp.rank for stamp in stamps if stamp.host == node)
    moved = [stamp for stamp in stamps if stamp.rank == rank and stamp.time > asked_at and stamp.host != node]
    done = firsts(stamps)
    if not moved or max(done) < max(stamp.step for stamp in moved[:1]) + AFTER_STEPS:
        return None
    times = sorted(done.values())
    gaps = [(later - earlier, later) for earlier, later in zip(times, times[1:], strict=False)]
    usual = statistics.median(gap for gap, at in gaps if at < asked_at)
    steps = [[one.step for one in stamps if one.rank == rank] for rank in range(ACTIVE)]
    again = max(len(of) - len({*of}) for of in steps)
    stall_s = max(gap for gap, at in gaps if at > asked_at)
    return Move(stall_s, usual, again, moved[0].time - asked_at)


def trial(cluster: Cluster, case: str, script: Path, ask: Ask, repeat: int) -> dict[str, Any]:
    """One move; a sample without `stall_s` says in `note` what went wrong."""
    place = Place(cluster.shared / "bench" / f"{case.replace(' ', '-')}-{repeat}", spares=1)
    cluster.login(["rm", "-rf", str(place.folder)])
    cluster.login(["mkdir", "-p", str(place.record)])
    try:
        started = submit_jurymast(script)(cluster, place)
        files, end = StepFiles(place.record, ACTIVE), time.monotonic() + START_LIMIT_S
        while (done := done_by_all(files.poll(), ACTIVE)) is None or done[0] < SETTLED_STEPS + repeat:
            if time.monotonic() > end:
                return {"note": f"did not start within {START_LIMIT_S:g} s"}
            time.sleep(POLL_S / 5)
        batch_host = cluster.job(started.job).get("BatchHost", "")
        node = next(stamp.host for stamp in reversed(files.stamps) if stamp.host != batch_host)
        asked_at = time.time()
        ask(cluster, started, node)
        while (move := measure(files.poll(), asked_at, node)) is None:
            if time.time() > asked_at + MOVE_LIMIT_S:
                return {"note": f"no move within {MOVE_LIMIT_S:g} s"}
            time.sleep(POLL_S)
        return move.to_json()
    except ClusterError as error:
        return {"note": f"the trial broke: {error}"}
    finally:
        clear(cluster, place)


METRICS: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("longest time without a new step", "s", lambda one: one["stall_s"]),
    ("the same, in steps", "steps", lambda one: one["stall_s"] / one["step_s"]),
    ("steps done again", "steps", lambda one: one["again"]),
    ("from the request to the first step on the spare", "s", lambda one: one["after_s"]),
)


def rows(samples: dict[tuple[str, str], list[dict[str, Any]]]) -> list[Row]:
    found = []
    for (who, how), of_case in samples.items():
        notes = "; ".join(sorted({one["note"] for one in of_case if "note" in one}))
        for metric, unit, value in METRICS:
            spread = common.spread([None if "note" in one else value(one) for one in of_case])
            found.append(
                Row(f"asked by the {who}", f"{JURYMAST}, {how}", metric, unit,
                    spread.median, spread.low, spread.high, spread.n, notes, of_case)
            )  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one move; do not quote its figures")
    parser.add_argument("--repeats", type=int, default=5, help="moves of each case [5]")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"the cluster's directory [{DIRECTORY}]")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("moves.py: a Slurm cluster on one machine needs root", file=sys.stderr)
        return 1
    try:
        cluster = Cluster.up(NODES, directory=arguments.dir)
    except ClusterError as error:
        print(f"moves.py: {error}", file=sys.stderr)
        return 1
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        about = {**common.machine(), "step_s": STEP_S, "nodes": f"{NODES}: {ACTIVE} active and a spare"}
        repeats = 1 if arguments.quick else arguments.repeats
        cases = [(who, how) for who in ASKED for how in SCRIPTS][: 1 if arguments.quick else None]
        for repeat in range(1, repeats + 1):
            for who, how in cases:
                sample = trial(cluster, f"{who} {how}", SCRIPTS[how], ASKED[who], repeat)
                samples.setdefault((who, how), []).append(sample)
                common.progress(f"{who}, {how}, {repeat} of {repeats}: {sample}")
    finally:
        cluster.down()
    found = rows(samples)
    wanted = [
        Target(f"{row.case}, {row.system}: {row.metric}", row.median, 0.0, "lower")
        for row in found
        if row.metric == "steps done again" and not row.system.endswith("own checkpoints")
    ]
    common.print_report("moves", found, wanted, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
