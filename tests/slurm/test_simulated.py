"""One plan of faults, on a real cluster and simulated with the durations measured there: booked alike."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

from jurymast.core.goodput import Account, Ledger
from jurymast.core.judges.cadence import Cadence
from jurymast.core.state import events as ev
from jurymast.core.state.images import PEER
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import RunState
from jurymast.journal import initial_state
from jurymast.sim.checkpoints import POWER_LOSS, WORKER_KILL, Durations, Parts
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation
from support.slurm_runs import SlurmRun, kill_rank, power_loss, submit
from testcluster import Cluster

# Alone: what is measured is compared to fractions of a second.
pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.alone]

NODES, STEP_S, EVERY, STEPS = 3, 0.05, 40, 320
HEARTBEAT_S = 0.5
TRAIN = ("--steps", str(STEPS), "--step-time", str(STEP_S), "--save-every", f"{EVERY} steps")
# Half-way between two saves, so that neither which one is restored nor how far is a matter of milliseconds.
PLAN = (
    TraceFault(0.0, (1,), kind=WORKER_KILL, step=60),
    TraceFault(0.0, (2,), kind=POWER_LOSS, step=180),
)
HURT = {WORKER_KILL: kill_rank, POWER_LOSS: power_loss}


def recovered(number: int, state: RunState) -> bool:
    return len(state.incidents) == number and state.incident is None


def strike(cluster: Cluster, folder: Path) -> SlurmRun:
    """The plan on the real cluster: numbers of nodes are places of the first attempt."""
    run = submit(cluster, folder, "--nodes", str(NODES), "--spares", "1", arguments=TRAIN)
    names = run.wait_step(1).placement
    for number, fault in enumerate(PLAN, 1):
        run.wait_step(fault.step or 0)
        HURT[fault.kind](run, names[fault.nodes[0]])
        run.wait(f"recovery {number}", partial(recovered, number))
    run.wait_end()
    return run


def booked(run: SlurmRun) -> tuple[RunState, Account]:
    ledger = Ledger(initial_state(run.directory.plan()))
    for event in run.events():
        ledger.feed(event)
    return ledger.state, ledger.account()


def parts(incident: Incident) -> Parts:
    seconds = incident.seconds()
    return Parts(detect_s=seconds["detect"], stop_s=seconds["diagnose"], launch_s=seconds["launch"])


@dataclass(frozen=True)
class Measured:
    """What the journal tells of how long things took; `step_error_s`: of the mean step, a standard error."""

    durations: Durations
    step_error_s: float
    restore_most_s: float
    stall_most_s: float


def measured(run: SlurmRun, state: RunState) -> Measured:
    """What a rank's first step takes longer is counted back from the first step that a heartbeat told of."""
    events = run.events()
    steps = [event for event in events if isinstance(event, ev.Progress)]
    pairs = [(a, b) for a, b in pairwise(steps) if a.attempt == b.attempt and a.step < b.step]
    step_s = sum(b.stepped_at - a.stepped_at for a, b in pairs) / sum(b.step - a.step for a, b in pairs)
    each_s = [(b.stepped_at - a.stepped_at) / (b.step - a.step) for a, b in pairs if b.step - a.step > 10]
    restores = [event for event in events if isinstance(event, ev.Restored)]
    first = {event.attempt: event for event in reversed(steps)}
    begins_s = [
        first[r.attempt].stepped_at - (first[r.attempt].step - r.step) * step_s - r.t for r in restores
    ]
    stalls_s = [e.stall_s for e in events if isinstance(e, ev.Saved) and e.ok and not e.copied]
    copied_s = [e.seconds for e in events if isinstance(e, ev.Saved) and e.tier == PEER]
    killed, lost = (parts(incident) for incident in state.incidents)
    durations = Durations(
        detection_s=lost.detect_s, stop_s=lost.stop_s, launch_s=lost.launch_s, kinds={WORKER_KILL: killed},
        restore_s=fmean(r.seconds for r in restores if r.step), warm_up_s=max(0.0, fmean(begins_s)),
        step_s=step_s, stall_s=fmean(stalls_s), copy_s=median(copied_s), write_s=1.0, read_s=1.0,
    )  # fmt: skip
    restore_most_s = max(restore.seconds for restore in restores)
    return Measured(durations, stdev(each_s) / len(each_s) ** 0.5, restore_most_s, max(stalls_s))


def simulated(state: RunState, real: Account, durations: Durations) -> SimOutcome:
    """The same plan, at the steps at which it really struck, from the first launch for as long."""
    struck = [
        replace(fault, step=incident.step_lost_from)
        for fault, incident in zip(PLAN, state.incidents, strict=True)
    ]
    seconds = (real.end - (real.first_launch or 0)) / 1e6
    setup = Setup(nodes=NODES, spares=1, seconds=seconds, durations=durations)
    return Simulation(setup, struck, Cadence(steps=EVERY)).run()


def tolerances(found: Measured, attempts: int) -> dict[str, float]:
    """By category, node-seconds. Where one thing ends and the next begins is known to a heartbeat, on all
    nodes; a time of many steps as well as three standard errors of the mean step; the simulator restores on
    a fresh start, too. What it was told to take, it must take."""
    heartbeat = NODES * attempts * HEARTBEAT_S
    drift_s = 3 * STEPS * found.step_error_s
    return {
        "step": heartbeat + NODES * drift_s, "rework": heartbeat, "warm_up": heartbeat,
        "detection": heartbeat, "hang": 0.0, "replacement": 0.01,
        "diagnosis": 0.01, "relaunch": 0.01,
        "restore": NODES * (2 * found.restore_most_s + 0.01),
        "checkpoint_stall": NODES * 2 * found.stall_most_s,
        # One node each, from when on depends on the steps until then.
        "spare_idle": attempts * HEARTBEAT_S + drift_s, "failed_node": attempts * HEARTBEAT_S + drift_s,
    }  # fmt: skip


def test_a_plan_of_faults_is_booked_alike_on_a_cluster_and_simulated(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What is before the first launch and after the last step is not simulated."""
    run = strike(cluster, tmp_path)
    state, real = booked(run)
    assert state.exit_code == 0, run.story()
    found = measured(run, state)
    outcome = simulated(state, real, found.durations)
    assert [(i.cause, i.action) for i in outcome.incidents] == [(i.cause, i.action) for i in state.incidents]
    for ours, theirs in zip(outcome.incidents, state.incidents, strict=True):
        assert ours.step_restored == theirs.step_restored, run.story()
    compared = {
        name: (real.totals[name] / 1e6, outcome.categories.get(name, 0) / 1e6, tolerance)
        for name, tolerance in tolerances(found, state.attempt).items()
    }
    print(json.dumps(compared))
    off = {name: row for name, row in compared.items() if abs(row[0] - row[1]) > row[2]}
    assert off == {}, f"real, simulated, tolerance in node-seconds: {compared}; {found}"
    assert {*outcome.categories} - {*compared} <= {"launch"}
    assert {*real.totals} - {*compared} <= {"launch", "queue_wait", "shutdown", "unknown"}
    assert real.totals["unknown"] == 0
