"""From the journal of a real run to a plan of faults for the simulated cluster: a failure from the field
replays on a desk, under as many seeds as one likes.

The journal says what the run saw of each fault; the fault itself is the likeliest that looks so. Faults keep
their order, and their distance as long as it is short. Of thousands of nodes those stay that had faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jurymast.core.state import events as ev
from jurymast.sim.cluster.plans import FIRST_AT_S, Fault, Plan

NODES_MAX = 16
# More time between two faults than a simulated run needs to train again says nothing.
CALM_S = 30.0
# What follows a fault within this time is its consequence, or happened together with it.
TOGETHER_S = 1.0
STORAGE_S = 20.0
ASKED = {
    "restart": "restart",
    "save": "save",
    "drain": "drained",
    "rollback": "rollback",
    "cancel": "given up",
}
SIGNALS = {"SIGUSR2": "warning", "running": "signal all", "preempted": "preempted", "timeout": "timeout"}


@dataclass(frozen=True)
class FieldPlan:
    """The plan, and how many events tell of something that no simulated fault stands for, by kind."""

    plan: Plan
    left_out: Counter[str]


@dataclass(frozen=True)
class _Sighting:
    """A fault at a time of the journal, on a node by its name ("": none)."""

    at: float
    kind: str
    node: str = ""
    seconds: float = 0.0


def read_field(events: Iterable[ev.Event]) -> FieldPlan:
    """Make a plan of a run's events. Raises ValueError if they are no whole run's, or show no fault."""
    told = list(events)
    start = next((event for event in told if isinstance(event, ev.RunStarted)), None)
    if start is None:
        raise ValueError("the journal does not begin with the run's start")
    left_out: Counter[str] = Counter()
    seen = sorted(_faults(told, left_out), key=lambda one: one.at)
    if not seen:
        raise ValueError("the journal shows no fault that the simulated cluster knows")
    names = list(dict.fromkeys(one.node for one in seen if one.node))
    spares = min(start.spares, NODES_MAX // 4)
    active = max(2, min(start.active, NODES_MAX - spares, max(4, len(names))))
    plan = Plan(0, active, spares, min(start.ranks_per_node, 2), 5, 8, ())
    numbers = {name: number % plan.nodes for number, name in enumerate(names)}
    faults: list[Fault] = []
    at, before = FIRST_AT_S + CALM_S / 2, seen[0].at
    for one in seen:
        at, before = at + min(one.at - before, CALM_S), one.at
        node = numbers.get(one.node, 0)
        faults.append(Fault(round(at, 3), one.kind, node, (node + 1) % plan.nodes, round(one.seconds, 3)))
    return FieldPlan(replace(plan, faults=tuple(faults)), left_out)


def _faults(events: Sequence[ev.Event], left_out: Counter[str]) -> Iterator[_Sighting]:
    failed_at = -1.0
    losses = [event.t for event in events if isinstance(event, ev.NodeLost)]
    for number, event in enumerate(events):
        match event:
            case ev.NodeLost():
                yield _lost(event, events[:number], events[number:])
            case ev.WorkerFailed() if event.t > failed_at + TOGETHER_S:
                failed_at = event.t
                yield _Sighting(event.t, "rank", event.node)
            case ev.WorkerFailed():  # its peers lose it
                failed_at = event.t
            case ev.RanksHung():
                yield _Sighting(event.t - event.silent_s, "hang", event.node, event.silent_s)
            case ev.SupervisorStarted() if event.epoch > 1 and not _begins_a_life(events[number + 1 :]):
                yield _Sighting(event.t - event.silent_s, "supervisor")
            case ev.Asked() if event.what in ASKED:
                yield _Sighting(event.t, ASKED[event.what], event.node)
            case ev.Signalled() if event.signal in SIGNALS:
                yield _Sighting(event.t, SIGNALS[event.signal])
            case ev.Saved() if not event.ok and event.copied:
                if all(abs(event.t - t) > TOGETHER_S for t in losses):
                    yield _Sighting(event.t, "storage hangs", seconds=STORAGE_S)
            case ev.HealthFound() | ev.Straggling() | ev.RestoreFailed():
                left_out[type(event).__name__] += 1


def _lost(lost: ev.NodeLost, before: Sequence[ev.Event], after: Sequence[ev.Event]) -> _Sighting:
    """A node that comes back as it was had been cut off; with another agent, that had died; booted anew, or
    not at all: it had lost power."""
    at = lost.t - lost.silent_s
    was = next((e for e in reversed(before) if isinstance(e, ev.NodeJoined) and e.node == lost.node), None)
    back = next((e for e in after if isinstance(e, ev.NodeJoined) and e.node == lost.node), None)
    if was is None or back is None or was.boot_id != back.boot_id:
        dead = lost.how == "closed" and back is None
        seconds = max(5.0, min(back.t - at, CALM_S)) if back is not None else 0.0
        return _Sighting(at, "agent" if dead else "power", lost.node, seconds)
    away_s = min(back.t - at, CALM_S)
    return _Sighting(at, "isolate" if was.incarnation == back.incarnation else "agent", lost.node, away_s)


def _begins_a_life(following: Sequence[ev.Event]) -> bool:
    """Whether a supervisor is the first one of an allocation, and not another one's successor."""
    return bool(following) and isinstance(following[0], ev.AllocationStarted)
