"""Two questions about silence: is a silent node lost, and do silent ranks hang?

Whether a silent node is lost follows from the arrival times of its heartbeats:

    limit = clamp(max(BEATS x heartbeat, FACTOR x longest recent gap), at most LIMIT_MAX_S)

A link or a machine that is merely busy shows longer gaps before it shows a very long one, and so raises its
own limit. Until some gaps were seen, the limit has twice as many beats. Times are seconds on the watcher's
own clock, which stands still while the watcher does (see `WatcherClock`), so that a busy supervisor blames no
node.

Whether the ranks hang follows from what each of them reported last, and from the run's own step times.

Training is synchronous: one stuck rank stops all within a step, so the run hangs only if *no* rank steps. How
long is too long follows from the longest gap between steps seen so far (`longest`):

    every rank idle (a collective that waits, a deadlock):    2 x longest + IDLE_FLOOR_S
    some rank busy (an evaluation, a compilation, a spin):    3 x longest + BUSY_FLOOR_S

Silence alone proves nothing: a script may evaluate, upload or wait for a process of its own for the first
time, and a needless restart would cost more than any time-out saves. So from then on the ranks' stacks are
read again and again. The ranks hang if none of them moves: for `WAITING_S` if all are idle in collectives (no
rank is left to wake them), for `SPINNING_S` if they are busy there, otherwise for `UNMOVED_S`. But if some
wait for one that stands in the script's own code, or loads data, that may be right, and torch's own time-out
is left to end it.

Before the first step there is no scale, and one rank may prepare something for the others. So stacks are read
after `START_IDLE_S` in which no rank used its processor (`START_BUSY_S` if one did), and ranks count as
hanging only after `START_WAITING_S` in collectives, or `START_UNMOVED_S` in the script's own code. A rank
whose data loader waits for a process that is stopped or gone hangs after `BLOCKED_S` at any time.

A process that somebody stopped (state T) needs no calibration, and a limit set by the policy needs no look at
stacks. Times in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jurymast.core.judges.stacks import BLOCKED, CODE, LOADER, WAITING, Place, absent, describe
from jurymast.core.state.evidence import RankPlace
from jurymast.core.state.messages import RankReport
from jurymast.core.state.within import TORCH_LIMIT_S

# ---- whether a node is lost

BEATS = 3.0
UNKNOWN_BEATS = 6.0
KNOWN_AFTER = 6  # gaps
FACTOR = 2.5
LIMIT_MAX_S = 15.0
# How often a heartbeat is answered, so that agents know that a supervisor is there.
ANSWER_INTERVAL_S = 0.5
# An agent that hears nothing waits this much longer than three answers take, in seconds.
LOYAL_S = 1.5
# How often ranks that have done fewer steps are examined.
YOUNG_BEATS = 3
YOUNG_HEARTBEAT_S = 0.1
YOUNG_BEATS_A_SECOND = 5000.0
# This many nodes per second can join a supervisor again after a take-over.
NODES_A_SECOND = 2000.0
LATE_TIMES = 4.0
# How long agents look for a supervisor that has just taken over; how many join per second.
REJOIN_LIMIT_S = 6.5
REJOINS_A_SECOND = 400.0
MEMORY = 240  # gaps remembered: two minutes at the default heartbeat


@dataclass
class Arrivals:
    """The heartbeats of one node. `last` is the time of the newest."""

    heartbeat_s: float
    last: float
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def beat(self, now: float) -> None:
        self.gaps.append(max(0.0, now - self.last))
        self.last = now

    def limit_s(self, fixed_s: float | None = None) -> float:
        """Return the silence that means lost, in seconds; `fixed_s` is the policy's own value, if it has
        one."""
        if fixed_s is not None:
            return fixed_s
        longest = max(self.gaps, default=0.0)
        beats = BEATS if len(self.gaps) >= KNOWN_AFTER else UNKNOWN_BEATS
        return min(LIMIT_MAX_S, max(beats * self.heartbeat_s, FACTOR * longest))


def steady_limit_s(heartbeat_s: float, fixed_s: float | None = None) -> float:
    """Return the limit for a node whose heartbeats have all come on time, in seconds; `fixed_s` as in
    `limit_s`."""
    return Arrivals(heartbeat_s, 0.0, deque([heartbeat_s] * KNOWN_AFTER)).limit_s(fixed_s)


def rejoin_limit_s(nodes: int, limit_s: float = REJOIN_LIMIT_S) -> float:
    """Return the seconds that the agents of this many nodes have to join, where a single one has `limit_s`.
    By default that is the time to find a supervisor that has just taken over, plus the limit of a node of
    which nothing is known."""
    return limit_s + nodes / REJOINS_A_SECOND


def beat_every_s(heartbeat_s: float, ranks: Sequence[RankReport], nodes: int) -> float:
    """Return the seconds between two heartbeats of an agent in a run of this many nodes. Before the first
    steps ranks are watched more closely, unless there are thousands, because the first step ends an
    incident."""
    young = bool(ranks) and min(rank.beats for rank in ranks) < YOUNG_BEATS
    return min(max(YOUNG_HEARTBEAT_S, nodes / YOUNG_BEATS_A_SECOND), heartbeat_s) if young else heartbeat_s


def answer_every_s(heartbeat_s: float, nodes: int) -> float:
    """Return the seconds between two answers to the heartbeats of one node: thousands are answered less
    often."""
    return max(ANSWER_INTERVAL_S, heartbeat_s) + nodes / NODES_A_SECOND / BEATS


def patience_s(heartbeat_s: float, nodes: int, late_s: float = 0.0) -> float:
    """Return how long an agent waits for its supervisor before it hangs up, in seconds: three answers, each
    to a heartbeat, and a little more. It is longer for more nodes, and if the supervisor was `late_s` late,
    but then no longer than a successor would wait for the agent."""
    answers_s = BEATS * answer_every_s(heartbeat_s, nodes) + LOYAL_S
    return max(answers_s, min(answers_s + LATE_TIMES * late_s, rejoin_limit_s(nodes)))


class WatcherClock:
    """Counts only the time during which the watcher itself was awake.

    `tick` is called about every `interval_s`. A longer pause (the watcher was descheduled or stopped)
    advances the clock by only two intervals, because heartbeats that wait in its sockets must not look late.
    """

    def __init__(self, interval_s: float, real_now: float) -> None:
        self._interval_s = interval_s
        self._real = real_now
        self.now = 0.0

    def tick(self, real_now: float) -> float:
        """Advance to the real time `real_now`; returns how long the watcher overslept, in seconds."""
        passed = max(0.0, real_now - self._real)
        self.now, self._real = self.at(real_now), real_now
        return max(0.0, passed - 2 * self._interval_s)

    def at(self, real_now: float) -> float:
        """Return what a tick now would set the clock to."""
        return self.now + min(max(0.0, real_now - self._real), 2 * self._interval_s)


# A loop that stood still for this long is reported.
TOLD_S = 2.0
# How late it was counts half after a minute or two.
KEPT, MOST_S = 0.999, 5.0


class Lateness:
    """How late the supervisor is. Each agent has `patience_s` seconds of patience, and its heartbeats are
    answered every `answer_every_s` seconds."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._late_s = 0.0
        self.overslept(0.0, 0)

    def overslept(self, seconds: float, agents: int) -> str:
        """The loop was late by this much at its newest tick, with this many agents. Returns a note if that is
        worth one, or ""."""
        self._late_s = min(MOST_S, max(seconds, KEPT * self._late_s))
        self.patience_s = round(patience_s(self._heartbeat_s, agents, self._late_s), 1)
        self.answer_every_s = answer_every_s(self._heartbeat_s, agents)
        if seconds <= TOLD_S:
            return ""
        return f"the supervisor paused for {seconds:.1f} s: no node is blamed for that time"


