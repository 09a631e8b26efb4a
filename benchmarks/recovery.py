#!/usr/bin/env python3
"""Time from the last step before a fault to the first new step after it: jurymast and peers, side by side.

Brings up a real Slurm cluster of six nodes on this machine (root, Debian or Ubuntu) and takes it down again.
The same torchrun-style training runs under every system, three active nodes and a spare, and is hurt in the
same way; rounds go through all systems, so that what else the machine does strikes all alike. Times come from
the training's own time stamps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side import nvrx
from benchmarks.side_by_side.systems import (
    ACTIVE,
    IN_PROCESS,
    JURYMAST,
    NVRX,
    REFILL,
    SAVE_EVERY,
    STEP_S,
    TORCHRUN_OWN_STORE,
    System,
    systems,
)
from benchmarks.side_by_side.trial import CASES, Case, Plan, run_trial
from testcluster import Cluster, ClusterError

DIRECTORY = Path("/var/lib/jurymast-bench")
CACHE = Path("/var/cache/jurymast-bench")
NODES = 6
SETTLE_S = 5.0
PEER_RATIO = 5.0
NOTICED_TARGET_S = 0.15  # in process
REFILL_TARGET_S = 5.0
QUICK_CASES = ("worker_kill", "power_loss")
QUICK_SYSTEMS = (JURYMAST, TORCHRUN_OWN_STORE)
QUICK_BUDGET_S = 50.0
QUICK_TRIAL_S = 20.0  # what a trial needs at least: the start of the training, the repair of the cluster
QUICK_SETTLE_S = 2.0

WHOLE, NOTICED = "last step before the fault to first new step", "fault noticed to first new step"

Sample = dict[str, Any]


@dataclass
class Bench:
    """What is asked for, and the samples so far by (case, system key)."""

    cases: list[Case]
    systems: list[System]
    repeats: int
    give_up: int
    settle_s: float
    deadline_s: float | None
    quick: bool
    record: Path | None
    began: float = field(default_factory=time.monotonic)
    missing: dict[str, str] = field(default_factory=dict)  # system key -> why it cannot run
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)

    def of(self, case: Case, system: System) -> list[Sample]:
        return self.samples.setdefault((case.name, system.key), [])

    def deadline(self, case: Case) -> float:
        """Seconds after the fault that a trial of the case may take."""
        limit_s = case.deadline_s if self.deadline_s is None else self.deadline_s
        if self.quick:
            limit_s = min(limit_s, max(1.0, self.left_s - QUICK_TRIAL_S / 2))
        return limit_s

    @property
    def left_s(self) -> float:
        """Seconds left for another trial: endless unless quick."""
        return QUICK_BUDGET_S - (time.monotonic() - self.began) if self.quick else math.inf

    def why_not(self, case: Case, system: System, repeat: int) -> str:
        """Why this trial is left out; "" when it is to be done."""
        done = self.of(case, system)
        if system.key in self.missing:
            return self.missing[system.key]
        if not case.spares and system.without_spare:
            return system.without_spare
        if case.spares and system.with_spare:
            return system.with_spare
        if self.quick and (case.name not in QUICK_CASES or system.key not in QUICK_SYSTEMS):
            return "not run by --quick"
        if any(sample["repeat"] == repeat for sample in done):
            return "done before"
        if len(done) >= self.give_up and all(sample["seconds"] is None for sample in done):
            return f"given up after {self.give_up} trials without a new step"
        original = self.system(system.instead_of)
        if original and (not self.of(case, original) or _recovered(self.of(case, original))):
            return f"not needed: {original.label} recovers"
        if self.left_s < QUICK_TRIAL_S:
            return "no time left in --quick"
        return ""

    def system(self, key: str) -> System | None:
        return next((system for system in self.systems if system.key == key), None)

    def load(self) -> None:
        """Take up the trials that an earlier run recorded."""
        if self.record and self.record.exists():
            for line in self.record.read_text().splitlines():
                entry = json.loads(line)
                self.samples.setdefault((entry["case"], entry["system"]), []).append(entry["sample"])

    def add(self, case: Case, system: System, sample: Sample) -> None:
        self.of(case, system).append(sample)
        if self.record:
            with self.record.open("a") as file:
                file.write(json.dumps({"case": case.name, "system": system.key, "sample": sample}) + "\n")


def _recovered(samples: list[Sample]) -> bool:
    return any(sample["seconds"] is not None for sample in samples)


def rounds(bench: Bench) -> Iterator[tuple[Case, System, int]]:
    """Every trial: in each round all systems in turn. When quick, jurymast's come first."""
    if bench.quick:
        yield from ((case, system, 1) for system in bench.systems for case in bench.cases)
        return
    for case in bench.cases:
        for repeat in range(1, bench.repeats + 1):
            yield from ((case, system, repeat) for system in bench.systems)


