"""A run once more, as a simulation: with the failures that its journal shows, and with the durations that it
measured. So it can be asked what another policy would have made of the same failures.

What the simulation foretells for the run as it was is compared with what happened: that is the model's error.
Failures strike at their times since the first launch. A node is any node of the placement, because all
healthy ones are alike to the decisions. The first launch, which loads everything for the first time, and the
end of the run are taken out before and put back after, as no failure can change them. So is the time for
which nodes were held before the first launch, and at a requeue before its end and after its beginning: a
simulated allocation ends and begins at once. Of a run with very many incidents only its end is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from jurymast.core.checkpoints.agreement import AS_ASKED
from jurymast.core.goodput import Account, SaveCounts, Stay, StepCounts, cut_out, to_us
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import REPLICATE_GUESS_S, SLOWDOWN, STALL_GUESS_S
from jurymast.core.judges.silence import steady_limit_s
from jurymast.core.run.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S
from jurymast.core.run.sparing import IN_PROCESS
from jurymast.core.state.images import PEER, SHARED
from jurymast.core.state.incident import APPLICATION, Incident
from jurymast.core.state.run import RunState, failure_rate
from jurymast.core.state.schedule import NEVER
from jurymast.errors import JurymastError
from jurymast.sim.checkpoints import (
    HANG,
    KINDS,
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
# Of the time of a run's steps, at most so much is taken for what copies took.
SLOWED_MAX = 0.5
# Of so many nodes each is simulated by itself: more would take too long.
NAMED_MAX = 64
# Longer than any run, in seconds.
AWAY_S = 1e9
# Nodes that fail have numbers from here on: each is one of the placement that is healthy then.
ANY_NODE = 1 << 20


@dataclass(frozen=True)
class Foretold:
    """Runtime goodput, allocation goodput, and the productive share of all node-time, also in the queue."""

    goodput: float
    allocated: float
    productive: float


class _Again(Simulation):
    """Ranks are killed at the places at which they were: what becomes of a node depends on what it, and the
    node that it replaced, did before."""

    def _rank_fault(self, fault: TraceFault) -> None:
        if fault.nodes:
            name = self.state.placement[fault.nodes[0] % len(self.state.placement)]
            number = self._names.number_of(name)
            fault = replace(fault, nodes=() if number is None else (number,))
        super()._rank_fault(fault)


@dataclass(frozen=True)
class Replay:
    """`before_s`: of the first launch, what later ones do not need; `after_s`: from the last step to the end.
    Each node was held for `outside_s` before and after what is simulated, and for `held_s` at each requeue.
    `goodput` and `allocated`: what the run had, 0..1, in the time that counts; `part`: not all of it.
    `unsaved`: it saved nothing, so what a save costs is assumed."""

    setup: Setup
    faults: tuple[TraceFault, ...]
    cadence: Cadence
    before_s: float
    after_s: float
    outside_s: float
    held_s: float
    goodput: float
    allocated: float
    part: bool
    unsaved: bool

    def run(self) -> Foretold:
        """Raises StandsStill."""
        outcome = _Again(self.setup, self.faults, self.cadence).run()
        ran_s, step_us = self.setup.seconds, outcome.categories.get("step", 0)
        share = ran_s / (ran_s + self.before_s + self.after_s)
        requeues = sum(one.action == "requeue" and one.launched_at is not None for one in outcome.incidents)
        queued_us = sum(outcome.categories.get(name, 0) for name in ("queue_wait", "requeue_wait"))
        held_us = (self.setup.nodes + self.setup.spares) * to_us(self.outside_s + requeues * self.held_s)
        return Foretold(
            share * (outcome.ratios["runtime_goodput"] or 0.0),
            step_us / max(1, outcome.total_us - queued_us + held_us),
            share * step_us / max(1, outcome.total_us),
        )

    def with_setup(self, **changed: Any) -> Replay:
        return replace(self, setup=replace(self.setup, **changed))


class NotReplayed(JurymastError):
    """The run cannot be simulated; the message says why."""


def replay_of(state: RunState, account: Account, steps: StepCounts, saves: SaveCounts) -> Replay:
    """Return the run as a simulation. Raises NotReplayed."""
    if account.first_launch is None or steps.done - steps.again - steps.maybe_again <= 0:
        raise NotReplayed("no step is done")
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
    launch_s, warm_up_s = _starts(state, account, step_s)
    before_s = max(0.0, _first_launch_s(account) - launch_s) if start == account.first_launch else 0.0
    after_s = _after_s(account, start)
    begins, seconds = start / 1e6 + before_s, (account.end - start) / 1e6 - before_s - after_s
    if seconds < LEAST_S or step_s < STEP_MIN_S:
        raise NotReplayed(f"less than {LEAST_S:.0f} s from the first launch to the last step show too little")
    try:
        durations = _durations(state, account, saves, step_s, launch_s, warm_up_s)
    except ValueError as error:
        raise NotReplayed(str(error)) from error
    part, settings = start > account.first_launch, state.settings
    if part and (rate := failure_rate(state, state.now)) is not None:  # what the run knew by then
        settings = replace(settings, rate=rate.rate)
    cadence = _cadence(state, saves, step_s)
    if cadence == Cadence():
        settings = replace(settings, cadence_steps=None, cadence_s=None)
    setup = Setup(
        nodes=state.active, spares=state.spares, seconds=seconds, durations=durations, settings=settings,
        requeue=state.requeue_allowed, named=state.active if state.active <= NAMED_MAX else None,
        in_process=any(one.kept_steps for one in incidents),
    )  # fmt: skip
    faults = tuple(
        fault
        for number, one in enumerate(incidents)
        for fault in _faults(one, account, ANY_NODE * (number + 1), begins)
    )
    since = start if part else 0
    counted = [(n, one) for n, one in account.intervals_of_all() if one.category == "step"]
    counted_us = sum(nodes * one.us for nodes, one in counted if one.start >= since)
    productive = sum(i.us for i in cut_out(account.timeline, start, account.end) if i.category == "step")
    held_us = _held_us(account, since, account.end)
    within_us = _held_us(account, to_us(begins), to_us(begins + seconds))
    nodes = state.active + state.spares
    return Replay(
        setup, faults, cadence, before_s, after_s,
        outside_s=(held_us - within_us) / nodes / 1e6, held_s=_held_at_requeues_s(state, account) / nodes,
        goodput=productive / (account.end - start), allocated=counted_us / max(1, held_us), part=part,
        unsaved=not saves.done,
    )  # fmt: skip


def _after_s(account: Account, start: int) -> float:
    """From the last step to the end, and what is not known. The end of an allocation that a requeue gave back
    is that incident's."""
    waited = max((one.end for one in account.waits), default=0)
    since = {"shutdown": max(start, waited), "unknown": start}
    return sum(one.us for one in account.timeline if one.start >= since.get(one.category, account.end)) / 1e6