# ---- whether ranks hang

FROZEN_S = 1.0
WAITING_S = 1.0
SPINNING_S = 30.0
UNMOVED_S = 120.0
# A rank that stands in the script's own code while others wait for it may rightly wait for a service, or for
# data. torch ends such a wait by its time-out, 30 min at most unless the script gives a longer one; so it is
# not ended here before that.
AFTER_TORCH_S = 60.0
START_IDLE_S = 20.0
START_BUSY_S = 300.0
START_WAITING_S = 10.0
START_UNMOVED_S = 300.0
BLOCKED_S = 10.0
# Between looks: soon, to see whether all waiting ranks still wait; otherwise rarely, as an evaluation may
# last for hours.
LOOK_AGAIN_S = 1.0
LOOK_SELDOM_S = 5.0
IDLE_FLOOR_S = 5.0
BUSY_FLOOR_S = 30.0
SAVE_FLOOR_S = 600.0
IDLE_SHARE = 0.05  # of one core
# More than this, read and written between two looks, is progress: a rank's processes always poll a little.
BUSY_BYTES = 256 * 1024


@dataclass(frozen=True)
class RankView:
    """One rank now. `quiet_s`: time since its last beat or change of phase; `stopped_s`: time in state T;
    `idle_s`: for how long its process has used less than `IDLE_SHARE` of a core."""

    rank: int
    node: str
    phase: str
    beats: int
    quiet_s: float
    longest_s: float
    idle_s: float
    stopped_s: float


