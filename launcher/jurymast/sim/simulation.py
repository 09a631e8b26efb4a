"""One simulated run: faults happen, `core.run.machine.step` decides, and its orders take time.

This is a discrete-event simulation: the clock jumps from event to event, and single steps and heartbeats are
not events. The state machine gets the events that a supervisor would give it (of all steps, only those that
tell it something), and `core.goodput` accounts for them as for a real run's journal.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from jurymast.core.goodput import Account, Ledger, ordered, to_us
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.silence import WAITING_S, HangLimits, RankView, judge
from jurymast.core.run.recording import copied
from jurymast.core.run.recovery import SPARE_GRACE_S
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.state.images import LIVE, MEMORY, PEER, StateId
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.core.state.schedule import NEVER
from jurymast.core.state.settings import Settings
from jurymast.sim.bounds import Bounds
from jurymast.sim.checkpoints import (
    HANG,
    NODE_CRASH,
    POWER_LOSS,
    RANK_STOP,
    START,
    WORKER_KILL,
    Durations,
    Restoring,
    SimRanks,
    SimTiers,
)
from jurymast.sim.faults import OTHERS, Names, TraceFault, names_needed
from jurymast.sim.sparing import SimSparing

# A fault for which no name is left is detected this much later.
LATER_S = 10.0
# What is counted: launches and faults that break an attempt, allocations, and plans of what ranks do next.
ATTEMPT, ALLOCATION, PLAN = "attempt", "allocation", "plan"
SECONDS_MIN, SECONDS_MAX = 1.0, 100 * 365 * 86_400.0
# Without a hang detector a stuck collective ends by torch's own time limit.
COLLECTIVE_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated: `nodes` active and `spares` idle nodes for `seconds`.

    `named` is the number of placed nodes with a name of their own (None: as many as the faults need).
    `saves_at_once` is the number of uneventful saves that one event may report. `parts` is the number of
    equal parts of the time for which the outcome states what the placed nodes did. `in_process`: the script
    calls `Checkpointer.run`, so that ranks that live go on in their processes.
    """

    nodes: int
    spares: int
    seconds: float
    durations: Durations = field(default_factory=Durations)
    settings: Settings = field(default_factory=Settings)
    requeue: bool = True
    named: int | None = None
    saves_at_once: int = 32
    parts: int = 0
    in_process: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a time of no use."""
        if not SECONDS_MIN <= self.seconds <= SECONDS_MAX:
            raise ValueError("a simulated run lasts from a second to a hundred years")


@dataclass(frozen=True)
class SimOutcome:
    """The account of one run. `categories` are node-microseconds that sum to `total_us`, the allocated and
    queued node-time; `state` shows whether the run gave up. `restores` counts restores by tier. `history`
    has, for each part of the time, the microseconds by category of the placed nodes (or of the queue)."""

    ratios: dict[str, float | None]
    categories: dict[str, int]
    total_us: int
    wall_s: float
    incidents: tuple[Incident, ...]
    requeues: int
    saves: int
    restores: dict[str, int]
    state: str
    reason: str
    history: tuple[dict[str, int], ...] = ()


class Simulation:
    """Runs one simulation through `faults`; the script requests `cadence`. `told` is called from time to time
    with the time that has passed. `seed`: what errors call it."""

    def __init__(
        self, setup: Setup, faults: Sequence[TraceFault], cadence: Cadence,
        told: Callable[[float], None] | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self.setup, self._told = setup, told
        self._bounds = Bounds(seed)
        self._faults = [fault for fault in faults if fault.step is None]
        self._scripted = deque(fault for fault in faults if fault.step is not None)
        self._d = setup.durations
        self.now = START
        self._heap: list[tuple[float, int, str, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._counts = Counter({ALLOCATION: -1})
        self._named = names_needed(faults) if setup.named is None else setup.named
        self._names = Names(setup.nodes, setup.spares, 0, self._named)
        self.state = self._fresh_state()
        self.ledger = Ledger(self.state)
        self._ranks = SimRanks(self.state, cadence, self._d.slowdown)
        self._dead: set[str] = set()  # not detected yet
        self._training = False
        self._segment = (0.0, 0, False)  # start, steps before it, copies are made during it
        self._next_save = 0  # step
        self._next_fault, self._end, self._saves = START, START + setup.seconds, 0
        self._tiers = SimTiers(self.state, self._d, setup.nodes, setup.spares, seed)
        self._restoring: Restoring | None = None
        self._sparing = SimSparing(setup.in_process)
        self._restores: Counter[str] = Counter()
        self._kind = POWER_LOSS  # kind of the newest failure
        self._woken = 0.0

    def _fresh_state(self) -> RunState:
        return RunState(
            settings=replace(self.setup.settings, local_path="", object_url=""),  # their speed is unknown
            active=self._names.active,
            unnamed=self.setup.nodes - self._names.active, spares=self.setup.spares,
            submitted_at=START, requeue_allowed=self.setup.requeue,
        )  # fmt: skip

    def run(self) -> SimOutcome:
        """Run to the end. Raises StandsStill."""
        self._feed(
            ev.RunStarted(
                t=START, run="simulated", name="simulated", active=self._names.active,
                spares=self.setup.spares, ranks_per_node=1, script="", submitted_at=START,
            )
        )  # fmt: skip
        self._feed(ev.SupervisorStarted(t=START, epoch=1, node=self._names.all()[0]))
        self._allocate(START)
        faults = iter(self._faults)
        fault = next(faults, None)
        while not self.state.ended:
            at = self._heap[0][0] if self._heap else math.inf
            self._next_fault = START + fault.t if fault is not None else math.inf
            if min(at, self._next_fault) > self._end:
                break
            if fault is not None and self._next_fault <= at:
                self.now = self._next_fault
                self._bounds.goes_on()
                self._fault(fault)
                if self._told is not None:
                    self._told(fault.t)
                fault = next(faults, None)
                continue
            self.now, _, of, count, act, arguments = heapq.heappop(self._heap)
            self._bounds.event(self.now, act)
            if self._counts[of] == count:
                act(*arguments)
        if not self.state.ended:
            self.now = self._end
            self._halt()
        return self._outcome()

    # Events and instructions.

    def _at(self, t: float, act: Callable[..., None], *arguments: Any, of: str = "") -> None:
        """Schedule a call: if it is part `of` an attempt, an allocation or a plan, unless the next one of
        these has begun by then."""
        self._order += 1
        heapq.heappush(self._heap, (t, self._order, of, self._counts[of], act, arguments))

    def _feed(self, event: ev.Event) -> None:
        """Give the state machine an event, account for it, and carry out the decisions."""
        for instruction in self.ledger.feed(event):
            self._carry_out(instruction)
        if self.state.phase is not Phase.RUNNING:
            self._wake()

    def _wake(self) -> None:
        """Schedule a tick for the next time at which the state machine wants to look again."""
        state = self.state
        times = [state.deadline] if state.deadline is not None else []
        if state.phase is Phase.WAITING:
            times.append(state.not_before)
        elif state.phase is Phase.STARTING and state.enough_since is not None:
            times.append(state.enough_since + SPARE_GRACE_S)
        next_at = min((t for t in times if t > self.now), default=0.0)
        if next_at and next_at != self._woken:
            self._woken = next_at
            self._at(next_at, self._tick)

    def _tick(self) -> None:
        self._woken = 0.0
        if self.state.phase is not Phase.RUNNING:
            self._feed(ev.Tick(t=self.now))

    def _carry_out(self, instruction: Instruction) -> None:
        d = self._d
        if isinstance(instruction, StopWorkers):
            self._halt()
            stop_s = d.parts(self._kind).stop_s
            self._at(self.now + stop_s, self._stopped, instruction.attempt, instruction.nodes)
        elif isinstance(instruction, Launch):
            self._counts[ATTEMPT] += 1
            for out, into in self._names.placed(instruction.placement):
                self._tiers.swapped(out, into)
            self._restoring = self._chosen(instruction)
            self._feed(self._restoring.record.event)
            self._at(self.now + d.parts(self._kind).launch_s, self._started, of=ATTEMPT)
        elif isinstance(instruction, Requeue):
            again_at = self.now + self._tiers.given_back(self.now) + d.requeue_s
            self._at(again_at, lambda: self._allocate(self.now))
            self._allocation_ended("requeue")
        elif isinstance(instruction, Finish):
            self._halt()
            self._allocation_ended(instruction.state)

    def _chosen(self, launch: Launch) -> Restoring:
        """What the attempt restores; or the step that is in the memory of ranks that live."""
        found = self._tiers.choose(launch, self.now)
        lost = len(self.state.incidents[-1].lost) if self.state.incidents else 0
        live = self._sparing.launched(launch.spare, found.key.step, lost)
        return found if live is None else replace(found, live=live, seconds=self._d.restore_s)

    # Allocations and nodes.

    def _allocate(self, eligible_at: float) -> None:
        """Start an allocation in which all nodes are healthy: Slurm replaces those that are being
        repaired."""
        self._counts[ALLOCATION] += 1
        self._names = Names(self.setup.nodes, self.setup.spares, self._counts[ALLOCATION], self._named)
        self._dead = set()
        self._tiers.allocated()
        names = self._names.all()
        self._feed(
            ev.AllocationStarted(
                t=self.now, slurm_job="1", restarts=self._counts[ALLOCATION], nodes=names, host="",
                eligible_at=eligible_at,
            )
        )  # fmt: skip
        for name in names:
            self._join(name)

    def _allocation_ended(self, why: str) -> None:
        event = ev.AllocationEnded(t=self.now, slurm_job="1", why=why)
        self.ledger.feed(event)

    def _join(self, name: str) -> None:
        incarnation = f"{name}@{self.now}"
        self._feed(ev.NodeJoined(t=self.now, node=name, address=name, incarnation=incarnation))
        self._feed(ev.NodeReady(t=self.now, node=name, store_port=1))

    def _fault(self, fault: TraceFault) -> None:
        if self.state.phase in (Phase.QUEUED, Phase.REQUEUED):
            return
        if fault.kind in (POWER_LOSS, NODE_CRASH):
            for number in fault.nodes:
                self._node_fault(number, fault)
        elif fault.kind == HANG:
            self._hang()
        elif self.state.phase in (Phase.LAUNCHING, Phase.RUNNING):
            self._rank_fault(fault)

    def _hang(self) -> None:
        if self.state.phase is not Phase.RUNNING:
            return  # ranks that were being started are started again by the launch's own limit
        limit_s = self._hang_limit_s()
        self._halt()
        self._at(self.now + limit_s, self._hung, limit_s, of=ATTEMPT)

    def _hang_limit_s(self) -> float:
        """The seconds that the hang detector waits when all ranks are in a collective."""
        longest_s, settings = self._d.step_s + self._d.stall_s, self.state.settings
        ranks = [RankView(0, "", "stepping" if self._training else "restoring", int(self._training), math.inf,
                          longest_s, math.inf, 0.0)]  # fmt: skip
        limits = HangLimits(settings.hang_s, settings.start_limit_s, self.state.hang_patience)
        verdict = judge(ranks, limits)
        if verdict is None:
            return COLLECTIVE_LIMIT_S
        return verdict.limit_s + (0.0 if verdict.certain else WAITING_S)

    def _hung(self, silent_s: float) -> None:
        if self.state.phase is Phase.RUNNING:
            self._kind = HANG
            self._feed(
                ev.RanksHung(
                    t=self.now, attempt=self.state.attempt, ranks=(), node="", silent_s=silent_s,
                    limit_s=silent_s, evidence=f"no rank stepped for {silent_s:.1f} s",
                )
            )  # fmt: skip

    def _rank_fault(self, fault: TraceFault) -> None:
        node: str | None = self.state.placement[0]
        killed = fault.kind in (WORKER_KILL, RANK_STOP)
        if killed and fault.nodes:
            node = self._names.of(fault.nodes[0], self._healthy())
        if node not in self.state.placement or node in self._dead:
            return
        self._halt()
        self._sparing.gone(node or "")
        failed = ev.WorkerFailed(
            t=self.now, node=node or "", attempt=self.state.attempt, rank=0, exit_code=-9 if killed else 1,
            error="" if killed else "RuntimeError", message="" if killed else f"failure at {self.now:.0f} s",
        )  # fmt: skip
        self._at(self.now + self._d.parts(fault.kind).detect_s, self._noticed, fault.kind, failed, of=ATTEMPT)

    def _noticed(self, kind: str, event: ev.WorkerFailed) -> None:
        self._kind = kind
        self._feed(msgspec.structs.replace(event, t=self.now))

    def _healthy(self) -> set[str]:
        nodes = self.state.nodes
        return {n for n in self.state.placement if nodes[n].role is Role.ACTIVE and n not in self._dead}

    def _node_fault(self, number: int, fault: TraceFault) -> None:
        if self.state.ended:
            return
        name = self._names.of(number, self._healthy())
        if name is None:
            self._at(self.now + LATER_S, self._node_fault, number, fault, of=ALLOCATION)
            return
        if name in self._dead or self.state.nodes[name].role is Role.FAILED:
            return  # it is being repaired
        self._dead.add(name)
        self._tiers.lost(number, self.now)
        self._sparing.gone(name)
        if name in self.state.placement:
            self._halt()
        parts = self._d.parts(fault.kind)
        noticed = self.now + parts.detect_s
        self._at(noticed, self._lost, name, fault.kind, of=ALLOCATION)
        back = self.now + (self._d.repair_s if fault.down_s is None else fault.down_s)
        self._at(max(back, noticed + parts.stop_s), self._repaired, name, of=ALLOCATION)

    def _lost(self, name: str, kind: str) -> None:
        self._dead.discard(name)
        if name in self.state.placement:
            self._kind = kind
        silent_s = self._d.parts(kind).detect_s
        how = "silent" if kind == POWER_LOSS else "closed"
        self._feed(ev.NodeLost(t=self.now, node=name, how=how, silent_s=silent_s, limit_s=silent_s))

    def _repaired(self, name: str) -> None:
        if self.state.nodes[name].role is Role.FAILED:
            self._join(name)

    # Attempts.

    def _stopped(self, attempt: int, nodes: Iterable[str]) -> None:
        for name in nodes:
            if self.state.phase is Phase.STOPPING and name not in self._dead:
                self._feed(
                    ev.WorkersStopped(
                        t=self.now, node=name, attempt=attempt, store_port=1,
                        spared=self._sparing.spared(name),
                    )
                )  # fmt: skip

    def _started(self) -> None:
        if self.state.phase is not Phase.LAUNCHING:
            return
        attempt = self.state.attempt
        for name in self.state.placement:
            if name not in self._dead:
                self._feed(ev.WorkersStarted(t=self.now, node=name, attempt=attempt, pids=()))
        # Ranks that are late, if any, belong to a node whose loss is about to be detected.
        if self._restoring is not None:
            self._at(self.now + self._restoring.seconds, self._restored, self._restoring, of=ATTEMPT)

    def _restored(self, what: Restoring) -> None:
        if self.state.phase is not Phase.RUNNING:
            return
        step, tier = (what.key.step, what.tier) if what.live is None else (what.live, LIVE)
        self._tiers.restored(what, self.now)
        if self.state.incident is not None and tier:
            self._restores[tier] += 1
        self._feed(
            ev.Restored(
                t=self.now, attempt=self.state.attempt, step=step, tier=tier, seconds=what.seconds,
                size_bytes=1 if tier else 0,
            )
        )  # fmt: skip
        first_s = self._d.warm_up_s + self._d.step_s
        self._at(self.now + first_s, self._train, step + 1, False, of=ATTEMPT)

    def _train(self, at_step: int, copying: bool) -> None:
        """Continue training from `at_step` until the next save or fault."""
        if not self._training:
            self._progress(at_step)
            self._sparing.stepped(self.state.placement)
        self._training, self._segment, self._next_save = True, (self.now, at_step, copying), 0
        self._look()

    def _steps_now(self) -> int:
        """The number of steps done by now. When a save is due, ranks wait for it."""
        start, before, copying = self._segment
        done = before + self._d.steps_in(self.now - start, copying=copying)
        return min(done, self._next_save or done)

    def _look(self) -> None:
        """Process the ranks' heartbeats. A new schedule of saves reaches all ranks at once."""
        if not self._training:
            return
        step = self._steps_now()
        events, again_s = self._ranks.look(step, self.now)
        for event in events:
            self._feed(event)
        if again_s is not None:
            self._at(self.now + again_s, self._look, of=ATTEMPT)
        if step != self._next_save:
            self._plan_save(step)

    def _plan_save(self, step: int) -> None:
        """Schedule what happens next after ranks have done `step`, if nothing intervenes."""
        start, before, copying = self._segment
        until = self._save_after(step, before if copying else None)
        if until == self._next_save:
            return
        self._next_save = until
        self._counts[PLAN] += 1
        if self._scripted and (struck := max(step, self._scripted[0].step or 0)) <= until:
            self._at(self._time_of(struck), lambda: self._fault(self._scripted.popleft()), of=PLAN)
        incident = self.state.incident
        if incident is not None:  # it is over with the first step that was not done before
            first = max(step, incident.step_lost_from + 1)
            if first <= until:
                self._at(self._time_of(first), self._progress, first, of=PLAN)
        if until == NEVER:
            return
        due = self._time_of(until) + self._d.stall_s
        steps = self._save_after(until, until) - until
        more, cycle_s = self._more_saves(steps, due)
        self._at(due + more * cycle_s, self._saved, until + more * steps, more + 1, steps, of=PLAN)

    def _save_after(self, step: int, saved: int | None) -> int:
        """The step of the next save; none begins while the save of step `saved` is being copied."""
        if saved is not None:
            step = max(step, saved + math.ceil(self._d.copy_s / self._d.step_s) - 1)
        return self._ranks.next_save(step)

    def _time_of(self, step: int) -> float:
        start, before, copying = self._segment
        return start + self._d.time_of(step - before, copying=copying)

    def _progress(self, step: int, at: float | None = None) -> None:
        """Report that `step` was done just now, or else at that time."""
        self._feed(
            ev.Progress(
                t=self.now, attempt=self.state.attempt, step=step, stepped_at=self.now if at is None else at,
                absolute=True, step_s=self._d.step_s,
            )
        )  # fmt: skip

    def _more_saves(self, steps: int, first_at: float) -> tuple[int, float]:
        """Return how many saves after the one at `first_at`, one every `steps`, end before anything else
        happens, and the time between two. One event reports them all, with exactly the same times."""
        cycle_s = self._d.time_of(steps, copying=True) + self._d.stall_s
        if self.state.incident is not None or self._scripted or not self._ranks.steady:
            return 0, cycle_s
        until = min(self._next_fault, self._end, self._heap[0][0] if self._heap else math.inf)
        fit = (until - first_at) / cycle_s
        return (min(self.setup.saves_at_once - 1, int(fit - 1e-6)) if fit > 1.0 else 0), cycle_s

    def _saved(self, at_step: int, saves: int, steps: int) -> None:
        """Record a save; uneventful saves are reported together."""
        d, attempt = self._d, self.state.attempt
        stall_s = saves * d.stall_s
        saved = ev.Saved(t=self.now, attempt=attempt, step=at_step, tier=MEMORY, ok=True, stall_s=d.stall_s)
        together = ev.Progress(
            t=self.now, attempt=attempt, step=at_step, stepped_at=self.now, absolute=True, step_s=d.step_s,
            saves=saves, saved_step=at_step, saved_in=MEMORY, stall_s=stall_s,
        )  # fmt: skip
        self._feed(saved if saves == 1 else together)
        self._ranks.agreement.on_event(saved)
        if PEER not in self.state.saved and d.write_s is not None and self.state.settings.replicas:
            self._feed(copied(PEER, StateId(at_step, attempt), self.now, seconds=d.copy_s).event)
        cycle_s = d.time_of(steps, copying=True) + d.stall_s
        for more in reversed(range(saves)):
            at = self.now - more * cycle_s
            self._tiers.saved(
                StateId(at_step - more * steps, attempt), at, at + cycle_s if more else math.inf
            )
        self._saves += saves
        self._train(at_step, True)

    def _halt(self) -> None:
        if self.state.phase in (Phase.LAUNCHING, Phase.RUNNING):
            self._counts[ATTEMPT] += 1
        if not self._training:
            return
        self._training = False
        self._counts[PLAN] += 1
        done = self._steps_now()
        done_at = min(self.now, self._time_of(done))
        self._sparing.halted(done, (self.now - done_at) / self._d.step_s)
        self._tiers.halted(self.now)
        if self.state.phase is Phase.RUNNING and done > self.state.step:
            self._progress(done, done_at)

    # Results.

    def _outcome(self) -> SimOutcome:
        account = self.ledger.account(self.now)
        totals = account.totals.copy()
        total_us = account.allocated_us + account.queue_us
        more = self._names.others - 1
        if more > 0:  # each of the others did what their common name did
            one = Account(
                account.timeline, account.waits, 1, {OTHERS: account.stays.get(OTHERS, ())},
                account.first_launch, account.end, account.final,
            )  # fmt: skip
            for name, us in one.totals.items():
                totals[name] += more * us
            total_us += more * (one.allocated_us + one.queue_us)
        queued = account.queue_us // max(1, account.asked_nodes) * (self.setup.nodes + self.setup.spares)
        ratios = account.ratios()
        ratios["allocation_goodput"] = totals["step"] / (total_us - queued) if total_us > queued else None
        return SimOutcome(
            ratios, {name: totals[name] for name in ordered(list(totals))}, total_us,
            (account.end - to_us(START)) / 1e6, tuple(self.state.incidents), self.state.restarts,
            self._saves, dict(self._restores), self.state.phase.value, self.state.end_reason,
            _history(account, to_us(self._end), self.setup.parts),
        )  # fmt: skip


def _history(account: Account, end: int, parts: int) -> tuple[dict[str, int], ...]:
    """Return the microseconds by category in each of `parts` equal parts of the time until `end`."""
    start = to_us(START)
    found: list[dict[str, int]] = [{} for _ in range(parts)]
    width = -(-(end - start) // max(1, parts))
    for interval in (*account.waits, *account.timeline) if parts else ():
        at = interval.start
        while at < min(interval.end, end):
            part = (at - start) // width
            until = min(interval.end, start + (part + 1) * width, end)
            found[part][interval.category] = found[part].get(interval.category, 0) + until - at
            at = until
    return tuple(found)