def _held_us(account: Account, since: int, until: int) -> int:
    """The node-time that was allocated from `since` to `until`, in microseconds."""
    stays = (stay for each in account.stays.values() for stay in each)
    return sum(max(0, min(stay.until, until) - max(stay.start, since)) for stay in stays)


def _requeues(state: RunState) -> list[Incident]:
    return [one for one in state.incidents if one.action == "requeue" and one.launched_at is not None]


def _held_at_requeues_s(state: RunState, account: Account) -> float:
    """The node-seconds that were allocated between the decision to requeue and the next launch, as a mean."""
    held = [
        _held_us(account, to_us(one.launched_at - one.seconds()["replace"]), to_us(one.launched_at)) / 1e6
        for one in _requeues(state)
        if one.launched_at is not None
    ]
    return fmean(held) if held else 0.0


def _first_launch_s(account: Account) -> float:
    """How long the first launch took from its decision on."""
    ends = (one.end for one in account.timeline if one.category == "launch")
    return max(0.0, (max(ends, default=0) - (account.first_launch or 0)) / 1e6)


def _starts(state: RunState, account: Account, step_s: float) -> tuple[float, float]:
    """(processes, warm-up beyond a step) of an attempt, in seconds: as after a failure, or else as at the
    first launch."""
    again = [one.seconds()["launch"] for one in state.incidents if one.started_at is not None]
    launch_s = median(again) if again else _first_launch_s(account)
    attempts = {one.attempt for one in account.timeline if one.category == "warm_up"}
    warm_up_s = account.placed_us("warm_up") / 1e6 / max(1, len(attempts))
    return launch_s, max(0.0, warm_up_s - step_s)


def _durations(
    state: RunState, account: Account, saves: SaveCounts, step_s: float, launch_s: float, warm_up_s: float,
) -> Durations:  # fmt: skip
    settings, saved = state.settings, state.saved
    kinds = {kind: _parts(state, kind, launch_s) for kind in KINDS if kind != POWER_LOSS}
    silent, silent_s = _parts(state, POWER_LOSS, launch_s), _mean_s(state.incidents, POWER_LOSS, "detect")
    restored = [(SHARED in one.tiers, one.seconds()["restore"]) for one in state.incidents]
    restores, reads = (
        [s for read, s in restored if read is whether and s > 0.0] for whether in (False, True)
    )
    write_s = saved[SHARED].seconds if SHARED in saved else 0.0
    saving_s = write_s if settings.memory else 0.0
    requeues = [_waited_s(one, account, saving_s) for one in _requeues(state)]
    peer_s = saved[PEER].seconds if PEER in saved else REPLICATE_GUESS_S
    restore_s = fmean(restores or reads or [0.0])
    copy_s = peer_s if settings.memory else write_s
    # The run's steps are slower on average than they are without copies.
    slowdown = (saves.agreed.slowdown if saves.agreed else 0.0) or SLOWDOWN
    trained_s = account.placed_us("step") / 1e6
    slowed_s = saves.done * copy_s * slowdown / (1.0 + slowdown)
    return Durations(
        detection_s=silent_s or steady_limit_s(settings.heartbeat_s, settings.node_lost_after_s),
        stop_s=silent.stop_s, launch_s=silent.launch_s, restore_s=restore_s,
        warm_up_s=warm_up_s, step_s=step_s * (1.0 - min(SLOWED_MAX, slowed_s / trained_s)), kinds=kinds,
        stall_s=saves.stall_s / saves.done if saves.done else STALL_GUESS_S,
        copy_s=copy_s, slowdown=slowdown,
        requeue_s=fmean(requeues) if requeues else QUEUE_S,
        write_s=write_s if settings.memory else None,
        read_s=fmean(reads) if reads else max(write_s, restore_s),
    )  # fmt: skip


