"""When a silent node is a lost node, computed from the arrival times of its heartbeats.

    limit = clamp(max(BEATS x heartbeat, FACTOR x longest recent gap), at most LIMIT_MAX_S)

A link or a machine that is merely busy shows longer gaps before it shows a very long one, and so raises its
own limit. Until some gaps were seen, the limit has twice as many beats. Times are seconds on the watcher's
own clock, which stands still while the watcher does (see `WatcherClock`), so that a busy supervisor blames no
node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jurymast.core.messages import RankReport

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
