"""Bugs to plant, to see that the simulated cluster's rules notice them, each by its name."""

from __future__ import annotations

from random import Random
from typing import Any

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints import restore as restoring
from jurymast.core.checkpoints.holders import spelled
from jurymast.core.checkpoints.reach import Reach
from jurymast.core.checkpoints.replicas import Replicas
from jurymast.core.effects import Send
from jurymast.core.nodes import heartbeat, lateness
from jurymast.core.nodes.hangs import Hangs
from jurymast.core.nodes.watch import Watch
from jurymast.core.run import machine as run
from jurymast.core.run import recovery
from jurymast.core.run.state import RunState
from jurymast.sim.cluster.agent import SimHost
from jurymast.sim.cluster.plans import Fault, Plan, random_plan

# (object, attribute, value)
Patch = tuple[Any, str, Any]


def _shared_first(copies: cp.Copies, shared: Any, *rest: Any) -> cp.RestorePlan:
    return _plan_restore(cp.Copies() if shared else copies, shared, *rest)


def _launch_with_deadline(state: RunState, placement: tuple[str, ...], reason: str) -> Any:
    launch = _launch(state, placement, reason)
    state.deadline = state.now + 10.0
    return launch


def _mixed(self: restoring.Restore, node: str, ranks: range) -> msg.Restore | None:
    told = _message(self, node, ranks)
    older = [key for key in self._copies.newest_first() if told and key[0] < told.step]
    if told is None or 0 in ranks or not older or not self._copies.restorable(older[0]):
        return told
    sources = {rank: spelled(self._copies.sources(older[0], rank, node), self._holders) for rank in ranks}
    return msg.Restore(step=older[0][0], attempt=older[0][1], ranks=sources)


def _all_time_counts(self: heartbeat.WatcherClock, real_now: float) -> float:
    self.now += max(0.0, real_now - self._real)
    self._real = real_now
    return 0.0


def _leave_nobody(self: SimHost, *, loud: bool) -> None:
    if loud:
        _leave(self, loud=loud)
    self.attempt = 0


def _no_books(self: Replicas, key: cp.Key, nodes: Any) -> list[Any]:
    return [Send(node, msg.Committed(step=key[0], attempt=key[1])) for node in nodes]


def _long_patience(heartbeat_s: float, nodes: int, late_s: float = 0.0) -> float:
    return 3.0 + 4.0 * late_s


_plan_restore, _launch, _message, _leave = (
    cp.plan_restore, recovery._launch, restoring.Restore.message, SimHost._leave
)  # fmt: skip
_handlers = run._HANDLERS


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _zero(*_: Any, **__: Any) -> int:
    return 0


# name: (the kinds of faults that show it, () for all, and what is replaced)
PLANTED: dict[str, tuple[tuple[str, ...], list[Patch]]] = {
    "B1: an older checkpoint on storage is preferred": ((), [(cp, "plan_restore", _shared_first)]),
    "B2: a launch that waits for storage is a hang": (
        ("rank", "storage hangs"),
        [(recovery, "_launch", _launch_with_deadline)],
    ),
    "B3: a pair that cannot copy is asked for ever": (
        ("cut",),
        [(Reach, "given_up", lambda *_: frozenset())],
    ),
    "B4: holders that are to come back are not awaited": (
        ("power", "supervisor"),
        [(Watch, "away", _nothing)],
    ),
    "B5: attempts that the journal lacks are ignored": (
        ("storage full", "storage hangs", "supervisor", "rank"),
        [(run, "_HANDLERS", {**_handlers, ev.AttemptFound: _nothing})],
    ),
    "B6: ranks start from 0 where storage is not mounted": (
        ("power", "unmounted"),
        [(RunState, "saved_on", _zero)],
    ),
    "2: nodes are told different states": ((), [(restoring.Restore, "message", _mixed)]),
    "3: ranks go on beside those of the next attempt": ((), [(SimHost, "_leave", _leave_nobody)]),
    "5: what is safe is told once only": ((), [(Replicas, "tell_safe", _nothing)]),
    "6: hangs are not noticed": (("hang",), [(Hangs, "tick", _nothing)]),
    "7: the supervisor's pauses count": (("stall",), [(heartbeat.WatcherClock, "tick", _all_time_counts)]),
    "7: agents cling to a late supervisor": (
        ("power", "stall", "freeze"),
        [(lateness, "patience_s", _long_patience)],
    ),
    "7: deadlines run while no supervisor is there": (
        ("storage hangs", "supervisor"),
        [(recovery, "deadline", lambda *_: 0.0)],
    ),
    "9: what was given up stays in mind": ((), [(Replicas, "_give_up_older", _no_books)]),
}


def plan_for(name: str, seed: int) -> Plan:
    """One that may show the bug."""
    if not name.startswith("B4"):
        return random_plan(seed, PLANTED[name][0])
    chance = Random(seed)
    at = chance.uniform(6.0, 12.0)
    power = Fault(at, "power", node=chance.randrange(1, 4))
    dies = Fault(at + chance.uniform(1.4, 2.3), "supervisor")
    return Plan(seed, 2, 2, 1, 5, 8, (power, dies))
