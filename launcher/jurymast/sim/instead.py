"""A job that jurymast only observed, once more as a simulation: what it would have made of its failures.

The same steps are done, and each failure strikes at the step at which it did. How long the script takes to
start is the job's own; how long failures take to be noticed, and ranks to be stopped and launched, was
measured elsewhere. Ends that somebody ordered cost what they did, and so does what the log does not explain.

There are two answers: the script stays as it is, and goes back as far as it did; or it saves by jurymast, and
what ended by an order long after its last line hung until then. Neither is a bound: simulations have errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, median_low

from jurymast.core.estimate import Estimate
from jurymast.core.goodput import Account, Interval
from jurymast.core.judges.cadence import Cadence
from jurymast.core.state.incident import Incident
from jurymast.core.state.settings import RunPlan
from jurymast.sim.checkpoints import HANG, POWER_LOSS, SCRIPT, WORKER_KILL, Measured
from jurymast.sim.faults import TraceFault
from jurymast.sim.replay import ANY_NODE, INCIDENTS_MAX, NotReplayed
from jurymast.sim.simulation import SECONDS_MIN, Setup, SimOutcome, Simulation

# All other causes are orders, which jurymast would have followed as well.
_KINDS = {"worker_killed": WORKER_KILL, "worker_exit": SCRIPT, "out_of_memory": SCRIPT}
# Of the time with nodes. If more is unknown, nobody can say what there was to lose.
UNKNOWN_MAX = 0.25
# After its last line a script may do something else for so long: evaluate, save, end.
SILENCE_S = 300.0
# Saves of a script's own, of which only how far it went back is known: their times count nowhere.
SAVES = 1000
# A simulation ends after a time, and not after a step: so often the time is corrected.
ROUNDS = 8
# Slurm tells the second in which a step began: on average it began so much later.
WHOLE_SECONDS_S = 0.5
_Spent = defaultdict[str, float]  # seconds by category
FIRST = frozenset({"launch", "restore", "warm_up"})


@dataclass(frozen=True)
class Instead:
    """Runtime goodput, allocation goodput, and the node-seconds allocated; what became of each failure. The
    script took `start_s` from its processes to its first step. `seconds`: where the time since the first
    launch went, by category. `stopped`: why jurymast would have ended the job at the last of them, "" if it
    would not."""

    goodput: float
    allocated: float
    node_s: float
    incidents: tuple[Incident, ...]
    start_s: float
    seconds: Mapping[str, float]
    stopped: str = ""


@dataclass(frozen=True)
class _Fault:
    """A failure of the job, and the kind that a simulation has for it."""

    kind: str
    step: int
    incident: int  # 0: the job's end

    def trace(self, number: int) -> TraceFault:
        nodes = () if self.kind in (SCRIPT, HANG) else (ANY_NODE * (number + 1),)
        return TraceFault(0.0, nodes, self.kind, step=self.step)


def instead(
    found: Estimate, plan: RunPlan, measured: Measured, *, lost: str = POWER_LOSS
) -> tuple[Instead, Instead]:
    """What jurymast would have made of the job by this plan's spares and settings: of the script as it is,
    and of one with jurymast.Checkpointer. `lost`: how nodes were, which Slurm does not tell: by POWER_LOSS,
    which is noticed after a while, or NODE_CRASH, which is noticed at once. Raises NotReplayed, StandsStill.
    """
    account, steps, settings = found.account, found.best_step - found.origin, plan.settings
    if not found.numbered:
        raise NotReplayed("the log's numbers of steps are not those of the whole training")
    if found.step_s <= 0.0 or steps <= 0 or account.first_launch is None:
        raise NotReplayed("the log tells of no steps whose time is known")
    if len(found.incidents) > INCIDENTS_MAX:
        raise NotReplayed(f"it has more than {INCIDENTS_MAX} failures")
    if _seconds(account.timeline, {"unknown"}) > UNKNOWN_MAX * _seconds(account.timeline):
        raise NotReplayed("too much of its time is unknown")
    try:
        usual = measured.durations(account.asked_nodes, settings=settings)
        usual = replace(
            usual, step_s=found.step_s, warm_up_s=_start_s(account),
            requeue_s=_requeue_s(account, usual.requeue_s),
        )  # fmt: skip
    except ValueError as error:
        raise NotReplayed(str(error)) from error
    free = replace(usual, restore_s=0.0, stall_s=0.0, copy_s=0.0, slowdown=0.0, write_s=None, read_s=0.0)
    setup = Setup(
        nodes=account.asked_nodes, spares=plan.spares, seconds=max(SECONDS_MIN, steps * found.step_s),
        durations=usual, settings=settings, requeue=plan.requeue,
    )  # fmt: skip
    by_script = replace(setup, durations=free, settings=replace(settings, cadence_steps=None, cadence_s=None))
    by_us = Cadence(settings.cadence_steps, settings.cadence_s)
    return (
        _Trial(found, by_script, Cadence(steps=max(1, steps // SAVES)), lost, ours=False).result(),
        _Trial(found, setup, by_us, lost, ours=True).result(),
    )


def _start_s(account: Account) -> float:
    """How long the script usually takes from the start of its processes to its first step, beyond that."""
    began = {one.attempt for one in account.timeline if one.category == "step"}
    warm_up = [one for one in account.timeline if one.category == "warm_up"]
    told = [_seconds([one for one in warm_up if one.attempt == each]) for each in began] or [0.0]
    # Each is up to a second too long: of such values the mean is known better than the median.
    usual_s = median_low(told)
    told_s = mean(one for one in told if abs(one - usual_s) <= 1.0)
    return max(0.0, told_s - WHOLE_SECONDS_S)


def _requeue_s(account: Account, otherwise: float) -> float:
    """How long the job usually waited from the end of an attempt to the processes of the next."""
    both = (*account.timeline, *account.waits)
    ends = {one.incident for one in account.waits if one.incident}
    waits = [_seconds(both, {"requeue_wait", "relaunch"}, {end}) for end in ends]
    return median(waits) if waits else otherwise


def _seconds(
    intervals: Sequence[Interval],
    categories: Collection[str] | None = None,
    of: Collection[int] | None = None,
) -> float:
    """The seconds of these intervals, or of those of some categories or incidents alone."""
    chosen = (
        one.us
        for one in intervals
        if (categories is None or one.category in categories) and (of is None or one.incident in of)
    )
    return sum(chosen) / 1e6


def _by_category(intervals: Iterable[Interval]) -> _Spent:
    spent: _Spent = defaultdict(float)
    for one in intervals:
        spent[one.category] += one.us / 1e6
    return spent


@dataclass(frozen=True)
class _Trial:
    found: Estimate
    setup: Setup
    cadence: Cadence
    lost: str  # the kind of lost nodes
    ours: bool  # saves are jurymast's

    @property
    def steps(self) -> int:
        return self.found.best_step - self.found.origin

    def result(self) -> Instead:
        faults = self._faults()
        ran, outcome = self._run(faults)
        account, nodes = ran.ledger.account(ran.now), self.setup.nodes
        simulated = [one for one in account.timeline if one.incident or one.category not in FIRST]
        gone = [one for one in account.timeline if not one.incident and one.category in FIRST]
        if not self.ours:  # the script goes back as far as it did
            gone += [one for one in simulated if one.category == "rework"]
            simulated = [one for one in simulated if one.category != "rework"]
        held, waited = self._unchanged(faults)
        productive_s = self.steps * self.found.step_s
        spent = _by_category((*simulated, *account.waits))
        for category, seconds in (*held.items(), *waited.items()):
            spent[category] += seconds
        wall_s = sum(spent.values())
        allocated_s = outcome.categories.get("step", 0) / 1e6 / (outcome.ratios["allocation_goodput"] or 1.0)
        node_s = allocated_s + (sum(held.values()) - _seconds(gone)) * (nodes + self.setup.spares)
        return Instead(
            productive_s / wall_s, productive_s * nodes / node_s, node_s, outcome.incidents,
            self.setup.durations.warm_up_s, spent, outcome.reason if ran.state.ended else "",
        )  # fmt: skip

    def _faults(self) -> list[_Fault]:
        found, origin = self.found, self.found.origin
        faults = [
            _Fault(kind, max(0, one.step_lost_from - origin), one.id)
            for one in found.incidents
            if (kind := {"node_lost": self.lost, **_KINDS}.get(one.cause) or self._hung(one.id))
        ]
        if self._hung(0):
            faults.append(_Fault(HANG, self.steps - 1, 0))
        return faults

    def _hung(self, incident: int) -> str:
        """HANG if an attempt that was ended by an order had been silent for long."""
        silent_s = _seconds(self.found.account.timeline, {"hang", "detection"}, {incident})
        return HANG if self.ours and silent_s > SILENCE_S else ""

    def _unchanged(self, faults: Sequence[_Fault]) -> tuple[_Spent, _Spent]:
        """The seconds by category, with nodes and without, that the job would have spent under jurymast as
        well."""
        account, gone = self.found.account, {fault.incident for fault in faults}
        kept = {one.id for one in self.found.incidents} - gone
        also = {*FIRST, "rework", "relaunch", "shutdown"} | (set() if 0 in gone else {"hang", "detection"})
        held = _by_category(
            one
            for one in account.timeline
            if one.incident in kept
            or (not one.incident and one.category in also)
            or (not self.ours and one.category == "rework" and one.incident in gone - {0})
        )
        told_s = _seconds(account.timeline, {"step", "unknown"})
        # After its last line an attempt went on, for half the time between two lines on average: that is lost
        # as well. Whole seconds may hide it.
        unseen_s = len(gone - {0}) * self.found.line_s / 2.0
        held["unknown"] += max(unseen_s, told_s - self.steps * self.found.step_s)
        return held, _by_category(one for one in account.waits if one.incident in kept)

    def _run(self, faults: Sequence[_Fault]) -> tuple[Simulation, SimOutcome]:
        """Simulate until all steps are done."""
        trace, setup = [fault.trace(number) for number, fault in enumerate(faults)], self.setup
        for _ in range(ROUNDS):
            ran = Simulation(setup, trace, self.cadence)
            outcome = ran.run()
            left = self.steps - ran.state.best_step
            if ran.state.ended or not left:
                break
            seconds = max(SECONDS_MIN, setup.seconds + left * self.found.step_s)
            setup = replace(setup, seconds=seconds)
        return ran, outcome
