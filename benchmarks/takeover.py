#!/usr/bin/env python3
"""What it costs when the supervisor is lost: with its node, which trains or is a spare, or its process alone.

Brings up a real Slurm cluster of four nodes on this machine (root, Debian or Ubuntu) and takes it down again.
Every trial starts a training on three of them, with the fourth as a spare. Times come from the training's
own time stamps and from the fault's; beside them stands what jurymast's report says of the same trial.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import Stamp, StepFiles, done_by_all, measure
from benchmarks.side_by_side.systems import ACTIVE, STEP_S, TRAIN, Place, Started, submit_jurymast
from benchmarks.side_by_side.trial import clear
from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from jurymast.journal import JournalFollower, events, read
from jurymast.rundir import RunDirectory
from testcluster import Cluster, ClusterError
from testcluster.faults import Fault

DIRECTORY = Path("/var/lib/jurymast-bench-takeover")
NODES = ACTIVE + 1
SUPERVISOR, AGENT = r" jurymast\.supervisor ", r" jurymast\.agent "
START_LIMIT_S, LIMIT_S = 120.0, 120.0
SETTLE_S = 8.0  # the heir has its process ready by then
# Where nothing is to be noticed, steps are watched for so long around the fault.
WATCHED_S = 8.0
POLL_S = 0.05
TRIES = 4
NEW_STEP_S, AGREE_S = 3.0, 0.3

Sample = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`trains`: whether the supervisor's node has a rank."""

    name: str
    trains: bool
    hurt: Callable[[Cluster, str], Fault]


def cut_power(cluster: Cluster, node: str) -> Fault:
    return cluster.fault("power-loss", node)


def kill_process(cluster: Cluster, node: str) -> Fault:
    return cluster.fault("kill", node, match=SUPERVISOR, signal="KILL")


CASES = [
    Case("supervisor_active", True, cut_power),
    Case("supervisor_spare", False, cut_power),
    Case("supervisor_killed", False, kill_process),
]


class Misplaced(Exception):
    """The supervisor's node trains, or does not, and was to: another start may do better."""


class Run:
    """Its journal."""

    def __init__(self, started: Started) -> None:
        assert started.run is not None
        self._directory = RunDirectory(started.run)
        self._journal = JournalFollower(self._directory)

    def state(self) -> RunState:
        return self._journal.catch_up()

    def wait(self, what: str, reached: Callable[[RunState], bool]) -> None:
        """Raises TimeoutError."""
        _wait(what, lambda: reached(self.state()), LIMIT_S)

    def began_at(self, epoch: int) -> float:
        """When that supervisor first wrote."""
        told = events(read(self._directory))
        return next(one.t for one in told if isinstance(one, ev.SupervisorStarted) and one.epoch == epoch)


def trial(cluster: Cluster, case: Case, repeat: int) -> Sample:
    """`seconds`: from the fault to the first new step, or the longest step around it. None: not in time, and
    `note` says what."""
    folder = cluster.shared / "bench" / f"{case.name}-{repeat}"
    place = Place(folder, NODES - ACTIVE)
    cluster.login(["rm", "-rf", str(folder)])
    cluster.login(["mkdir", "-p", str(place.record)])
    sample: Sample = {"repeat": repeat, "seconds": None}
    try:
        return {**sample, **_measured(cluster, case, place)}
    except (ClusterError, TimeoutError, Misplaced) as error:
        return {**sample, "note": f"the trial broke: {error!r}", "misplaced": isinstance(error, Misplaced)}
    finally:
        clear(cluster, place)


def _measured(cluster: Cluster, case: Case, place: Place) -> Sample:
    files = StepFiles(place.record, ACTIVE)
    # The batch host is the last to be placed: it trains only if another node comes late.
    run = Run(submit_jurymast(TRAIN)(cluster, place))
    with _late(cluster, cluster.nodes[1] if case.trains else ""):
        _wait("the first step", lambda: done_by_all(files.poll(), ACTIVE) is not None, START_LIMIT_S)
    run.wait("the spare", lambda state: len(state.spare_nodes()) == NODES - ACTIVE)
    _go_on(files, SETTLE_S)
    before = deepcopy(run.state())
    if (before.host in before.places) is not case.trains:
        raise Misplaced
    fault = case.hurt(cluster, before.host)
    told: Sample = {"victim": before.host, "fault_at": fault.time, "took_s": round(fault.took_s, 4)}
    if case.trains:
        return {**told, **_recovery(files, run, fault)}
    return {**told, **_unnoticed(files, run, fault, before)}


@contextmanager
def _late(cluster: Cluster, node: str) -> Iterator[None]:
    """The node's agent stands still as soon as it is there, and so comes to the run when this is over."""

    def stopped() -> bool:
        try:
            cluster.fault("kill", node, match=AGENT, signal="STOP")
        except ClusterError:
            return False  # it is not there yet
        return True

    if node:
        _wait(f"the agent of {node}", stopped, START_LIMIT_S)
    try:
        yield
    finally:
        if node:
            cluster.fault("kill", node, match=AGENT, signal="CONT")


