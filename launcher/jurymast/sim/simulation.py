"""One simulated run: faults come in, `core.run.step` decides, and what it orders takes its time.

Discrete events: the clock jumps from one to the next, and neither steps nor heartbeats are among them. The
state machine gets the events that a supervisor would give it (of all steps, those at which it learns
something), and `core.ledger` books them as it books a real run's journal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jurymast.core import events as ev
from jurymast.core.accounting import Account, ordered, to_us
from jurymast.core.copies import SHARED
from jurymast.core.incident import Incident
from jurymast.core.instructions import Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.ledger import Ledger
from jurymast.core.recovery import SPARE_GRACE_S
from jurymast.core.settings import Settings
from jurymast.core.state import Phase, Role, RunState
from jurymast.sim.cadences import SimCadence
from jurymast.sim.durations import START, Durations
from jurymast.sim.faults import Fault
from jurymast.sim.names import OTHERS, Names, names_needed

# A fault for which no name is left is noticed this much later.
LATER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated: `nodes` active and `spares` idle nodes for `seconds`.

    `named`: how many placed nodes have a name of their own; None: as many as the faults need.
    `saves_at_once`: saves without anything between them that one event may tell of.
    """

    nodes: int
    spares: int
    seconds: float
    durations: Durations = field(default_factory=Durations)
    settings: Settings = field(default_factory=Settings)
    requeue: bool = True
    named: int | None = None
    saves_at_once: int = 32


@dataclass(frozen=True)
class Outcome:
    """One run's account. `categories` are node-microseconds that sum to `total_us`, the allocated and the
    queued node-time; `state` tells whether the run gave up."""

    ratios: dict[str, float | None]
    categories: dict[str, int]
    total_us: int
    wall_s: float
    incidents: tuple[Incident, ...]
    requeues: int
    saves: int
    state: str
    reason: str


