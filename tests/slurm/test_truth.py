"""What the report says of a run with a fault of every kind, held against the log of the faults."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jurymast.core.state.run import RunState
from support.outputs import checked
from support.saves import check_restores
from support.slurm_runs import (
    TRAIN,
    SlurmRun,
    crash,
    freeze,
    jurymast,
    kill_rank,
    policy_file,
    power_loss,
    stop_rank,
    submit,
    weights,
)
from testcluster import Cluster

# Alone: incidents are held against the moments of their faults.
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.alone]

STEPS = 2600
NEAR_S = 0.3
FORETOLD = 0.02  # by how much the simulation of the run may be off, as a share


@dataclass(frozen=True)
class Fault:
    """On the node at this place of the placement; None: the node of the supervisor."""

    strike: Callable[[SlurmRun, str], None]
    place: int | None
    cause: str
    action: str


# The supervisor's node is the last spare, so that it trains after the swap. Six nodes are four, a dead one
# and a dead supervisor's.
FAULTS = (
    Fault(kill_rank, 1, "worker_killed", "restart"),
    Fault(stop_rank, 2, "rank_frozen", "restart"),
    Fault(freeze, 1, "node_lost", "swap"),
    Fault(power_loss, None, "node_lost", "requeue"),
    Fault(kill_rank, 0, "worker_killed", "restart"),
    Fault(stop_rank, 1, "rank_frozen", "restart"),
    Fault(crash, 2, "node_crash", "swap"),
)


class FaultLog:
    """(before, after) each fault was done, in seconds since the epoch."""

    def __init__(self, run: SlurmRun) -> None:
        self.run = run
        self.times: list[tuple[float, float]] = []

    def strike(self, fault: Callable[[SlurmRun, str], None], node: str) -> None:
        before = time.time()
        fault(self.run, node)
        self.times.append((before, time.time()))
        self.run.wait(f"the recovery after {fault.__name__} of {node}", self._recovered)

    def _recovered(self, state: RunState) -> bool:
        return len(state.incidents) == len(self.times) and state.incident is None

    def hang(self) -> None:
        """The script's own fault."""
        self.run.wait("the end of the hang", lambda s: bool(s.incidents) and s.incident is None)
        (at,) = [
            float(told)
            for log in self.run.directory.rank_logs(1)
            for told in re.findall(r"^hangs at (\S+)$", log.read_text(), re.M)
        ]
        self.times.append((at, at))

    def next_moment(self) -> RunState:
        """Half a second's steps after a save that outlives a node."""
        return self.run.wait_safe((self.run.state().incidents[-1].step_restored or 0) + 200)


@pytest.mark.long  # three minutes alone; test_simulated.py shows nearly the same of fewer faults
def test_the_report_agrees_with_the_log_of_the_faults(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    train = (*TRAIN, "--steps", str(STEPS))
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", arguments=(*train, "--hang-once", "15:2")
    )
    log = FaultLog(run)
    log.hang()
    for fault in FAULTS:
        state = log.next_moment()
        assert fault.place is not None or state.host in state.placement, "the supervisor's node is a spare"
        log.strike(fault.strike, state.host if fault.place is None else state.placement[fault.place])
    state = run.wait_end()
    assert state.exit_code == 0
    expected = [("hang", "restart"), *((fault.cause, fault.action) for fault in FAULTS)]
    assert [(i.cause, i.action) for i in state.incidents] == expected
    check_restores(run, least=100)
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=3)

    code, told, error = jurymast(cluster, "report", "--json", str(run.directory.root))
    assert code == 0, error
    report = checked(json.loads(told), "report")
    check_sums(report)
    check_moments(report, log.times)
    assert abs(report["advice"]["error"]) < FORETOLD
    assert abs(report["advice"]["error_allocation"]) < FORETOLD
    print(json.dumps({"advice": report["advice"], "ratios": report["ratios"], "sum": report["categories"]}))


@pytest.mark.long
def test_advice_that_is_followed_gains_about_what_was_foretold(cluster: Cluster, tmp_path: Path) -> None:
    """A hang is noticed after a minute, as the policy says; the same hang comes again in a run whose policy
    is what the report advises."""
    policy = "detect: {hang: 60s}\nhealth: {straggler: off}"
    late = _hangs_once(cluster, tmp_path / "late", policy)
    (advice,) = [one for one in late["advice"]["changes"] if one["option"] == "detect.hang"]
    assert advice["of"] == "runtime goodput"
    followed = _hangs_once(cluster, tmp_path / "followed", policy.replace("60s", advice["value"]))
    gained = followed["ratios"]["runtime_goodput"] - late["ratios"]["runtime_goodput"]
    print(json.dumps({"foretold": advice, "gained": gained, "error": late["advice"]["error"]}))
    assert gained == pytest.approx(advice["gain"], abs=abs(late["advice"]["error"]) + FORETOLD)


def _hangs_once(cluster: Cluster, folder: Path, policy: str) -> dict[str, Any]:
    """The report of a run of two nodes in which a rank hangs."""
    train = ("--steps", "2600", "--step-time", "0.04", "--save-every", "100 steps", "--hang-once", "1000:1")
    options = ("--nodes", "2", "--spares", "0", "--policy", policy_file(cluster, folder, policy))
    run = submit(cluster, folder, *options, arguments=train)
    state = run.wait_end()
    assert [one.cause for one in state.incidents] == ["hang"], run.story()
    code, told, error = jurymast(cluster, "report", "--json", str(run.directory.root))
    assert code == 0, error
    report: dict[str, Any] = checked(json.loads(told), "report")
    return report


def check_sums(report: dict[str, Any]) -> None:
    booked = sum(report["categories"].values())
    asked = report["allocated_node_seconds"] + report["queue_node_seconds"]
    assert abs(booked - asked) < 1e-3, report["categories"]
    assert report["categories"].get("unknown", 0.0) < 0.01 * booked, report["categories"]


def check_moments(report: dict[str, Any], faults: list[tuple[float, float]]) -> None:
    """Each incident begins when its fault struck."""
    off = []
    for incident, (before, after) in zip(report["incidents"], faults, strict=True):
        at = datetime.fromisoformat(incident["at"]).timestamp()
        off.append((incident["cause"], round(at - before, 3), round(at - after, 3)))
    print(json.dumps(off))
    assert all(late >= -NEAR_S and soon <= NEAR_S for _, late, soon in off), off