def _recovery(files: StepFiles, run: Run, fault: Fault) -> Sample:
    """By the time stamps, and by the report."""

    def done() -> bool:
        found = measure(files.poll(), ACTIVE, fault.time)
        return found is not None and found.new_at is not None

    _wait("a new step", done, LIMIT_S)
    run.wait("word of it", lambda state: bool(state.incidents) and state.incident is None)
    recovery = measure(files.poll(), ACTIVE, fault.time)
    assert recovery is not None
    assert recovery.new_at is not None
    (incident,) = run.state().incidents
    parts = incident.seconds()
    measured_s = recovery.new_at - fault.time
    return {
        "seconds": round(measured_s, 4), "new_at": recovery.new_at, "new_step": recovery.new_step,
        "resumed_at_step": recovery.resumed_at_step,
        "stepped_after_s": round(last_step_at(files.stamps, fault.time) - fault.time, 4),
        "reported": {k: round(v, 4) for k, v in parts.items()},
        "differs_s": round(abs(sum(parts.values()) - measured_s), 4),
        "fault_differs_s": round(incident.fault_at - fault.time, 4), "action": incident.action,
    }  # fmt: skip


def last_step_at(stamps: Sequence[Stamp], fault_at: float) -> float:
    """When the processes that were there at a fault did their last step: as a rule just after it."""
    before = {stamp.process for stamp in stamps if stamp.time <= fault_at}
    return max(stamp.time for stamp in stamps if stamp.process in before)


def _unnoticed(files: StepFiles, run: Run, fault: Fault, before: RunState) -> Sample:
    run.wait("another supervisor", lambda state: state.epoch > before.epoch)
    _go_on(files, WATCHED_S)
    state = run.state()
    if state.incidents or state.attempt != before.attempt:
        return {"note": f"noticed: {[incident.cause for incident in state.incidents]}"}
    since = fault.time - WATCHED_S
    return {
        "seconds": round(longest_step_s(files.poll(), since, math.inf), 4),
        "longest_before_s": round(longest_step_s(files.stamps, since, fault.time), 4),
        "taken_over_s": round(run.began_at(before.epoch + 1) - fault.time, 3),
    }  # fmt: skip


def longest_step_s(stamps: Sequence[Stamp], since: float, until: float) -> float:
    """Between two steps of one rank, of those done from `since` to `until`."""
    times: dict[int, list[float]] = {}
    for stamp in stamps:
        if since <= stamp.time <= until:
            times.setdefault(stamp.rank, []).append(stamp.time)
    return max(b - a for done in times.values() for a, b in zip(done, done[1:], strict=False))


def _go_on(files: StepFiles, seconds: float) -> None:
    """Until the training has gone on for so long."""
    done = done_by_all(files.poll(), ACTIVE)
    until = (done[0] if done is not None else 0) + round(seconds / STEP_S)

    def reached() -> bool:
        found = done_by_all(files.poll(), ACTIVE)
        return found is not None and found[0] >= until

    _wait(f"step {until}", reached, START_LIMIT_S)


def _wait(what: str, reached: Callable[[], bool], limit_s: float) -> None:
    """Raises TimeoutError."""
    end = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {limit_s:g} s")
        time.sleep(POLL_S)


def rows(samples: dict[str, list[Sample]]) -> list[Row]:
    found = []
    for case in CASES:
        of_case = samples.get(case.name, [])
        spread = common.spread([sample["seconds"] for sample in of_case])
        metric = "fault to first new step" if case.trains else "longest step around the fault"
        note = "; ".join(sample["note"] for sample in of_case if "note" in sample)
        found.append(
            Row(case.name, common.JURYMAST, metric, "s", spread.median, spread.low, spread.high, spread.n,
                note, list(of_case))
        )  # fmt: skip
    return found


def targets(samples: dict[str, list[Sample]]) -> list[Target]:
    found = []
    for case in CASES:
        of_case = samples.get(case.name, [])
        missed = sum(sample["seconds"] is None for sample in of_case)
        if not case.trains:
            found.append(Target(f"{case.name}_noticed", missed if of_case else None, 0, "lower"))
            continue
        median = common.spread([sample["seconds"] for sample in of_case]).median
        apart_s = [sample["differs_s"] for sample in of_case if "differs_s" in sample]
        found.append(Target(f"{case.name}_s", median, NEW_STEP_S, "lower"))
        found.append(Target("report_differs_s", max(apart_s, default=None), AGREE_S, "lower", "the worst"))
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one trial of each case")
    parser.add_argument("--repeats", type=int, default=5, help="trials of each case [5]")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"the cluster's directory [{DIRECTORY}]")
    return parser


def main() -> int:
    arguments = options().parse_args()
    if os.geteuid() != 0:
        print("takeover.py: a Slurm cluster on one machine needs root", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the cluster is taken down
    samples: dict[str, list[Sample]] = {}
    try:
        with Cluster.up(NODES, directory=arguments.dir) as cluster:
            for repeat in range(1, 1 + (1 if arguments.quick else arguments.repeats)):
                for case in CASES:
                    if case.name in arguments.cases:
                        tries = (trial(cluster, case, repeat) for _ in range(TRIES))
                        done = (one for one in tries if not one.pop("misplaced", False))
                        never = {"repeat": repeat, "seconds": None, "note": "nodes came in the wrong order"}
                        sample = next(done, never)
                        samples.setdefault(case.name, []).append(sample)
                        common.progress(f"{case.name}, {repeat}: {json.dumps(sample)}")
    except ClusterError as error:
        print(f"takeover.py: {error}", file=sys.stderr)
        return 1
    common.print_report("takeover", rows(samples), targets(samples), common.machine(), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