@dataclass(frozen=True)
class HangVerdict:
    """`certain`: no look at the ranks' stacks is needed. `idle`: no rank uses its processor. `starting`: some
    rank has not done a step yet."""

    ranks: tuple[int, ...]
    node: str
    silent_s: float
    limit_s: float
    evidence: str
    certain: bool = False
    idle: bool = False
    starting: bool = False


@dataclass(frozen=True)
class HangLimits:
    """`fixed_s`: the policy's own limit (None: calibrate, 0: off). `patience` grows after a false alarm."""

    fixed_s: float | None
    start_s: float
    patience: float = 1.0


def judge(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float = 0.0) -> HangVerdict | None:
    """Return the verdict on a run whose ranks all live, or None. `longest_before_s`: from earlier
    attempts."""
    if not ranks or limits.fixed_s == 0:
        return None
    stopped = [view for view in ranks if view.stopped_s >= FROZEN_S * limits.patience]
    if stopped:
        return _stopped_verdict(stopped, FROZEN_S * limits.patience)
    quiet_s = min(view.quiet_s for view in ranks)
    limit_s, why = _limit(ranks, limits, longest_before_s)
    if quiet_s <= limit_s:
        return None
    evidence = f"no rank stepped for {quiet_s:.1f} s; {why}"
    certain, starting = limit_s == limits.fixed_s, _before_first_step(ranks)
    return HangVerdict(
        (), "", quiet_s, limit_s, evidence, certain=certain, idle=_all_idle(ranks), starting=starting
    )


def _stopped_verdict(stopped: list[RankView], limit_s: float) -> HangVerdict:
    names = ", ".join(f"rank {view.rank} on {view.node}" for view in stopped)
    nodes = {view.node for view in stopped}
    silent_s = max(max(view.stopped_s, view.quiet_s) for view in stopped)
    return HangVerdict(
        tuple(view.rank for view in stopped),
        nodes.pop() if len(nodes) == 1 else "",
        silent_s,
        limit_s,
        f"stopped by a signal (process state T): {names}",
        certain=True,
    )


def _limit(ranks: Sequence[RankView], limits: HangLimits, longest_before_s: float) -> tuple[float, str]:
    if _before_first_step(ranks):
        return _start_limit(ranks, limits)
    if limits.fixed_s is not None:
        return limits.fixed_s, f"the policy's limit is {limits.fixed_s:g} s"
    longest_s = max(longest_before_s, *(view.longest_s for view in ranks))
    if any(view.phase == "saving" for view in ranks):
        limit_s = (SAVE_FLOOR_S + 3 * longest_s) * limits.patience
        return limit_s, f"limit {limit_s:.0f} s while a checkpoint is being saved"
    if _all_idle(ranks):
        limit_s = (IDLE_FLOOR_S + 2 * longest_s) * limits.patience
        return limit_s, f"all ranks idle, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"
    limit_s = (BUSY_FLOOR_S + 3 * longest_s) * limits.patience
    return limit_s, f"ranks busy, limit {limit_s:.1f} s (longest step so far {longest_s:.2f} s)"