def _waited_s(incident: Incident, account: Account, saving_s: float) -> float:
    """From the decision to requeue to the next launch, in seconds, without the save before the nodes were
    given back, of at most `saving_s`: a simulation adds that by itself."""
    replaced_s = incident.seconds()["replace"]
    decided_at = (incident.launched_at or 0.0) - replaced_s
    given_back_at = min(
        (one.start / 1e6 for one in account.waits if one.incident == incident.id), default=0.0
    )
    return max(0.0, replaced_s - min(saving_s, max(0.0, given_back_at - decided_at)))


def _parts(state: RunState, kind: str, launch_s: float) -> Parts:
    """What this kind of failure took; of all if there was none of this kind."""
    launched = [one for one in state.incidents if one.started_at is not None]
    return Parts(
        detect_s=_mean_s(state.incidents, kind, "detect"),
        stop_s=min(_mean_s(state.incidents, kind, "diagnose", "decide"), 0.9 * STOP_LIMIT_S),
        launch_s=min(_mean_s(launched, kind, "launch") if launched else launch_s, 0.9 * LAUNCH_LIMIT_S),
    )


def _mean_s(incidents: Sequence[Incident], kind: str, *parts: str) -> float:
    """The mean seconds of these parts of incidents of this kind; of all if there are none; else 0. A mean,
    because it is their sum that the run lost."""
    of_kind = [one for one in incidents if kind_of(one) == kind] or incidents
    return fmean([sum(one.seconds()[part] for part in parts) for one in of_kind]) if of_kind else 0.0


def kind_of(incident: Incident) -> str:
    """The kind of failure that a simulation has for it."""
    if incident.lost and incident.action in ("restart", IN_PROCESS):
        return RANK_STOP  # they were heard again: no node was missing, but that was noticed after a while
    if incident.lost:
        return POWER_LOSS if incident.lost[0].how == "silent" else NODE_CRASH
    if incident.cause == "hang":
        return HANG
    if incident.cause == "rank_frozen":
        return RANK_STOP
    if incident.cause == "worker_killed":
        return WORKER_KILL
    if incident.action == "swap" or incident.cause in ("node_crash", "host_died"):
        return NODE_CRASH
    return SCRIPT if incident.charged == APPLICATION else WORKER_KILL  # what ends ranks without blame


def _faults(incident: Incident, account: Account, first: int, start: float) -> list[TraceFault]:
    """The incident's faults: one for each node that failed; the first of them has number `first`."""
    at, kind = max(0.0, incident.fault_at - start), kind_of(incident)
    if kind in (POWER_LOSS, NODE_CRASH):
        names = [lost.node for lost in incident.lost] or [incident.node]
        known_at = incident.decided_at or incident.detected_at
        downs = [
            _down_s(account.stays.get(name, ()), to_us(incident.fault_at), to_us(known_at)) for name in names
        ]
        return [TraceFault(at, (first + n,), kind, down_s=down) for n, down in enumerate(downs)]
    placed = kind in (WORKER_KILL, RANK_STOP) and incident.place >= 0
    return [TraceFault(at, (incident.place,) if placed else (), kind)]


def _down_s(stays: Sequence[Stay], since: int, known: int) -> float:
    """How long a node was away that failed at `since`, which was `known` later. One that did not come back
    stays away: nobody knows for how long; and the next allocation has another in its place."""
    away = next((n for n, one in enumerate(stays) if one.what == "failed_node" and one.until > since), None)
    if away is None or stays[away].start > known:  # only what ran there had ended
        return 0.0
    back = stays[away + 1 : away + 2]
    if back and back[0].start == stays[away].until and back[0].what != "shutdown":
        return (back[0].start - since) / 1e6
    return AWAY_S


def _cadence(state: RunState, saves: SaveCounts, step_s: float) -> Cadence:
    """What the policy or the script asks for, as far as the run shows it; nothing if jurymast chose. What the
    script asks for comes before the policy."""
    if saves.agreed is not None:
        return Cadence(seconds=saves.agreed.interval_s) if saves.agreed.reason == AS_ASKED else Cadence()
    settings = state.settings
    if settings.cadence_steps is not None:
        return Cadence(steps=settings.cadence_steps)
    if settings.cadence_s is not None:
        return Cadence(seconds=settings.cadence_s)
    if not saves.intervals:
        return Cadence(steps=NEVER)
    # By its steps: only then is there nothing to agree on.
    trained_s = (saves.interval_s - saves.stall_s * saves.intervals / saves.done) / saves.intervals
    return Cadence(steps=max(1, round(trained_s / step_s)))
