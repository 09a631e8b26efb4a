"""A run once more, as a simulation: with the failures that its journal shows, and with the durations that it
measured. So it can be asked what another policy would have made of the same failures.

What the simulation foretells for the run as it was is compared with what happened: that is the model's error.
Failures strike at their times since the first launch. A node is any node of the placement, because all
healthy ones are alike to the decisions. The first launch, which loads everything for the first time, and the
end of the run are taken out before and put back after, as no failure can change them. Of a run with very many
incidents only its end is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from jurymast.core.checkpoints.agreement import AS_ASKED
from jurymast.core.goodput import Account, SaveCounts, StepCounts, cut_out, to_us
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import REPLICATE_GUESS_S, STALL_GUESS_S
from jurymast.core.judges.silence import steady_limit_s
from jurymast.core.run.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S
from jurymast.core.state.images import PEER, SHARED
from jurymast.core.state.incident import APPLICATION, Incident
from jurymast.core.state.run import RunState, failure_rate
from jurymast.core.state.schedule import NEVER
from jurymast.errors import JurymastError
from jurymast.sim.checkpoints import (
    HANG,
    NODE_CRASH,
    POWER_LOSS,
    QUEUE_S,
    RANK_STOP,
    SCRIPT,
    STEP_MIN_S,
    WORKER_KILL,
    Durations,
    Parts,
)
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, Simulation

# Ends that a simulated run does not know: Slurm's, and those after which it goes on from another step.
NOT_REPLAYED = frozenset({"preempted", "job_ended", "allocation_lost", "rollback_asked", "relaunch_asked"})
# In a shorter run a single restart, or a first slow step, is all that it shows.
LEAST_S = 120.0
# More incidents would take longer to simulate than somebody waits for a report.
INCIDENTS_MAX = 300
# Nodes that fail have numbers from here on: each is one of the placement that is healthy then.
ANY_NODE = 1 << 20


@dataclass(frozen=True)
class Foretold:
    """Runtime goodput, allocation goodput, and the productive share of all node-time, also in the queue."""

    goodput: float
    allocated: float
    productive: float


@dataclass(frozen=True)
class Replay:
    """`before_s`: of the first launch, what later ones do not need; `after_s`: from the last step to the end.
    `goodput`: what the run had in the time that is simulated, 0..1; `part`: not all of it. `unsaved`: it
    saved nothing, so what a save costs is assumed."""

    setup: Setup
    faults: tuple[TraceFault, ...]
    cadence: Cadence
    before_s: float
    after_s: float
    goodput: float
    part: bool
    unsaved: bool

    def run(self) -> Foretold:
        """Raises StandsStill."""
        outcome = Simulation(self.setup, self.faults, self.cadence).run()
        ran_s = self.setup.seconds
        share = ran_s / (ran_s + self.before_s + self.after_s)
        goodput, allocated = (
            outcome.ratios[name] or 0.0 for name in ("runtime_goodput", "allocation_goodput")
        )
        productive = outcome.categories.get("step", 0) / max(1, outcome.total_us)
        return Foretold(share * goodput, share * allocated, share * productive)

    def with_setup(self, **changed: Any) -> Replay:
        return replace(self, setup=replace(self.setup, **changed))


class NotReplayed(JurymastError):
    """The run cannot be simulated; the message says why."""


def replay_of(state: RunState, account: Account, steps: StepCounts, saves: SaveCounts) -> Replay:
    """Return the run as a simulation. Raises NotReplayed."""
    if account.first_launch is None or steps.done - steps.again - steps.maybe_again <= 0:
        raise NotReplayed("no step was done yet")
    if steps.maybe_again:
        raise NotReplayed("it is not known which steps were done again: the script does not number its steps")
    if state.alone:
        raise NotReplayed("its tasks are independent of each other")
    incidents, start = state.incidents, account.first_launch
    if len(incidents) > INCIDENTS_MAX:
        incidents = incidents[-INCIDENTS_MAX:]
        start = max(start, to_us(incidents[0].fault_at) - 1)
    if any(one.cause in NOT_REPLAYED for one in incidents):
        raise NotReplayed("Slurm ended its job, or somebody rolled it back, which is not simulated")
    step_s = account.placed_us("step") / 1e6 / (steps.done - steps.again)
    launch_s, restore_s, warm_up_s = _starts(state, account, step_s)
    before_s = max(0.0, _first_launch_s(account) - launch_s) if start == account.first_launch else 0.0
    after_s = (account.placed_us("shutdown") + account.placed_us("unknown")) / 1e6
    begins, seconds = start / 1e6 + before_s, (account.end - start) / 1e6 - before_s - after_s
    if seconds < LEAST_S or step_s < STEP_MIN_S:
        raise NotReplayed(f"a run of less than {LEAST_S:.0f} s shows too little")
    try:
        durations = _durations(state, account, saves, step_s, launch_s, restore_s, warm_up_s)
    except ValueError as error:
        raise NotReplayed(str(error)) from error
    part, settings = start > account.first_launch, state.settings
    if part and (rate := failure_rate(state, state.now)) is not None:  # what the run knew by then
        settings = replace(settings, rate=rate.rate)
    setup = Setup(
        nodes=state.active, spares=state.spares, seconds=seconds, durations=durations, settings=settings,
        requeue=state.requeue_allowed,
    )  # fmt: skip
    faults = tuple(_fault(one, number, begins) for number, one in enumerate(incidents))
    productive = sum(i.us for i in cut_out(account.timeline, start, account.end) if i.category == "step")
    goodput = productive / (account.end - start)
    cadence = _cadence(state, saves)
    return Replay(setup, faults, cadence, before_s, after_s, goodput, part=part, unsaved=not saves.done)


def _first_launch_s(account: Account) -> float:
    """How long the first launch took from its decision on."""
    ends = (one.end for one in account.timeline if one.category == "launch")
    return max(0.0, (max(ends, default=0) - (account.first_launch or 0)) / 1e6)


def _starts(state: RunState, account: Account, step_s: float) -> tuple[float, float, float]:
    """(processes, restore, warm-up beyond a step) of an attempt, in seconds: as usual after a failure, or
    else as at the first launch."""
    again = [one.seconds() for one in state.incidents if one.started_at is not None]
    launch_s = median([one["launch"] for one in again]) if again else _first_launch_s(account)
    restores = [one["restore"] for one in again if one["restore"] > 0.0]
    attempts = {one.attempt for one in account.timeline if one.category == "warm_up"}
    warm_up_s = account.placed_us("warm_up") / 1e6 / max(1, len(attempts))
    return launch_s, (median(restores) if restores else 0.0), max(0.0, warm_up_s - step_s)


def _durations(
    state: RunState, account: Account, saves: SaveCounts, step_s: float, launch_s: float, restore_s: float,
    warm_up_s: float,
) -> Durations:  # fmt: skip
    settings, saved = state.settings, state.saved
    kinds = {
        kind: Parts(
            detect_s=_usual(state, kind, "detect"),
            stop_s=min(_usual(state, kind, "diagnose", "decide"), 0.9 * STOP_LIMIT_S),
            launch_s=min(launch_s, 0.9 * LAUNCH_LIMIT_S),
        )
        for kind in (NODE_CRASH, WORKER_KILL, SCRIPT, RANK_STOP)
    }  # fmt: skip
    silent_s = _usual(state, POWER_LOSS, "detect")
    # In the queue, and until the nodes of the next allocation were ready.
    requeued = [one for one in state.incidents if one.action == "requeue" and one.launched_at is not None]
    requeues = [one.seconds()["replace"] for one in requeued]
    write_s = saved[SHARED].seconds if SHARED in saved else 0.0
    peer_s = saved[PEER].seconds if PEER in saved else REPLICATE_GUESS_S
    return Durations(
        detection_s=silent_s or steady_limit_s(settings.heartbeat_s, settings.node_lost_after_s),
        stop_s=kinds[NODE_CRASH].stop_s, launch_s=kinds[NODE_CRASH].launch_s, restore_s=restore_s,
        warm_up_s=warm_up_s, step_s=step_s, kinds=kinds,
        stall_s=saves.stall_s / saves.done if saves.done else STALL_GUESS_S,
        copy_s=peer_s if settings.memory else write_s,
        requeue_s=fmean(requeues) if requeues else QUEUE_S,
        write_s=write_s if settings.memory else None, read_s=max(write_s, restore_s),
    )  # fmt: skip


def _usual(state: RunState, kind: str, *parts: str) -> float:
    """The median seconds of these parts of incidents of this kind; of all if there are none; else 0."""
    of_kind = [one for one in state.incidents if kind_of(one) == kind] or state.incidents
    return median([sum(one.seconds()[part] for part in parts) for one in of_kind]) if of_kind else 0.0


def kind_of(incident: Incident) -> str:
    """The kind of failure that a simulation has for it."""
    if incident.lost:
        return POWER_LOSS if incident.lost[0].how == "silent" else NODE_CRASH
    if incident.cause == "hang":
        return HANG
    if incident.cause == "rank_frozen":
        return RANK_STOP
    if incident.action == "swap" or incident.cause in ("node_crash", "host_died"):
        return NODE_CRASH
    return SCRIPT if incident.charged == APPLICATION else WORKER_KILL  # what ends ranks without blame


def _fault(incident: Incident, number: int, start: float) -> TraceFault:
    at, kind, lost = max(0.0, incident.fault_at - start), kind_of(incident), len(incident.lost) or 1
    first = ANY_NODE * (number + 1)
    nodes = tuple(range(first, first + lost)) if kind in (POWER_LOSS, NODE_CRASH) else ()
    return TraceFault(at, nodes, kind)


def _cadence(state: RunState, saves: SaveCounts) -> Cadence:
    """What the policy or the script asks for, as far as the run shows it; nothing if jurymast chose."""
    settings = state.settings
    if settings.cadence_steps is not None:
        return Cadence(steps=settings.cadence_steps)
    if settings.cadence_s is not None:
        return Cadence(seconds=settings.cadence_s)
    if not saves.done:
        return Cadence(steps=NEVER)
    agreed = state.cadence
    if agreed is not None and agreed.reason != AS_ASKED and agreed.every_steps:
        return Cadence()
    return Cadence(seconds=saves.interval_s / saves.intervals) if saves.intervals else Cadence(steps=NEVER)