def _before_first_step(ranks: Sequence[RankView]) -> bool:
    return any(view.phase in ("starting", "restoring") or view.beats == 0 for view in ranks)


def _start_limit(ranks: Sequence[RankView], limits: HangLimits) -> tuple[float, str]:
    limit_s, why = limits.start_s * limits.patience, "until the first step"
    if all(view.phase not in ("restoring", "saving") for view in ranks):
        idle = all(view.idle_s >= START_IDLE_S / 2 for view in ranks)
        floor_s = (START_IDLE_S if idle else START_BUSY_S) * limits.patience
        if floor_s < limit_s:
            limit_s, why = floor_s, f"{why} with {'all ranks idle' if idle else 'ranks busy'}"
    return limit_s, f"limit {limit_s:.0f} s {why}"


def _all_idle(ranks: Sequence[RankView]) -> bool:
    return all(view.idle_s >= IDLE_FLOOR_S / 2 for view in ranks)


def works(passed_s: float, cpu_s: float, size: int) -> bool:
    """Return whether a rank and the processes it has started did something in `passed_s`: they used `cpu_s`
    seconds of processors, and read and wrote `size` bytes."""
    return cpu_s > IDLE_SHARE * passed_s or size > BUSY_BYTES


@dataclass
class SilentRanks:
    """Where the ranks were at each look at a silent run. `time_out_s`: torch's, for a wait for others."""

    time_out_s: float = TORCH_LIMIT_S
    stands: dict[int, RankPlace] = field(default_factory=dict)
    since_s: float = 0.0  # the first look that found them as they are now
    until_s: float = 0.0

    def add(self, at_s: float, stands: Mapping[int, RankPlace]) -> None:
        if stands != self.stands:
            self.stands, self.since_s = dict(stands), at_s
        self.until_s = at_s

    def interval_s(self) -> float:
        """Return the seconds until the next look."""
        soon = self._all_wait() or any(stand.kind == BLOCKED for stand in self.stands.values())
        return LOOK_AGAIN_S if soon else LOOK_SELDOM_S

    def stuck(self, patience: float, *, idle: bool, starting: bool = False) -> bool:
        """Whether no rank has moved for long enough."""
        return bool(self.stands) and self.until_s - self.since_s >= self._limit_s(patience, idle, starting)

    def _limit_s(self, patience: float, idle: bool, starting: bool) -> float:
        kinds = {stand.kind for stand in self.stands.values()}
        if BLOCKED in kinds:
            return BLOCKED_S * patience
        if self._all_wait():
            wait_s = START_WAITING_S if starting else WAITING_S
            return wait_s if idle else max(wait_s, SPINNING_S * patience)
        if kinds & set(WAITING) and kinds & {CODE, LOADER}:
            return self.time_out_s + AFTER_TORCH_S
        return (START_UNMOVED_S if starting and CODE in kinds else UNMOVED_S) * patience

    def places(self) -> str:
        """Where the ranks are, for people; "" before the first look."""
        return describe(self._places())

    def late(self) -> tuple[int, ...]:
        """The ranks for which the others wait; () if it cannot be told."""
        return absent(self._places())

    def _places(self) -> dict[int, Place]:
        return {rank: Place(at.kind, at.text or at.kind) for rank, at in self.stands.items()}

    def left_s(self, patience: float, *, idle: bool, starting: bool, now_s: float) -> float:
        """Return the seconds until the ranks count as hanging, if none moves."""
        return max(0.0, self.since_s + self._limit_s(patience, idle, starting) - now_s)

    def evidence(self) -> str:
        what = "all ranks waited for each other" if self._all_wait() else "no rank moved"
        return f"{what} for {self.until_s - self.since_s:.1f} s"

    def _all_wait(self) -> bool:
        return all(stand.kind in WAITING for stand in self.stands.values())
