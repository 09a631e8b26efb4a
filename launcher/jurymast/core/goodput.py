"""How a run's node-seconds are accounted for: the accounts, and the ledger that fills them from the journal.

sum over categories = allocated node-time + queue time x (active + spare nodes asked for)

Everything is kept in whole microseconds, so the sum holds to the last one. The nodes of a placement do the
same thing at the same time, so there is one timeline for them, and each node only remembers when it was
placed, idle or lost. Waiting in the queue counts for every node asked for: the first time from when the job
could have started, after a requeue from the end of the last allocation (Slurm's own delay is part of what a
requeue costs).

The ledger books the intervals, event by event. A step counts the first time it is done. Steps at or below the
newest step ever done are rework; so is the step that a failure cut short, because it is done again. If it
is not known where an attempt began, its steps may be new or rework, up to as many as the attempts are sure to
have done before: that is `maybe_rework`, and the ratios have a lower and an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from jurymast.core.run.machine import step
from jurymast.core.run.recording import pause_s
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Instruction
from jurymast.core.state.findings import Verdict
from jurymast.core.state.images import LIVE
from jurymast.core.state.run import Phase, Role, RunState

Told = TypeVar("Told")


@dataclass(frozen=True)
class Category:
    """A category of time. `group` is one of productive, start, running, incident, around."""

    name: str
    group: str
    meaning: str


# In the order of reports. A category that is not here is still counted and shown, after these.
CATEGORIES = (
    Category("step", "productive", "steps done for the first time"),
    Category("queue_wait", "start", "in the queue before the first allocation"),
    Category("launch", "start", "processes, imports and rendezvous of the first attempt"),
    Category("restore", "start", "reading a checkpoint"),
    Category("warm_up", "start", "from the restore to the end of an attempt's first step"),
    Category("checkpoint_stall", "running", "training stopped for a save"),
    Category("detection", "incident", "from a fault to its detection"),
    Category("hang", "incident", "no rank stepped, until this counted as a hang or the run was cancelled"),
    Category("diagnosis", "incident", "stopping the ranks and gathering evidence"),
    Category("decision", "incident", "choosing what to do"),
    Category("replacement", "incident", "back-off, and waiting for the nodes of the next attempt"),
    Category("relaunch", "incident", "processes, imports and rendezvous of a later attempt"),
    Category("rework", "incident", "steps done again, and the step that a failure cut short"),
    Category(
        "maybe_rework", "incident", "steps that are new or done again: where the script resumed is not known"
    ),
    Category("requeue_wait", "around", "between two allocations"),
    Category("spare_idle", "around", "nodes held ready, or not placed for another reason"),
    Category("failed_node", "around", "nodes that were lost or taken out, still allocated"),
    Category("shutdown", "around", "from the last step, or the decision to end, to the end"),
    Category("unknown", "around", "what was done is not known"),
)
MEANINGS = {category.name: category.meaning for category in CATEGORIES}
RATIOS = {
    "ettr": "time in steps that counted / time since the job could have started (queue included)",
    "runtime_goodput": "time in steps that counted / time since the first launch (requeue waits included)",
    "allocation_goodput": "node-time in steps that counted / node-time allocated (spares included)",
}
MAYBE_REWORK = "maybe_rework"
DOUBTFUL = frozenset({MAYBE_REWORK, "unknown"})  # may have counted
# The activity of a node while it has a place; every other activity is a category itself.
PLACED = "placed"


def to_us(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * 1_000_000)


def ordered(names: Sequence[str]) -> list[str]:
    """Return category names in the order of reports; unknown ones come last, by name."""
    known = {category.name: place for place, category in enumerate(CATEGORIES)}
    return sorted(names, key=lambda name: (known.get(name, len(known)), name))


@dataclass
class Interval:
    """[`start`, `end`) in microseconds since the epoch; `incident` 0: none."""

    start: int
    end: int
    category: str
    incident: int = 0
    attempt: int = 0

    @property
    def us(self) -> int:
        return self.end - self.start


@dataclass
class Stay:
    """What one node did from `start` to `end` (None: still): `PLACED`, or the category itself."""

    start: int
    end: int | None
    what: str

    @property
    def until(self) -> int:
        return self.start if self.end is None else self.end


def cut_out(timeline: Sequence[Interval], start: int, end: int) -> Iterator[Interval]:
    """Return the part of `timeline` within [`start`, `end`)."""
    first = bisect_right(timeline, start, key=lambda interval: interval.start) - 1
    for place in range(max(0, first), len(timeline)):
        interval = timeline[place]
        if interval.start >= end:
            return
        if start <= interval.start and interval.end <= end:
            yield interval
        elif interval.end > start:
            yield replace(interval, start=max(interval.start, start), end=min(interval.end, end))


@dataclass(frozen=True)
class Pace:
    """A step took `step_s` seconds at `t` (Unix time), in this attempt. It trained on `samples_s` and
    `tokens_s` a second, 0.0 if the script does not say it."""

    t: float
    step_s: float
    attempt: int
    samples_s: float = 0.0
    tokens_s: float = 0.0


@dataclass(frozen=True)
class ToldSaves:
    """`number` checkpoints, the newest of `step`, were complete in `tier` at `t` (Unix time). For each of
    them training stood still for `stall_s`: not at all for what agents copied."""

    t: float
    attempt: int
    step: int
    tier: str
    stall_s: float
    number: int = 1


@dataclass(frozen=True)
class ToldFinding:
    """A probe found something on `node` at `t` (Unix time)."""

    t: float
    node: str
    code: str
    verdict: str


@dataclass(frozen=True)
class Account:
    """All intervals up to `end` (microseconds); `final` when nothing can be added. Of the time in `doubtful`
    categories it is not known whether it counted."""

    timeline: tuple[Interval, ...]
    waits: tuple[Interval, ...]
    asked_nodes: int
    stays: dict[str, tuple[Stay, ...]]
    first_launch: int | None
    end: int
    final: bool
    doubtful: frozenset[str] = frozenset({MAYBE_REWORK})
    paces: tuple[Pace, ...] = ()
    saved: tuple[ToldSaves, ...] = ()
    findings: tuple[ToldFinding, ...] = ()
    gpus: int = 0  # of a node; 0: none has told of any

    def intervals_of_all(self) -> Iterator[tuple[int, Interval]]:
        """All that was booked: (nodes, what each of them did). Nodes that did the same over the same time
        come once; those asked for wait together."""
        alike = Counter((s.start, s.until, s.what) for stays in self.stays.values() for s in stays)
        for (start, end, what), nodes in alike.items():
            if what == PLACED:
                yield from ((nodes, interval) for interval in cut_out(self.timeline, start, end))
            else:
                yield nodes, Interval(start, end, what)
        yield from ((self.asked_nodes, wait) for wait in self.waits)

    @cached_property
    def totals(self) -> Counter[str]:
        """Node-microseconds by category."""
        totals: Counter[str] = Counter()
        for nodes, interval in self.intervals_of_all():
            totals[interval.category] += nodes * interval.us
        return Counter({name: us for name, us in totals.items() if us})

    @property
    def queue_us(self) -> int:
        """The queue time of all requested nodes."""
        return self.asked_nodes * sum(wait.us for wait in self.waits)

    @property
    def allocated_us(self) -> int:
        """The node-time of all allocations."""
        return sum(stay.until - stay.start for stays in self.stays.values() for stay in stays)

    @property
    def wall_us(self) -> int:
        """The time since the job could have started."""
        return sum(interval.us for interval in (*self.waits, *self.timeline))

    def placed_us(self, category: str) -> int:
        """Return the time (not node-time) that the placed nodes spent in `category`."""
        return sum(interval.us for interval in self.timeline if interval.category == category)

    def incident_us(self, incident: int) -> int:
        """Return the time (not node-time) that `incident` cost the placed nodes, and the run in the queue."""
        return sum(i.us for i in (*self.timeline, *self.waits) if i.incident == incident)

    def ratios(self, *, at_most: bool = False) -> dict[str, float | None]:
        """Return the three main ratios, 0..1; None while the denominator is 0. They are lower bounds where
        something is doubtful; `at_most`: the upper ones."""
        counted = ("step", *self.doubtful) if at_most else ("step",)
        productive = sum(self.placed_us(category) for category in counted)
        since_launch = 0 if self.first_launch is None else self.end - self.first_launch
        return {
            "ettr": _ratio(productive, self.wall_us),
            "runtime_goodput": _ratio(productive, since_launch),
            "allocation_goodput": _ratio(
                sum(self.totals[category] for category in counted), self.allocated_us
            ),
        }

    def intervals(self, node: str) -> Iterator[Interval]:
        """Return what `node` did, in order; times in which it was not allocated are left out."""
        for stay in self.stays[node]:
            if stay.what == PLACED:
                yield from cut_out(self.timeline, stay.start, stay.until)
            elif stay.until > stay.start:
                yield Interval(stay.start, stay.until, stay.what)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


# ---- the ledger

# If a running run reports nothing for longer than this (or three steps, or two lines of the journal), what it
# does is unknown.
NEWS_LIMIT_US = 10_000_000
# Between WorkersStarted everywhere and the first thing that the ranks tell.
RANKS_UP = "ranks_up"
BEFORE_FIRST_STEP = ("launch", "relaunch", RANKS_UP, "warm_up")


@dataclass
class SaveCounts:
    """Checkpoints that were written, and those that failed. Times in seconds. `agreed`: the newest schedule
    of which the ranks of any attempt agreed."""

    done: int = 0
    failed: int = 0
    stall_s: float = 0.0
    stall_max_s: float = 0.0
    size_bytes: int = 0
    intervals: int = 0
    interval_s: float = 0.0
    last: tuple[int, int, float] | None = None  # attempt, step, time
    agreed: ev.CadenceSet | None = None

    def take(self, event: ev.Saved) -> None:
        """Count a save. What agents copy from memory to other tiers is not another save."""
        if self.last is not None and self.last[:2] == (event.attempt, event.step):
            return
        if event.ok:
            self.size_bytes = event.size_bytes
            self._add(1, event, event.step)
        else:
            self.failed += 1

    def take_usual(self, event: ev.Progress) -> None:
        """Count saves that were recorded together."""
        before = self.last[1] if self.last is not None and self.last[0] == event.attempt else 0
        self._add(event.saves, event, max(before, event.saved_step))

    def _add(self, number: int, event: ev.Saved | ev.Progress, newest: int) -> None:
        if self.last is not None and self.last[0] == event.attempt:
            self.intervals += number
            self.interval_s += event.t - self.last[2]
        self.done += number
        self.stall_s += event.stall_s
        self.stall_max_s = max(self.stall_max_s, event.stall_s / number)
        self.last = (event.attempt, newest, event.t)


class Sampled(Generic[Told]):
    """Of all that was told over time at most `MOST`, evenly chosen."""

    MOST = 1000

    def __init__(self) -> None:
        self.kept: list[Told] = []
        self._each, self._told = 1, 0

    def take(self, one: Told) -> None:
        self._told += 1
        if self._told % self._each == 0:
            self.kept.append(one)
        if len(self.kept) > self.MOST:
            self.kept, self._each = self.kept[1::2], 2 * self._each


@dataclass
class StepCounts:
    """Steps that were done in all attempts together; of these `again` had been done before, and `maybe_again`
    may have been."""

    done: int = 0
    again: int = 0
    maybe_again: int = 0


class Ledger:
    """Accounts for a run. `state` is the run's state after the newest event; only the ledger changes it."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.timeline: list[Interval] = []
        self.waits: list[Interval] = []
        self.stays: dict[str, list[Stay]] = {}
        self._doing: dict[str, str] = {}  # by node, of its stay that goes on
        self.saves = SaveCounts()
        self.first_launch: int | None = None
        self._frontier = to_us(state.submitted_at)  # all before is booked
        self._activity = ""  # what the placed nodes have done since then
        self._never = True  # no allocation came yet
        self._open = False  # an allocation is there
        self._heard_at = 0  # last word from it
        self._held: list[str] = []  # nodes of an allocation whose end is not told yet
        self._attempt = 0  # the one that is booked; the state may be one ahead
        self._step = 0  # newest step of this attempt
        self._best = self._from = 0  # newest step ever; the one from which ranks last restored a save
        self._numbered = False  # this attempt's steps have the training's own numbers
        self._base: int | None = None  # as in the state, once it is booked
        self.steps, self.paces = StepCounts(), Sampled[Pace]()
        self.gpus = 0
        self.saved, self.findings = Sampled[ToldSaves](), Sampled[ToldFinding]()
        self._maybe = 0  # of the present attempt
        self._stall = (0, 0)  # attempt and step of the newest save
        self._cut: Interval | None = None  # the step that the present incident cut short

    def feed(self, event: ev.Event) -> list[Instruction]:
        """Apply `event` to the state and account for it; returns the instructions that follow."""
        state = self.state
        phase, attempt, incidents, over = state.phase, state.attempt, len(state.incidents), state.ended
        instructions = step(state, event)
        since = self._now()
        self._note(event)
        if isinstance(event, ev.AllocationEnded):
            self._allocation_ended()
        elif over:
            return instructions
        elif isinstance(event, ev.RunStarted):
            self._frontier = min(self._frontier or self._now(), self._now())
        elif isinstance(event, ev.AllocationStarted):
            since = self._allocation_started(event)
        if not self._open:
            if state.ended and not over:
                self._wait_until(self._now())
            return instructions
        same = (phase, attempt) == (state.phase, state.attempt)
        if not (isinstance(event, ev.SupervisorStarted) and same):
            self._heard_at = self._now()
        self._hear(event)
        for incident in state.incidents[incidents:]:
            self._incident_opened(to_us(incident.fault_at), to_us(incident.detected_at), incident.id, event)
        self._follow(phase, attempt)
        if isinstance(event, ev.RefillEnded):
            self._given_back()
        everything = isinstance(event, ev.AllocationStarted) or not same
        self._sweep(getattr(event, "node", ""), since, everything=everything)
        if state.phase is Phase.REQUEUED or state.ended:
            self._release(self._now())
        return instructions

    def _note(self, event: ev.Event) -> None:
        """Keep what was told beside how time was spent."""
        match event:
            case ev.NodeJoined(gpus=gpus):
                self.gpus = max(self.gpus, gpus)
            case ev.Saved(ok=True):
                stall_s = 0.0 if event.copied else event.stall_s
                self.saved.take(ToldSaves(event.t, event.attempt, event.step, event.tier, stall_s))
            case ev.Progress(saves=number, saved_step=newest, saved_in=tier) if number > 0:
                stall_s = event.stall_s / number
                self.saved.take(ToldSaves(event.t, event.attempt, newest, tier, stall_s, number))
            case ev.CadenceSet() if event.every_steps:
                self.saves.agreed = event
            case ev.HealthFound(verdict=Verdict.BAD.value | Verdict.SUSPECT.value):
                at = event.at or event.t
                self.findings.take(ToldFinding(at, event.node, event.code, event.verdict))

    def _now(self) -> int:
        return to_us(self.state.now)

    # Allocations.

    def _allocation_started(self, event: ev.AllocationStarted) -> int:
        """Return since when its nodes are held."""
        began = min(self._now(), to_us(event.began_at) or self._now())
        if self._open:  # its end was not reported: the last event is the best guess
            self._book(self._heard_at, self._activity)
            self._release(self._heard_at)
        if self._never:
            self._frontier = min(began, max(self._frontier, to_us(event.eligible_at)))
        self._wait_until(began)
        self._never = False
        self._open, self._activity, self._held = True, "launch", []
        if self.state.incident is not None:
            self._activity = "replacement"
        return self._frontier

    def _allocation_ended(self) -> None:
        """Close an allocation: its nodes were held until now, after the decision to end."""
        now = self._now()
        if self._open:
            self._book(now, self._activity)
            self._release(now)
        elif self._held and now > self._frontier:
            for name in self._held:
                self.stays[name].append(Stay(self._frontier, now, "shutdown"))
            self._book(now, "shutdown")
        self._held = []

    def _wait_until(self, until: int) -> None:
        """There was no allocation from the frontier to `until`."""
        if until > self._frontier:
            incident = self.state.incident.id if self.state.incident is not None else 0
            what = "queue_wait" if self._never else "requeue_wait"
            self.waits.append(Interval(self._frontier, until, what, incident, self._attempt))
            self._frontier = until

    def _release(self, at: int) -> None:
        """The allocation ends at `at`, as far as is known."""
        self._held = []
        for name, stays in self.stays.items():
            if stays[-1].end is None:
                stays[-1].end = at
                self._held.append(name)
        self._doing.clear()
        self._open = False

    # The placed nodes.

    def _book(self, until: int, activity: str, incident: int | None = None) -> None:
        """Enter `activity` from the frontier to `until`, but not beyond now; the past is not changed."""
        until = min(until, self._now())
        if until <= self._frontier:
            return
        if incident is None:
            incident = self.state.incident.id if self.state.incident is not None else 0
        category = "warm_up" if activity == RANKS_UP else activity
        last = self.timeline[-1] if self.timeline else None
        if last is not None and (last.end, last.category, last.incident, last.attempt) == (
            self._frontier, category, incident, self._attempt,
        ):  # fmt: skip
            last.end = until
        else:
            self.timeline.append(Interval(self._frontier, until, category, incident, self._attempt))
        self._frontier = until

    def _hear(self, event: ev.Event) -> None:
        starts = self.state.phase is Phase.STARTING
        if starts or not self._attempt or getattr(event, "attempt", None) != self._attempt:
            return
        if isinstance(event, ev.Restored) and self._activity in BEFORE_FIRST_STEP:
            before = self._activity if self._activity == "warm_up" else self._launching()
            self._book(to_us(event.t) - to_us(event.seconds), before)
            self._book(to_us(event.t), "restore")
            self._activity, self._step, self._numbered = "warm_up", event.step, True
            self._went_on(event)
        elif isinstance(event, ev.Restored) and not (self._numbered or self._step):
            self._went_on(event)
            self._number(event.step)  # another failure was heard of before
        elif isinstance(event, ev.BeganAt) and self.state.base is not None:
            if self._base is not None or not self._numbered:
                self._number(self._step - (self._base or 0) + self.state.base)
                self._base = self.state.base
        elif isinstance(event, ev.Progress):
            if event.step_s > 0.0:
                rates = self.state.samples_s, self.state.tokens_s
                self.paces.take(Pace(event.stepped_at, event.step_s, event.attempt, *rates))
            if event.saves:
                self.saves.take_usual(event)
                self._stall = max(self._stall, (event.attempt, event.saved_step))
            if event.absolute and not self._numbered:
                self._number(event.step - 1 if self._step else self._planned_step(event.step))
            self._steps_done(to_us(event.stepped_at), event.step, to_us(event.stall_s))
        elif isinstance(event, ev.Saved) and not event.copied:
            self.saves.take(event)
            self._stalled(event)

    def _went_on(self, event: ev.Restored) -> None:
        """Ranks that go on in their processes may have done more steps than was heard since the last save."""
        self._from = self._from if event.tier == LIVE else event.step
        if event.tier == LIVE and (more := event.step - max(self._best, self._from)) > 0:
            self.steps.done, self._best = self.steps.done + more, event.step

    def _stalled(self, event: ev.Saved) -> None:
        """The ranks stood still after the step that was saved; the report of it arrives a little later."""
        if self._stall == (event.attempt, event.step):
            return  # told twice
        self._stall = (event.attempt, event.step)
        told, stall = to_us(event.t), to_us(event.stall_s)
        began = self._frontier if self._activity == "step" and self._step >= event.step else told - stall
        if not self._numbered:
            self._number(event.step - 1 if self._step else self._planned_step(event.step))
        self._steps_done(began, event.step)
        if self._activity == "step":
            self._book(min(told, max(began, self._frontier) + stall), "checkpoint_stall", 0)

    def _newest(self) -> int:
        """The incident that led to the present attempt."""
        return self.state.incidents[-1].id if self.state.incidents else 0

    def _launching(self) -> str:
        return "launch" if self.state.attempt <= 1 else "relaunch"

    def _planned_step(self, done: int) -> int:
        """The step that the ranks were told to go on from: that they have may be heard of after they have
        `done` steps."""
        plan = self.state.restore
        return min(plan.step, done) if plan is not None and plan.attempt == self._attempt else 0

    def _number(self, done: int) -> None:
        """The newest step of this attempt proves to be `done`."""
        for interval in reversed(self.timeline):
            if interval.attempt != self._attempt:
                break
            if interval.category == MAYBE_REWORK:
                interval.category = "rework" if done <= self._best else "step"
        self.steps.again += min(self._maybe, max(0, self._best - done + self._maybe))
        self.steps.maybe_again -= self._maybe
        self._step, self._numbered, self._maybe = done, True, 0
        self._best = max(self._best, done)

    def _steps_done(self, until: int, done: int, stall: int = 0) -> None:
        """All steps up to `done` had ended at `until`; between them training stood still for `stall`."""
        again = max(0, min(done, self._best) - self._step)
        number, repeated = done - self._step, "rework" if self._numbered else MAYBE_REWORK
        self.steps.done += max(0, number)
        if self._numbered:
            self.steps.again += again
        else:
            self.steps.maybe_again, self._maybe = self.steps.maybe_again + again, self._maybe + again
        if self._cut is not None and number > 0:
            self._cut_later(until, again, number, repeated)
        elif self._activity in BEFORE_FIRST_STEP:
            self._book(until, "warm_up")
            self._activity = "step"
        elif self._activity == "step" and number > 0:
            stood_still = max(self._frontier, min(until, self._now()))
            until = max(self._frontier, stood_still - stall)
            self._book(self._frontier + (until - self._frontier) * again // number, repeated, self._newest())
            self._book(until, "step", 0)
            self._book(stood_still, "checkpoint_stall", 0)
        elif self._activity == "step":
            self._book(self._frontier + stall, "checkpoint_stall", 0)
        self._step = max(self._step, done)
        self._best = max(self._best, done)

    def _cut_later(self, until: int, again: int, number: int, repeated: str) -> None:
        """Correct by a report that arrived after the failure: part of what seemed cut short had been done."""
        cut = self._cut
        assert cut is not None
        until = max(cut.start, min(until, cut.end))
        middle = cut.start + (until - cut.start) * again // number
        rest = replace(cut, start=until)
        parts = [
            replace(cut, end=middle, category=repeated),
            replace(cut, start=middle, end=until, category="step"),
            rest,
        ]
        place = next(i for i in reversed(range(len(self.timeline))) if self.timeline[i] is cut)
        self.timeline[place : place + 1] = [part for part in parts if part.us]
        self._cut = rest if rest.us else None

    def _incident_opened(self, fault: int, detected: int, incident: int, event: ev.Event) -> None:
        if self._activity == "step":
            self._book(fault, "rework", 0)
            last = self.timeline[-1]
            self._cut = last if last.category == "rework" and last.end == fault else None
        else:
            self._book(fault, self._activity)
        hung = isinstance(event, (ev.RanksHung, ev.Tick))
        self._book(detected, "hang" if hung else "detection", incident)
        self._activity = "diagnosis"

    def _follow(self, phase: Phase, attempt: int) -> None:
        """Enter what ended with a change from `phase` and `attempt` to the present ones."""
        state, now = self.state, self._now()
        if self._activity == "diagnosis" and state.phase is not Phase.STOPPING:
            self._book(now, "diagnosis", self._newest())
            self._activity, self._cut = "replacement", None
        if state.attempt != attempt:
            self._book(now, self._activity)
            self._attempt = state.attempt
            self._activity, self._step, self._numbered = self._launching(), 0, False
            self._base, self._maybe = None, 0
            self.first_launch = now if self.first_launch is None else self.first_launch
        elif (
            phase is Phase.LAUNCHING and state.phase is Phase.RUNNING and self._activity == self._launching()
        ):
            self._book(now, self._activity)
            self._activity = RANKS_UP
        if state.phase is Phase.SUCCEEDED and self._activity == RANKS_UP:
            self._book(now, "unknown")  # ranks that never reported a step did something
        elif state.ended and self._activity == "step":
            given_up = state.phase is Phase.CANCELLED and self._guess(now) == "unknown"
            self._book(now, "hang" if given_up else "shutdown", 0)
        elif state.ended or state.phase is Phase.REQUEUED:
            self._book(now, self._activity, self._newest())

    # Nodes.

    def _sweep(self, name: str, since: int, *, everything: bool) -> None:
        """Note what nodes do, `since` then; only `name` can have changed unless `everything` may have."""
        state, nodes, places = self.state, self.state.nodes, self.state.places
        starting, before = state.phase is Phase.STARTING, self._doing
        for node_name in nodes if everything else ((name,) if name in nodes else ()):
            if nodes[node_name].returned:
                continue
            what = "spare_idle"
            if nodes[node_name].role is Role.FAILED:
                what = "failed_node"
            elif starting or node_name in places:
                what = PLACED
            if before.get(node_name) != what:  # with thousands of nodes, almost none
                self._begin_stay(node_name, what, since)

    def _given_back(self) -> None:
        """End the stays of nodes whose small jobs are over."""
        for name in [name for name in self._doing if self.state.nodes[name].returned]:
            self.stays[name][-1].end = self._now()
            del self._doing[name]

    def _begin_stay(self, name: str, what: str, since: int) -> None:
        stays = self.stays.setdefault(name, [])
        if stays and stays[-1].end is None:
            stays[-1].end = since
        stays.append(Stay(since, None, what))
        self._doing[name] = what

    # Results.

    def account(self, now: float | None = None) -> Account:
        """Everything entered and, for a run that goes on, an estimate until `now` (None: its last event)."""
        end = max(self._now(), to_us(now) if now is not None else 0)
        timeline, waits = list(self.timeline), list(self.waits)
        stays = {name: tuple(list_) for name, list_ in self.stays.items()}
        if self.state.ended:
            end = self._frontier
        elif self._open:
            if end > self._frontier:
                timeline.append(Interval(self._frontier, end, self._guess(end), 0, self._attempt))
            for name, (*before, last) in stays.items():
                if last.end is None:
                    stays[name] = (*before, replace(last, end=end))
        elif end > self._frontier:
            what = "queue_wait" if self._never else "requeue_wait"
            waits.append(Interval(self._frontier, end, what, 0, self._attempt))
        asked = self.state.active + self.state.spares
        unseen = self.state.phase is Phase.SUCCEEDED and not self.state.stepped_first
        return Account(
            tuple(timeline), tuple(waits), asked, stays, self.first_launch, end, final=self.state.ended,
            paces=tuple(self.paces.kept), saved=tuple(self.saved.kept), findings=tuple(self.findings.kept),
            gpus=self.gpus, doubtful=DOUBTFUL if unseen else frozenset({MAYBE_REWORK}),
        )  # fmt: skip

    def _guess(self, end: int) -> str:
        if self._activity == RANKS_UP:
            return "warm_up"
        if self._activity != "step":
            return self._activity
        news_s = max(3 * self.state.step_s, 2 * pause_s(self.state, end / 1e6))
        if end - self._frontier > max(NEWS_LIMIT_US, to_us(news_s)):
            return "unknown"
        if self._step >= self._best:
            return "step"
        return "rework" if self._numbered else MAYBE_REWORK
