"""Whether one rank is slower than the others, and whether a swap is worth it, decided from the parts of their
steps.

A rank's own part of a step is forward + update; in backward it waits for the others (see `worker.hooks`). A
rank is slow in a window of steps if its own part is

- `factor` times the typical one, the median over the ranks of all other nodes, and
- beyond it by `SIGMAS` of their spread (median absolute deviation times 1.4826, the normal distribution's; at
  least `SPREAD_FLOOR` of the median), and
- waited for: the others are in backward longer than it is, by at least half of its excess.

Only the slowest rank is examined, and its cost is measured against the next slowest node: of two equally slow
nodes neither is blamed, and no node is if all are slow. The last condition makes a comparison of only two
nodes possible, and spares a rank whose delay costs nobody time: hidden behind a GPU's work, or waited for
elsewhere.

Scripts make some ranks slower by design: rank 0 logs and evaluates, the first and the last stage of a
pipeline have more to do. No other rank has an equal place, so the ranks of the first and of the last node are
compared with their own past: they are slow only if they once were not, on this node or on another. And a rank
that was slow on an earlier node as well is slow by design: that acquits both nodes.

A rank that is slow in `WINDOWS` windows in a row is reported, and again each time that count has doubled. A
window has at least `WINDOW_STEPS` steps and lasts at least `WINDOW_S`, so one rank's long evaluation is in
one window only. Its node is swapped if that gains more than it costs:

    gain = lost / step x horizon        of the time until the next failure, which restarts all ranks anyway
    cost = restart + rework             the run's own mean restart, and the steps since the last save

Times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from jurymast.core.judges import blame
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Effect, Record, SaveFirst
from jurymast.core.state.events import Straggling
from jurymast.core.state.messages import Beat, Times
from jurymast.core.state.run import Phase, Role, RunState, expected_mtbf_s

WINDOW_S = 10.0
WINDOW_STEPS = 20
WINDOWS = 3
SIGMAS = 4.0
NORMAL = 1.4826
SPREAD_FLOOR = 0.05
# A swap must pay within the time until the next failure, but not only after hours.
HORIZON_MAX_S = 3600.0
# Until the run has had a restart of its own to go by.
RESTART_S = 60.0
# The assumed rework of scripts that save by themselves.
UNKNOWN_REWORK_S = 1800.0


@dataclass(frozen=True)
class Mean:
    """The mean step of one rank in a window: its own part, and backward."""

    rank: int
    node: str
    own_s: float
    backward_s: float


@dataclass(frozen=True)
class Slow:
    """The slowest rank: `slowness` is `own_s` over `typical_s`, `lost_s` what all ranks lose to it in a step
    of `step_s`; `ranks` are the slow ones of its node."""

    rank: int
    node: str
    ranks: tuple[int, ...]
    slowness: float
    own_s: float
    typical_s: float
    lost_s: float
    step_s: float


def slowest(means: Iterable[Mean], factor: float) -> Slow | None:
    """Return the rank that is slow in this window, if one is. A single node cannot be compared."""
    ranks = list(means)
    worst = max(ranks, key=lambda mean: mean.own_s)
    others = [mean for mean in ranks if mean.node != worst.node]
    if not others:
        return None
    own = [mean.own_s for mean in others]
    typical_s = median(own)
    spread_s = max(SPREAD_FLOOR * typical_s, NORMAL * median(abs(own_s - typical_s) for own_s in own))
    bound_s = max(factor * typical_s, typical_s + SIGMAS * spread_s)
    excess_s = worst.own_s - typical_s
    waited_s = median(mean.backward_s for mean in others) - worst.backward_s
    lost_s = min(worst.own_s - max(own), waited_s)
    if worst.own_s < bound_s or lost_s < excess_s / 2 or typical_s <= 0.0:
        return None
    return Slow(
        worst.rank,
        worst.node,
        tuple(mean.rank for mean in ranks if mean.node == worst.node and mean.own_s >= bound_s),
        worst.own_s / typical_s,
        worst.own_s,
        typical_s,
        lost_s,
        worst.own_s + worst.backward_s,
    )


class Windows:
    """The windows of one attempt with this many `ranks`; `report` takes their times as they arrive.
    `ordinary`: ranks that were not slow in some window of the run, of this attempt or an earlier one."""

    def __init__(self, ranks: int, factor: float, ordinary: set[int] | None = None) -> None:
        self._ordinary = set() if ordinary is None else ordinary
        self._factor = factor
        self._ranks = ranks
        self._base: dict[int, Times] = {}
        self._newest: dict[int, tuple[str, Times]] = {}
        self._full: set[int] = set()
        # In the newest windows in a row, on one node, with how many seconds each window lasted.
        self._slow: list[tuple[Slow, float]] = []

    def report(self, rank: int, node: str, timed: Times) -> tuple[Slow, float] | None:
        """Return who is slow and should be reported, with the least slowness measured, and over how many
        seconds."""
        base = self._base.setdefault(rank, timed)
        self._newest[rank] = (node, timed)
        if timed.steps >= base.steps + WINDOW_STEPS and timed.all_s >= base.all_s + WINDOW_S:
            self._full.add(rank)
        if len(self._full) < self._ranks:
            return None
        return self._judge()

    def _judge(self) -> tuple[Slow, float] | None:
        slow = slowest((self._mean(rank) for rank in self._newest), self._factor)
        lasted_s = min(timed.all_s - self._base[rank].all_s for rank, (_, timed) in self._newest.items())
        self._base = {rank: timed for rank, (_, timed) in self._newest.items()}
        self._full = set()
        self._ordinary |= self._newest.keys() - set(slow.ranks if slow is not None else ())
        if slow is None or self._by_design(slow):
            self._slow = []
            return None
        same = [window for window in self._slow if window[0].node == slow.node]
        self._slow = [*same, (slow, lasted_s)]
        times, rest = divmod(len(self._slow), WINDOWS)
        if rest or times & (times - 1):
            return None
        least = min((window for window, _ in self._slow[-WINDOWS:]), key=lambda window: window.lost_s)
        return least, sum(lasted_s for _, lasted_s in self._slow)

    def _by_design(self, slow: Slow) -> bool:
        """Whether no other ranks have an equal place, and these have been slow in every window so far."""
        here = [rank for rank, (node, _) in self._newest.items() if node == slow.node]
        at_an_end = min(here) == 0 or max(here) == self._ranks - 1
        return at_an_end and not self._ordinary & set(slow.ranks)

    def _mean(self, rank: int) -> Mean:
        node, timed = self._newest[rank]
        base = self._base[rank]
        steps = timed.steps - base.steps
        own_s = timed.forward_s + timed.update_s - base.forward_s - base.update_s
        return Mean(rank, node, own_s / steps, (timed.backward_s - base.backward_s) / steps)


def told(state: RunState, now: float, slow: Slow, since_s: float) -> Straggling:
    """Return the event for this verdict."""
    whole = len(slow.ranks) == state.ranks_per_node and state.ranks_per_node > 1
    who = f"all ranks of {slow.node}" if whole else f"rank {slow.rank} on {slow.node}"
    own, others, lost = _time(slow.own_s), _time(slow.typical_s), _time(slow.lost_s)
    return Straggling(
        t=now, attempt=state.attempt, node=slow.node, rank=slow.rank, slowness=round(slow.slowness, 3),
        own_s=round(slow.own_s, 6), typical_s=round(slow.typical_s, 6), lost_s=round(slow.lost_s, 6),
        step_s=round(slow.step_s, 6), since_s=round(since_s, 1),
        evidence=f"for {since_s:.0f} s {who} spent {own} of each step outside of backward, the others "
        f"{others}; they waited {lost} for it",
    )  # fmt: skip


def worth(state: RunState, event: Straggling, *, saved: bool = False) -> tuple[bool, str]:
    """Return whether a swap gains more than it costs, and the arithmetic. `saved`: as if everything were
    saved just now."""
    horizon_s = min(HORIZON_MAX_S, expected_mtbf_s(state, state.now) or HORIZON_MAX_S)
    share = event.lost_s / event.step_s if event.step_s else 0.0
    restart_s, rework_s = _restart_s(state), 0.0 if saved else _rework_s(state)
    gain_s, cost_s = share * horizon_s, restart_s + rework_s
    arithmetic = (
        f"its slowness costs {_time(gain_s)} ({100 * share:.0f} %) in the next {_time(horizon_s)}, and a "
        f"swap costs about {_time(cost_s)} ({_time(restart_s)} restart, {_time(rework_s)} done again)"
    )
    return gain_s > cost_s, arithmetic


def refusal(state: RunState, event: Straggling, *, saved: bool = False) -> str:
    """Return why the node of a straggler stays; "" if it is to be swapped. `saved`: see `worth`."""
    pays, arithmetic = worth(state, event, saved=saved)
    if slow_before(state, event):
        return "the rank was slow on an earlier node, too"
    if state.settings.bad_nodes == "report":
        return "the policy only reports bad nodes"
    if not pays:
        return f"a swap would not pay: {arithmetic}"
    if not any(node.role is Role.SPARE for node in state.spare_nodes()):
        return "no spare is ready"
    refused = blame.beyond_limits(state, event.node)
    return f"it stays, because {refused}" if refused else ""


def is_current(state: RunState, event: Straggling) -> bool:
    running = state.phase is Phase.RUNNING and state.incident is None
    return running and event.attempt == state.attempt and event.node in state.places


def slow_before(state: RunState, event: Straggling) -> str:
    """Return another node on which this rank was slow earlier in the run, or the node whose place this one
    took, if that was swapped for its slowness; "" if there is none."""
    earlier = [node for node in state.slow_on.get(event.rank, ()) if node != event.node]
    if earlier:
        return earlier[-1]
    for incident in reversed(state.incidents):
        if incident.cause == "straggler" and incident.rank is not None:
            place = incident.rank // state.ranks_per_node
            return incident.node if place == event.rank // state.ranks_per_node else ""
    return ""


def _restart_s(state: RunState) -> float:
    parts = ("diagnose", "decide", "replace", "launch", "restore")
    measured = [
        sum(i.seconds()[part] for part in parts) for i in state.incidents if i.recovered_at is not None
    ]
    return fmean(measured) if measured else RESTART_S


def _rework_s(state: RunState) -> float:
    """Seconds of steps that would be repeated."""
    if state.saved_step is not None and state.absolute:
        return max(0, state.step - state.saved_step) * state.step_s
    return min(UNKNOWN_REWORK_S, state.now - (state.first_step_at or state.now))


def _time(seconds: float) -> str:
    if seconds >= 120.0:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"


class Stragglers:
    """Handles stragglers. What is to be swapped out is saved first, so that no steps are repeated for it."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._attempt = 0
        self._ordinary: set[int] = set()
        self._windows = Windows(0, 0.0)

    def beat(self, node: str, beat: Beat, now: float) -> list[Effect]:
        """Process a heartbeat; some of them have their ranks' times."""
        state = self._state
        if beat.times is None or beat.attempt != state.attempt:
            return []
        if not state.settings.straggler or state.phase is not Phase.RUNNING or node not in state.places:
            return []
        if self._attempt != state.attempt:
            self._attempt = state.attempt
            ranks = len(state.placement) * state.ranks_per_node
            self._windows = Windows(ranks, state.settings.straggler, self._ordinary)
        first = state.places[node] * state.ranks_per_node
        effects: list[Effect] = []
        for local_rank, times in enumerate(beat.times):
            if times[0]:
                found = self._windows.report(first + local_rank, node, times)
                if found is not None:
                    effects += self._found(told(state, now, *found))
        return effects

    def _found(self, event: ev.Straggling) -> list[Effect]:
        current = is_current(self._state, event)
        if not current or refusal(self._state, event, saved=True):
            return [Record(event)]
        return [SaveFirst(f"the swap of {event.node}, which is slow", event)]