def run(bench: Bench, cluster: Cluster) -> None:
    for case, system, repeat in rounds(bench):
        name = f"{case.name}, {system.label}, {repeat} of {bench.repeats}"
        reason = bench.why_not(case, system, repeat)
        if reason:
            if not bench.quick:
                common.progress(f"{name}: left out, {reason}")
            continue
        plan = Plan(case, system, repeat, bench.settle_s, bench.deadline(case))
        sample = run_trial(cluster, plan)
        bench.add(case, system, sample)
        took = sample.get("note") if sample["seconds"] is None else f"{sample['seconds']:.2f} s"
        parts = sample.get("story", {}).get("seconds", {})
        told = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items() if seconds >= 0.005)
        common.progress(f"{name}: {took}{f' ({told})' if told else ''}")


def rows(bench: Bench) -> list[Row]:
    """A row for each case and system."""
    found = []
    for case in bench.cases:
        for system in bench.systems:
            samples = bench.of(case, system)
            spread = common.spread([sample["seconds"] for sample in samples])
            note = _note(samples) if samples else bench.why_not(case, system, 1)
            found.append(
                Row(case.name, system.label, WHOLE, "s",
                    spread.median, spread.low, spread.high, spread.n, note, list(samples))
            )  # fmt: skip
            noticed = [_after_detection_s(sample) for sample in samples if sample.get("story")]
            if noticed:
                spread = common.spread(noticed)
                found.append(
                    Row(case.name, system.label, NOTICED, "s",
                        spread.median, spread.low, spread.high, spread.n, "by jurymast's own report", [])
                )  # fmt: skip
    return found


def _after_detection_s(sample: Sample) -> float | None:
    seconds: dict[str, float] = sample["story"]["seconds"]
    if sample["seconds"] is None or not sample["story"]["recovered"]:
        return None
    return sum(seconds.values()) - seconds["detect"]


def _note(samples: list[Sample]) -> str:
    """How many trials did not recover, and what the most usual one of them said."""
    lost = [sample for sample in samples if sample["seconds"] is None]
    if not lost:
        return ""
    usual = Counter(sample.get("note", "") for sample in lost).most_common(1)[0][0]
    return f"did not recover in {len(lost)} of {len(samples)} trials: {usual}"


def targets(bench: Bench, found: Sequence[Row]) -> list[Target]:
    """jurymast's own time, and how many times longer the best peer takes."""
    wanted = []
    for case in bench.cases:
        of_case = [row for row in found if row.case == case.name and row.metric == WHOLE]
        own = next((row.median for row in of_case if row.system == common.JURYMAST), None)
        if case.target_s is not None:
            wanted.append(Target(case.name, own, case.target_s, "lower"))
        if (system := bench.system(IN_PROCESS)) is not None and case.spares:
            noticed = (row.median for row in found if (row.case, row.metric) == (case.name, NOTICED)
                       and row.system == system.label)  # fmt: skip
            wanted.append(
                Target(f"{case.name}_in_process", next(noticed, None), NOTICED_TARGET_S, "lower", NOTICED)
            )
        if (system := bench.system(REFILL)) is not None and not case.spares:
            median = next((row.median for row in of_case if row.system == system.label), None)
            wanted.append(Target(f"{case.name}_with_refill", median, REFILL_TARGET_S, "lower"))
        peers = [row for row in of_case if not row.system.startswith(common.JURYMAST) and row.n]
        wanted.append(_against_best(f"{case.name}_vs_best_peer", own, peers))
    return wanted


