"""Keeps every node's newest heartbeat and asks the core who is silent, who hangs, how far the run is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from jurymast.core.hang import IDLE_FLOOR_S, HangLimits, HangVerdict, RankView, judge
from jurymast.core.heartbeat import BEATS, LIMIT_MAX_S, Arrivals, WatcherClock, rejoin_limit_s
from jurymast.core.messages import Beat, RankReport
from jurymast.core.settings import Settings
from jurymast.core.state import Phase, Role, RunState

WATCH_INTERVAL_S = 0.05
# While a run just runs: nobody waits for a closer look, and the ranks want the processors.
STEADY_INTERVAL_S = 0.1
# So much of the limit, and all others silent: none of them is lost, this node hears nothing.
ISOLATED = 0.6


@dataclass
class NodeWatch:
    """One node: when its heartbeats came (watcher's clock) and what its ranks last said. `quiet_s` is the
    shortest time since one that has not ended did something, as of `reported_at`; `stopped` that one is in
    state T; `longest_s` is the longest step."""

    arrivals: Arrivals
    connected: bool = True
    attempt: int = 0
    ranks: list[RankReport] = field(default_factory=list)
    reported_at: float = 0.0
    quiet_s: float = math.inf
    stopped: bool = False
    longest_s: float = 0.0
    _slowest: RankReport | None = None

    def report(self, beat: Beat, now: float) -> None:
        self.attempt, self.ranks, self.reported_at = beat.attempt, beat.ranks, now
        self.quiet_s = math.inf if beat.quiet_s is None else beat.quiet_s
        self.stopped, self.longest_s = beat.stopped, beat.longest_s
        self._slowest = None

    @property
    def slowest(self) -> RankReport:
        """What its rank that is least far last said. Asked for often, of thousands of nodes."""
        if self._slowest is None:
            self._slowest = min(self.ranks, key=_how_far)
        return self._slowest


@dataclass(frozen=True)
class Reach:
    """How far all ranks are: the slowest one's step, and how many seconds ago it ended."""

    step: int
    ago_s: float
    absolute: bool


class Watch:
    """All nodes. Times are the watcher clock's seconds."""

    def __init__(self, settings: Settings, real_now: float) -> None:
        self._settings = settings
        self.clock = WatcherClock(STEADY_INTERVAL_S, real_now)
        self.nodes: dict[str, NodeWatch] = {}
        self.longest_before_s = 0.0

    def expect(self, node: str, nodes: int, *, abandoned: bool = False) -> None:
        """A node that is known, and is to connect; so many may be on their way. `abandoned`: it most likely
        does not."""
        due_at = self.clock.now + rejoin_limit_s(nodes, abandoned=abandoned)
        arrivals = Arrivals(self._settings.heartbeat_s, due_at)
        self.nodes[node] = NodeWatch(arrivals, connected=False)

    def joined(self, node: str) -> None:
        self.nodes[node] = NodeWatch(Arrivals(self._settings.heartbeat_s, self.clock.now))

    def away(self) -> list[str]:
        """Known nodes that are to connect, and have time left for it."""
        return [name for name, watch in self.nodes.items() if not watch.connected]

    def forget(self, node: str) -> None:
        self.nodes.pop(node, None)

    def beat(self, node: str, beat: Beat) -> None:
        watch = self.nodes.get(node)
        if watch is None:
            return
        watch.arrivals.beat(self.clock.now)
        if beat.ranks or beat.attempt != watch.attempt:  # ranks that have ended stay where they were
            watch.report(beat, self.clock.now)

    def silent(self, state: RunState) -> list[tuple[str, float, float]]:
        """(node, seconds silent, limit) of each node silent beyond its limit. With a node that only starts
        nothing is lost yet, and its imports alone may keep a busy machine from beating for seconds."""
        found = []
        for name, watch in self._quiet(self._settings.node_lost_after_s).items():
            silent_s = watch.arrivals.silent_s(self.clock.now)
            limit_s = watch.arrivals.limit_s(self._settings.node_lost_after_s)
            if _only_starts(name, state):
                limit_s = max(limit_s, LIMIT_MAX_S)
            if silent_s > limit_s:
                found.append((name, silent_s, limit_s))
        return found

    def _quiet(self, fixed_s: float | None = None) -> dict[str, NodeWatch]:
        """Nodes that may be silent for too long: of thousands their own limits are not asked for at every
        look."""
        least_s = ISOLATED * (BEATS * self._settings.heartbeat_s if fixed_s is None else fixed_s)
        now = self.clock.now
        return {name: watch for name, watch in self.nodes.items() if now - watch.arrivals.last > least_s}

    def isolated(self, own: str) -> bool:
        """True when this node hears none of at least two others: then it is the one that is cut off."""
        quiet = self._quiet(self._settings.node_lost_after_s)
        others = [watch for name, watch in quiet.items() if name != own]
        if len(others) < len(self.nodes) - (own in self.nodes):
            return False
        limit_s = max((w.arrivals.limit_s(self._settings.node_lost_after_s) for w in others), default=0.0)
        return len(others) >= 2 and all(
            w.arrivals.silent_s(self.clock.now) > ISOLATED * limit_s for w in others
        )

    def _reports(self, state: RunState) -> list[tuple[NodeWatch, str, int, RankReport]]:
        """(watch, node, rank, report) of every rank of the attempt on a node that is not lost; [] until all
        those have reported."""
        reports = []
        for group_rank, name in enumerate(state.placement):
            watch = self.nodes.get(name)
            if watch is None:
                continue
            if watch.attempt != state.attempt or len(watch.ranks) != state.ranks_per_node:
                return []
            for local_rank, report in enumerate(watch.ranks):
                reports.append((watch, name, group_rank * state.ranks_per_node + local_rank, report))
        return reports

    def _moves(self, state: RunState) -> bool:
        """True when no rank is stopped and one has just done something: then there is no need to look at the
        ranks of thousands of nodes."""
        floor_s = IDLE_FLOOR_S if self._settings.hang_s is None else self._settings.hang_s
        placed = [self.nodes[name] for name in state.placement if name in self.nodes]
        return not any(watch.stopped for watch in placed) and any(
            watch.quiet_s + self.clock.now - watch.reported_at < floor_s for watch in placed
        )

    def hang(self, state: RunState) -> HangVerdict | None:
        if self._moves(state):
            return None
        views = []
        for watch, node, rank, report in self._reports(state):
            since_s = self.clock.now - watch.reported_at
            quiet_s = report.quiet_s
            if quiet_s is None:  # the script has not begun: since the launch
                quiet_s = state.now - (
                    state.incident.launched_at or state.now if state.incident else state.now
                )
            views.append(
                RankView(
                    rank, node, report.phase, report.beats, quiet_s + since_s, report.longest_s,
                    report.idle_s + since_s if report.idle_s else 0.0,
                    report.stopped_s + since_s if report.stopped_s else 0.0,
                )
            )  # fmt: skip
        if any(view.phase == "done" for view in views):
            # Some have ended: the others may well evaluate or save for long now, but not for ever.
            views = [replace(view, phase="saving") for view in views if view.phase != "done"]
        limits = HangLimits(self._settings.hang_s, self._settings.start_limit_s, state.hang_patience)
        return judge(views, limits, self.longest_before_s)

    def reach(self, state: RunState) -> Reach | None:
        """How far the attempt is; None until every rank has done a step in it."""
        placed = [self.nodes[name] for name in state.placement if name in self.nodes]
        for watch in placed:
            if watch.attempt != state.attempt or len(watch.ranks) != state.ranks_per_node:
                return None
            if watch.slowest.beats == 0:
                return None
        if not placed:
            return None
        watch = min(placed, key=lambda watch: _how_far(watch.slowest))
        slowest = watch.slowest
        ago_s = (slowest.beat_s or 0.0) + self.clock.now - watch.reported_at
        return Reach(slowest.step, ago_s, slowest.explicit)

    def attempt_over(self, state: RunState) -> None:
        """Remember what this attempt taught about step times."""
        watches = (self.nodes[name] for name in state.placement if name in self.nodes)
        seen = [watch.longest_s for watch in watches if watch.attempt == state.attempt]
        self.longest_before_s = max([self.longest_before_s, *seen])


def _how_far(report: RankReport) -> tuple[bool, int, float]:
    """Less for a rank that is less far: without a step, with fewer steps, longer ago."""
    return report.beats > 0, report.step, -(report.beat_s or 0.0)


def _only_starts(name: str, state: RunState) -> bool:
    node = state.nodes.get(name)
    warming = node is not None and node.role is Role.JOINING and name not in state.places
    return warming or state.phase is Phase.STARTING
