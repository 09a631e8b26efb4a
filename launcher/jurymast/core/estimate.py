"""An estimate of the goodput of a job that jurymast did not launch: from Slurm's accounting, which knows when
each attempt had its nodes and when its steps ran, and from the step lines of its log.

Time is booked as a step only where two step lines, not far apart, enclose it. What neither source tells is
`unknown`: it may have counted, so that the ratios are ranges. As in `core.goodput` all is in whole
microseconds, and the sums are exact. Slurm's accounting tells times in whole seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from jurymast.core.goodput import DOUBTFUL, MAYBE_REWORK, PLACED, Account, Interval, Stay, StepCounts, to_us
from jurymast.core.judges.step_lines import StepLog, times_of
from jurymast.core.state.incident import CAUSES, Incident

COMPLETED = "COMPLETED"
# Slurm's states, as causes of incidents; any other end was ordered, as far as Slurm says.
_CAUSES = {
    "NODE_FAIL": "node_lost", "BOOT_FAIL": "node_lost", "PREEMPTED": "preempted", "FAILED": "worker_exit",
    "OUT_OF_MEMORY": "out_of_memory",
}  # fmt: skip
ORDERED = "job_ended"
# Exit codes of what a SIGKILL ended, and of a shell that tells of one.
_KILLED = frozenset({"0:9", "137:0"})
# Ends after which the last steps that were not printed cannot be told from a wait; in others nobody waited.
_HUNG = frozenset({"CANCELLED", "TIMEOUT", "DEADLINE"})
# Slurm tells whole seconds, so a line may be so much outside of its attempt.
SLACK_US = 2_000_000
# Other ranks may print so many lines until they, too, have ended.
LAST_LINES = 3
# Steps that take longer than the median by more than so many median deviations hold something else.
DEVIATIONS = 3


@dataclass(frozen=True)
class AccountedAttempt:
    """One life of a job in Slurm's accounting. Times in seconds since the epoch, None for one that has not
    come. `steps`: (start, end) of its steps; where there are none, the batch script itself may have
    trained. `failed_step`: the exit code of the newest one if that failed, as before a script requeues its
    own job."""

    state: str
    nodes: tuple[str, ...]
    eligible: float | None
    start: float | None
    end: float | None
    steps: tuple[tuple[float, float | None], ...] = ()
    exit_code: str = ""
    failed_node: str = ""
    failed_step: str = ""

    @property
    def cause(self) -> str:
        """The cause of the incident with which it ended."""
        found = "worker_exit" if self.failed_step and self.state not in _CAUSES else _CAUSES.get(self.state)
        killed = found == "worker_exit" and (self.failed_step or self.exit_code) in _KILLED
        return "worker_killed" if killed else found or ORDERED


@dataclass
class Estimate:
    """`step_s`: the usual time of a step, `line_s` that between two lines, 0 if no lines tell it. The first
    line tells of steps that followed step `origin`. `numbered`: the steps' numbers are those of the whole
    training."""

    account: Account
    incidents: list[Incident]
    steps: StepCounts
    best_step: int
    lines_used: int
    went_back: int  # how often the log of one attempt goes back to an earlier step
    step_s: float
    line_s: float
    origin: int
    numbered: bool


@dataclass(frozen=True)
class _Pace:
    """Usual microseconds of a step, at most `slow_us`, and steps between two lines; zeros if no two lines
    tell."""

    step_us: int = 0
    slow_us: int = 0
    spacing: int = 0

    @property
    def line_us(self) -> int:
        return self.step_us * self.spacing


def estimate(
    attempts: Sequence[AccountedAttempt], log: StepLog, written_at: float | None, now: float
) -> Estimate:
    """Estimate where the time of a job went. `attempts` in their order, at least one; `written_at`: when the
    log was last written to."""
    book = _Book(attempts, log, written_at, to_us(now))
    for number in range(len(book.attempts)):
        book.enter(number)
    return book.result()


@dataclass
class _Book:
    attempts: Sequence[AccountedAttempt]
    log: StepLog
    written_at: float | None
    now: int
    timeline: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    stays: dict[str, list[Stay]] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    counts: StepCounts = field(default_factory=StepCounts)
    best: int = 0
    used: int = 0
    went_back: int = 0
    frontier: int | None = None
    incident: int = 0  # that led to the present attempt
    number: int = 0
    origin: int | None = None
    first_launch: int | None = None

    def __post_init__(self) -> None:
        """Give each step line to its attempt: of several at one time the last one."""
        self.lines: list[list[tuple[int, int]]] = [[] for _ in self.attempts]
        self._extents = [
            None if one.start is None else (to_us(one.start), self._end_of(one)) for one in self.attempts
        ]
        for at_s, step in times_of(self.log, self.written_at):
            at = to_us(at_s)
            # Of two attempts close to each other, the one in which it lies.
            owner = self._owner(at, 0)
            owner = self._owner(at, SLACK_US) if owner is None else owner
            if owner is None:
                continue
            start, end = self._extents[owner] or (at, at)
            at, lines = min(max(at, start), end), self.lines[owner]
            if lines and at == lines[-1][0]:
                lines[-1] = (at, max(step, lines[-1][1]))
            elif not lines or at > lines[-1][0]:
                lines.append((at, step))
        self.pace = _pace(self.lines)

    def _owner(self, at: int, slack: int) -> int | None:
        """The number of the attempt that has this time, or misses it by less than `slack`."""
        for number, extent in enumerate(self._extents):
            if extent is not None and extent[0] - slack <= at < extent[1] + slack:
                return number
        return None

    def _end_of(self, attempt: AccountedAttempt) -> int:
        return self.now if attempt.end is None else to_us(attempt.end)

    # One attempt.

    def enter(self, number: int) -> None:
        attempt = self.attempts[number]
        self.number = number + 1
        began = self.now if attempt.start is None else to_us(attempt.start)
        if self.frontier is None:
            self.frontier = min(began, began if attempt.eligible is None else to_us(attempt.eligible))
        began = max(began, self.frontier)
        what = "queue_wait" if number == 0 else "requeue_wait"
        self._add(self.waits, began, what, self.incident)
        if attempt.start is None:
            return
        end = max(began, self._end_of(attempt))
        if self.first_launch is None:
            self.first_launch = began
        for node in attempt.nodes:
            self.stays.setdefault(node, []).append(Stay(began, end, PLACED))
        lines = [(at, step) for at, step in self.lines[number] if began <= at <= end]
        self.used += len(lines)
        spans = [
            (max(began, to_us(a)), end if b is None else min(end, to_us(b))) for a, b in attempt.steps
        ] or [(began, end)]
        last = number == len(self.attempts) - 1
        went_well = attempt.end is None or attempt.state == COMPLETED
        failed = not went_well and not (last and attempt.state not in _CAUSES)
        incident = len(self.incidents) + 1 if failed else 0
        if lines and self.pace.spacing:
            self._with_lines(attempt, lines, min(spans)[0], end, incident)
        else:
            self._without_lines(spans)
        self._book(end, "shutdown")
        if failed:
            self._open(attempt, lines, end, last=last)
        self.incident = incident

    def _launch(self) -> str:
        return "launch" if self.number == 1 else "relaunch"

    def _without_lines(self, spans: Sequence[tuple[int, int]]) -> None:
        for start, end in sorted(spans):
            self._book(start, self._launch(), self.incident)
            self._book(end, "unknown")

    def _with_lines(
        self,
        attempt: AccountedAttempt,
        lines: Sequence[tuple[int, int]],
        steps_began: int,
        end: int,
        incident: int,
    ) -> None:
        first_at, first = lines[0]
        if self.incidents and self.incident and first <= self.best:
            self.incidents[-1].step_restored = max(0, first - self.pace.spacing)
        self._book(min(steps_began, first_at), self._launch(), self.incident)
        self._before(first_at, first, "warm_up")
        newest = first
        new = min(first, self.pace.spacing)
        self.origin = first - new if self.origin is None else self.origin
        self._reach(first, new)
        for at, step in lines[1:]:
            if step > newest:
                self._between(at, step - newest, step)
                newest = step
            elif newest - step > self.pace.spacing:  # the script began again by itself
                self.went_back += 1
                self._before(at, step, "relaunch")
                newest = step
        last = lines[-1][0]
        self._book(last, "unknown")  # lines of an order that nothing explains
        if attempt.end is None:
            self._book(end, "unknown")
            return
        self._book(min(end, last + self.pace.line_us), "unknown")
        if attempt.state == COMPLETED:
            self._book(end, "shutdown")
        else:
            self._book(end, "hang" if attempt.state in _HUNG else "detection", incident)

    def _before(self, at: int, step: int, what: str) -> None:
        """Until the first line of a training that begins at `step`: of the steps that lead from one line to
        the next, those that are new may have counted."""
        new, step_us = self.pace.spacing, self.pace.step_us
        self._book(at - new * step_us, what, self.incident)
        if self.log.numbered or self.number == 1:
            again = max(0, new - max(0, step - self.best))
            self.counts.again += again
            new -= again
            self._book(at - new * step_us, "rework", self.incident)
        self._book(at, "unknown")

    def _between(self, at: int, number: int, step: int) -> None:
        """`number` steps up to `step` were done since the line that told of the step before them."""
        began = self._reached
        usual = at - began <= number * self.pace.slow_us
        until = at if usual else min(at, began + number * self.pace.step_us)
        again = max(0, min(step, self.best) - (step - number))
        middle = began + (until - began) * again // number
        if self.log.numbered or self.number == 1:
            self._book(middle, "rework", self.incident)
            self.counts.again += again
        else:
            self._book(middle, MAYBE_REWORK)
            self.counts.maybe_again += again
        if self.incident and again and step >= self.best and self.log.numbered:
            self.incidents[-1].recovered_at = middle / 1e6
        self._book(until, "step")
        self._book(at, "unknown")
        self._reach(step, number)

    def _reach(self, step: int, number: int) -> None:
        self.counts.done += max(0, number)
        self.best = max(self.best, step)

    def _open(
        self, attempt: AccountedAttempt, lines: Sequence[tuple[int, int]], end: int, *, last: bool
    ) -> None:
        """The incident with which the attempt ended."""
        cause, told = attempt.cause, attempt.failed_step or attempt.exit_code
        if cause == "worker_exit" and any(step in self.log.killed for _, step in lines[-LAST_LINES:]):
            cause = "worker_killed"
        code = f", exit code {told}" if told not in ("", "0:0") else ""
        fault = min(end, lines[-1][0] + self.pace.line_us) if lines else end
        found = Incident(
            len(self.incidents) + 1, fault / 1e6, end / 1e6, self.number, lines[-1][1] if lines else 0,
            cause=cause, charged=CAUSES[cause].charged, node=attempt.failed_node,
            evidence=f"Slurm's accounting: {attempt.state}{code}", action="stop" if last else "requeue",
            numbered=self.log.numbered, rework_known=bool(lines) and self.log.numbered,
            ended_at=end / 1e6,
        )  # fmt: skip
        if not last and (after := self.attempts[self.number]).start is not None:
            found.launched_at = after.start
            later = self.lines[self.number]
            first = max(to_us(after.start), later[0][0] - self.pace.line_us) if later else None
            found.started_at = None if first is None else first / 1e6
        self.incidents.append(found)

    # Intervals.

    @property
    def _reached(self) -> int:
        assert self.frontier is not None
        return self.frontier

    def _book(self, until: int, category: str, incident: int = 0) -> None:
        self._add(self.timeline, until, category, incident)

    def _add(self, to: list[Interval], until: int, category: str, incident: int) -> None:
        start = self._reached
        if until <= start:
            return
        last = to[-1] if to else None
        same = (start, category, incident, self.number)
        if last is not None and (last.end, last.category, last.incident, last.attempt) == same:
            last.end = until
        else:
            to.append(Interval(start, until, category, incident, self.number))
        self.frontier = until

    def result(self) -> Estimate:
        last = self.attempts[-1]
        account = Account(
            tuple(self.timeline), tuple(self.waits), max(len(one.nodes) for one in self.attempts),
            {name: tuple(stays) for name, stays in self.stays.items()}, self.first_launch, self._reached,
            final=last.end is not None, doubtful=DOUBTFUL,
        )  # fmt: skip
        return Estimate(
            account, self.incidents, self.counts, self.best, self.used, self.went_back,
            self.pace.step_us / 1e6, self.pace.line_us / 1e6, self.origin or 0, self.log.numbered,
        )  # fmt: skip


def _pace(lines: Sequence[Sequence[tuple[int, int]]]) -> _Pace:
    forward = list(_forward(lines))
    if not forward:
        return _Pace()
    each = [us / steps for us, steps in forward]
    usual = median(each)
    slow = usual + DEVIATIONS * median(abs(us - usual) for us in each)
    return _Pace(round(usual), math.ceil(slow), round(median(steps for _, steps in forward)))


def _forward(lines: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """(microseconds, steps) from each line to the next one."""
    for of_one in lines:
        for (before, step), (at, later) in pairwise(of_one):
            if later > step:
                yield at - before, later - step


def without_overlap(attempts: Sequence[AccountedAttempt]) -> list[AccountedAttempt]:
    """The attempts in the order of their starts, those that wait last; each ends before the next begins."""
    ordered = sorted(attempts, key=lambda one: (one.start is None, one.start or 0.0))
    ended = []
    for one, later in zip(ordered, [*ordered[1:], None], strict=True):
        begins = later.start if later is not None else None
        end = begins if one.end is None else one.end if begins is None else min(one.end, begins)
        ended.append(replace(one, end=end))
    return ended