def _against_best(name: str, own: float | None, peers: list[Row]) -> Target:
    medians = {row.system: row.median for row in peers if row.median is not None}
    if own is None or not peers:
        return Target(name, None, PEER_RATIO, "higher", "no peer was run" if own is not None else "")
    if not medians:
        waited_s = min(sample["deadline_s"] for row in peers for sample in row.samples)
        note = f"at least: no peer's median is within the {waited_s:.0f} s that a trial waited"
        return Target(name, waited_s / own, PEER_RATIO, "higher", note)
    best = min(medians, key=lambda system: medians[system])
    return Target(name, medians[best] / own, PEER_RATIO, "higher", f"best peer: {best}")


def about(bench: Bench, cluster: Cluster) -> dict[str, Any]:
    return {
        **common.machine(),
        "slurm": cluster.login(["sinfo", "--version"]).stdout.strip(),
        "slurmd_timeout_s": cluster.options.slurmd_timeout_s,
        "nodes": f"{NODES}: {ACTIVE} active and a spare; in the case requeue no spare, the others idle",
        "step_s": STEP_S,
        "save_every_steps": SAVE_EVERY,
        "fault_after_s": bench.settle_s,
        "low_and_high": "fastest and slowest trial; one without a new step counts as endless",
    }


def options() -> argparse.ArgumentParser:
    keys = [system.key for system in systems(CACHE)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same shape, in a minute")
    parser.add_argument("--repeats", type=int, default=5, help="trials of each case and system [5]")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=_list(names))
    parser.add_argument(
        "--systems", nargs="+", choices=keys, default=keys, metavar="SYSTEM", help=_list(keys)
    )
    parser.add_argument("--deadline", type=float, help="seconds a trial waits for a step [180; requeue: 240]")
    parser.add_argument(
        "--give-up", type=int, default=3, metavar="N",
        help="try a system no further in a case once N trials, and all, did not recover [3]",
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"the cluster's directory [{DIRECTORY}]")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where peers are installed [{CACHE}]")
    parser.add_argument(
        "--record", type=Path, metavar="FILE",
        help="append every trial to FILE as JSON; trials already there are not run again",
    )  # fmt: skip
    return parser


def _list(names: Sequence[str]) -> str:
    return f"all, or some of: {', '.join(names)}"


def _bench(arguments: argparse.Namespace) -> Bench:
    chosen = [system for system in systems(arguments.cache) if system.key in arguments.systems]
    bench = Bench(
        cases=[case for case in CASES if case.name in arguments.cases],
        systems=chosen,
        repeats=1 if arguments.quick else arguments.repeats,
        give_up=arguments.give_up,
        settle_s=QUICK_SETTLE_S if arguments.quick else SETTLE_S,
        deadline_s=arguments.deadline,
        quick=arguments.quick,
        record=arguments.record,
    )
    if bench.quick:
        # Nothing here tries the original first.
        bench.systems = [replace(system, instead_of="") for system in bench.systems]
    return bench


def _end(number: int, _frame: object) -> NoReturn:
    common.progress(f"ended by {signal.Signals(number).name}; taking the cluster down")
    sys.exit(128 + number)


def main() -> int:
    arguments = options().parse_args()
    if os.geteuid() != 0:
        print("recovery.py: a Slurm cluster on one machine needs root", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, _end)
    bench = _bench(arguments)
    bench.load()
    if bench.system(NVRX) and not bench.quick:
        failed = nvrx.install(arguments.cache)
        if failed:
            bench.missing[NVRX] = failed
    try:
        cluster = Cluster.up(NODES, directory=arguments.dir)
    except ClusterError as error:
        print(f"recovery.py: {error}", file=sys.stderr)
        return 1
    try:
        if bench.system(NVRX) and not bench.quick and NVRX not in bench.missing:
            failed = nvrx.usable(cluster, arguments.cache)
            if failed:
                bench.missing[NVRX] = failed
        described = about(bench, cluster)
        run(bench, cluster)
    finally:
        cluster.down()
    found = rows(bench)
    common.print_report("recovery", found, targets(bench, found), described, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