class Simulation:
    """Drives one run through `faults`; `told` is called with the time that has passed, now and then."""

    def __init__(
        self, setup: Setup, faults: Sequence[Fault], cadence: SimCadence,
        told: Callable[[float], None] | None = None,
    ) -> None:  # fmt: skip
        self.setup, self.cadence, self._told = setup, cadence, told
        self._faults = faults
        self._d = setup.durations
        self.now = START
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._allocation = -1
        self._named = names_needed(faults) if setup.named is None else setup.named
        self._names = Names(setup.nodes, setup.spares, 0, self._named)
        self.state = self._fresh_state()
        self.ledger = Ledger(self.state)
        self._dead: set[str] = set()  # nobody noticed yet
        self._generation = 0  # of launches and of faults that break an attempt
        self._training = False
        self._segment = (0.0, 0, False)  # start, steps before it, copies drain during it
        self._next_save = 0  # step
        self._next_fault, self._end, self._saves = START, START + setup.seconds, 0
        self._copies = [(0, 0.0), (0, 0.0)]  # the two newest saves: step, complete at
        self._restorable = 0
        self._woken = 0.0

    def _fresh_state(self) -> RunState:
        return RunState(
            settings=self.setup.settings, active=self._names.active, spares=self.setup.spares,
            submitted_at=START, requeue_allowed=self.setup.requeue,
        )  # fmt: skip

    def run(self) -> Outcome:
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
                self._fault(fault)
                if self._told is not None:
                    self._told(fault.t)
                fault = next(faults, None)
                continue
            self.now, _, act, arguments = heapq.heappop(self._heap)
            act(*arguments)
        if not self.state.ended:
            self.now = self._end
            self._halt()
        return self._outcome()

    # Events and instructions.

    def _at(self, t: float, act: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (t, self._order, act, arguments))

    def _feed(self, event: ev.Event) -> None:
        """Decide and book, then carry out what was decided."""
        for instruction in self.ledger.feed(event):
            self._carry_out(instruction)
        if self.state.phase is not Phase.RUNNING:
            self._wake()

    def _wake(self) -> None:
        """A tick at the next moment at which the state machine wants to look again."""
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
            self._at(self.now + d.stop_s, self._stopped, instruction.attempt, instruction.nodes)
        elif isinstance(instruction, Launch):
            self._generation += 1
            self._names.placed(instruction.placement)
            self._at(self.now + d.launch_s, self._started, self._generation)
        elif isinstance(instruction, Requeue):
            self._allocation_ended("requeue")
            self._at(self.now + d.requeue_s, self._allocate_again)
        elif isinstance(instruction, Finish):
            self._halt()
            self._allocation_ended(instruction.state)

    # Allocations and nodes.

    def _allocate(self, eligible_at: float) -> None:
        """All nodes of a new allocation are well: Slurm gives others for those that are being repaired."""
        self._allocation += 1
        self._names = Names(self.setup.nodes, self.setup.spares, self._allocation, self._named)
        self._dead = set()
        names = self._names.all()
        self._feed(
            ev.AllocationStarted(
                t=self.now, slurm_job="1", restarts=self._allocation, nodes=names, host="",
                eligible_at=eligible_at,
            )
        )  # fmt: skip
        for name in names:
            self._join(name)

    def _allocate_again(self) -> None:
        self._allocate(self.now)

    def _allocation_ended(self, why: str) -> None:
        event = ev.AllocationEnded(t=self.now, slurm_job="1", why=why)
        self.ledger.feed(event)

    def _join(self, name: str) -> None:
        incarnation = f"{name}@{self.now}"
        self._feed(ev.NodeJoined(t=self.now, node=name, address=name, incarnation=incarnation))
        self._feed(ev.NodeReady(t=self.now, node=name, store_port=1))

    def _fault(self, fault: Fault) -> None:
        if self.state.phase in (Phase.QUEUED, Phase.REQUEUED):
            return
        if not fault.nodes and self.state.phase in (Phase.LAUNCHING, Phase.RUNNING):
            self._halt()
            self._feed(
                ev.WorkerFailed(
                    t=self.now, node=self.state.placement[0], attempt=self.state.attempt, rank=0, exit_code=1,
                    error="RuntimeError", message=f"failure at {fault.t:.0f} s",
                )
            )  # fmt: skip
        for number in fault.nodes:
            self._node_fault(number, fault.down_s, self._allocation)

    def _node_fault(self, number: int, down_s: float | None, allocation: int) -> None:
        if allocation != self._allocation or self.state.ended:
            return
        nodes = self.state.nodes
        healthy = {n for n in self.state.placement if nodes[n].role is Role.ACTIVE and n not in self._dead}
        name = self._names.of(number, healthy)
        if name is None:
            self._at(self.now + LATER_S, self._node_fault, number, down_s, allocation)
            return
        if name in self._dead or nodes[name].role is Role.FAILED:
            return  # it is being repaired
        self._dead.add(name)
        if name in self.state.placement:
            self._halt()
            self.cadence.failed(self.now)
        noticed = self.now + self._d.detection_s
        self._at(noticed, self._lost, name, allocation)
        back = self.now + (self._d.repair_s if down_s is None else down_s)
        self._at(max(back, noticed + self._d.stop_s), self._repaired, name, allocation)

    def _lost(self, name: str, allocation: int) -> None:
        if allocation == self._allocation:
            self._dead.discard(name)
            silent_s = self._d.detection_s
            self._feed(ev.NodeLost(t=self.now, node=name, how="silent", silent_s=silent_s, limit_s=silent_s))

    def _repaired(self, name: str, allocation: int) -> None:
        if allocation == self._allocation and self.state.nodes[name].role is Role.FAILED:
            self._join(name)

    # Attempts.

    def _stopped(self, attempt: int, nodes: Iterable[str]) -> None:
        for name in nodes:
            if self.state.phase is Phase.STOPPING and name not in self._dead:
                self._feed(ev.WorkersStopped(t=self.now, node=name, attempt=attempt, store_port=1))

    def _started(self, generation: int) -> None:
        if generation != self._generation or self.state.phase is not Phase.LAUNCHING:
            return
        attempt = self.state.attempt
        for name in self.state.placement:
            if name not in self._dead:
                self._feed(ev.WorkersStarted(t=self.now, node=name, attempt=attempt, pids=()))
        # Late ranks, if any, are those of a node whose loss is about to be noticed.
        self._at(self.now + self._d.restore_s, self._restored, generation)

    def _restored(self, generation: int) -> None:
        if generation != self._generation or self.state.phase is not Phase.RUNNING:
            return
        self._feed(
            ev.Restored(
                t=self.now, attempt=self.state.attempt, step=self._restorable, tier=SHARED,
                seconds=self._d.restore_s,
            )
        )  # fmt: skip
        first_s = self._d.warm_up_s + self._d.step_s
        self._at(self.now + first_s, self._train, generation, self._restorable + 1, False)

    def _train(self, generation: int, at_step: int, draining: bool) -> None:
        """Steps go on from `at_step`, until the next save or fault."""
        if generation != self._generation:
            return
        d = self._d
        if not self._training:
            self._copies = [(self._restorable, 0.0)] * 2
            self._progress(at_step)
        self._training, self._segment = True, (self.now, at_step, draining)
        steps = max(1.0, self.cadence.interval_s(self.now) / d.step_s, d.drain_s / d.step_s)
        until = at_step + round(min(steps, 1e12))
        self._next_save = until
        due = self.now + d.time_of(until - at_step, draining=draining)
        more, cycle_s = self._more_saves(until - at_step, due + d.stall_s)
        last = until + more * (until - at_step)
        self._at(due + d.stall_s + more * cycle_s, self._saved, generation, last, more + 1, until - at_step)
        incident = self.state.incident
        if incident is not None:  # it is over with the first step that was not done before
            first = max(at_step, incident.step_lost_from + 1)
            if first <= until:
                due = self.now + d.time_of(first - at_step, draining=draining)
                self._at(due, self._regained, generation, first)

    def _progress(self, at_step: int) -> None:
        self._feed(
            ev.Progress(
                t=self.now, attempt=self.state.attempt, step=at_step, stepped_at=self.now, absolute=True,
                step_s=self._d.step_s,
            )
        )  # fmt: skip

    def _regained(self, generation: int, at_step: int) -> None:
        if generation == self._generation:
            self._progress(at_step)

    def _more_saves(self, steps: int, first_at: float) -> tuple[int, float]:
        """How many saves after that at `first_at`, one every `steps`, are over before anything else happens,
        and the time from one to the next. One event tells of all of them, and all times come out the same.
        """
        cycle_s = self._d.time_of(steps, draining=True) + self._d.stall_s
        if self.state.incident is not None:
            return 0, cycle_s
        until = min(self._next_fault, self._end, self._heap[0][0] if self._heap else math.inf)
        fit = (until - first_at) / cycle_s
        return (min(self.setup.saves_at_once - 1, int(fit - 1e-6)) if fit > 1.0 else 0), cycle_s

    def _saved(self, generation: int, at_step: int, saves: int, steps: int) -> None:
        if generation != self._generation:
            return
        d = self._d
        self._feed(
            ev.Saved(
                t=self.now, attempt=self.state.attempt, step=at_step, tier=SHARED, ok=True,
                stall_s=saves * d.stall_s,
            )
        )  # fmt: skip
        before = self._copies[1] if saves == 1 else (at_step - steps, self.now - d.step_s)
        self._copies = [before, (at_step, self.now + d.drain_s)]
        self._saves += saves
        self._train(generation, at_step, True)

    def _halt(self) -> None:
        """From now on no rank of this attempt gets any further."""
        if self.state.phase in (Phase.LAUNCHING, Phase.RUNNING):
            self._generation += 1
        if not self._training:
            return
        self._training = False
        start, before, draining = self._segment
        done = before + self._d.steps_in(self.now - start, draining=draining)
        done = min(done, self._next_save)  # after that they stood still for the save
        done_at = min(self.now, start + self._d.time_of(done - before, draining=draining))
        self._restorable = next(at for at, complete in reversed(self._copies) if complete <= self.now)
        if self.state.phase is Phase.RUNNING and done > before:
            self._feed(
                ev.Progress(
                    t=self.now, attempt=self.state.attempt, step=done, stepped_at=done_at, absolute=True,
                    step_s=self._d.step_s,
                )
            )  # fmt: skip

    # Results.

    def _outcome(self) -> Outcome:
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
        return Outcome(
            ratios, {name: totals[name] for name in ordered(list(totals))}, total_us,
            (account.end - to_us(START)) / 1e6, tuple(self.state.incidents), self.state.restarts,
            self._saves, self.state.phase.value, self.state.end_reason,
        )  # fmt: skip
