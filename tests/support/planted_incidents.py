"""Bugs in the incidents of a run, in what is told of its steps, and in who counts: see `support.planted`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jurymast.core.agent.link import SupervisorLink
from jurymast.core.agent.ranks import Ranks
from jurymast.core.run import ladder, machine, recovery, restoring
from jurymast.core.run.recording import Teller
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.run import Phase, RunState
from jurymast.sim.cluster.plans import Fault, Plan, random_plan

_tell, _handlers = Teller.on_time, machine._HANDLERS
_fill, _found = recovery._fill, SupervisorLink.on_supervisor_found
_heard = Ranks.on_host_message
_ready: Any = _handlers[ev.NodeReady]


def _back_soon(seed: int) -> Plan:
    """A node's agent is killed, and another started; the run is watched for long."""
    faults = Fault(6.0, "agent", node=seed % 3, seconds=3.0), Fault(60.0, "save")
    return Plan(seed, 2, 1, 1, 5, 8, faults)


def _of_two_tasks(seed: int) -> Plan:
    return replace(random_plan(seed, only=("save",)), tasks=True, ranks=2)


def _all_with_one(self: Ranks, message: Any, now: float) -> Any:
    effects = _heard(self, message, now)
    if isinstance(message, msg.Finished) and not self._ending:
        self._gone()
        self._finished = True
    return effects


def _never(*_: Any) -> bool:
    return False


def _restored_at_once(state: RunState, event: ev.Restored) -> Any:
    if state.incident is not None and state.phase is Phase.STOPPING:
        state.incident.restored_at = event.t
    return restoring.restored(state, event)


def _hardly_ever(self: Teller, now: float, *, forced: bool = False) -> Any:
    first = self._state.first_step_at is None
    return _tell(self, now, forced=forced) if first or forced or now % 20.0 < 1.0 else []


def _only_at_first(state: RunState, event: ev.NodeReady) -> Any:
    return _ready(state, event) if not state.attempt or event.node in state.places else None


def _finds_none(self: SupervisorLink, _: Any, now: float) -> Any:
    return _found(self, None, now)


def _untold_swap(state: RunState, *places: Any) -> Any:
    launched = _fill(state, *places)
    state.incidents[-1].action = "restart"
    return launched


def _for_a_while(*_: Any) -> float:
    return 3.0


_hasty: dict[type[ev.Event], Any] = {**_handlers, ev.Restored: _restored_at_once}
_forgetful: dict[type[ev.Event], Any] = {**_handlers, ev.NodeReady: _only_at_first}

PLANTED_INCIDENTS: dict[str, Any] = {
    "71: an incident never ends": (
        partial(random_plan, only=("rank",)),
        [(RunState, "recovers", _never)],
    ),
    "72: what ranks had restored is told of the failure that ended them": (
        partial(random_plan, only=("half told", "rank", "supervisor")),
        [(machine, "_HANDLERS", _hasty)],
    ),
    "73: the progress of ranks is told now and then": (random_plan, [(Teller, "on_time", _hardly_ever)]),
    "74: nodes that come later are not ready": (
        _back_soon,
        [(machine, "_HANDLERS", _forgetful)],
    ),
    "75: a run waits after every failure": (
        partial(random_plan, only=("rank",)),
        [(ladder, "_pause_s", _for_a_while)],
    ),
    "76: agents do not read where the newest supervisor is": (
        partial(random_plan, only=("power",)),
        [(SupervisorLink, "on_supervisor_found", _finds_none)],
    ),
    "6: an agent takes all its tasks for finished with the first": (
        _of_two_tasks,
        [(Ranks, "on_host_message", _all_with_one)],
    ),
    "77: a spare that takes over is told as a restart": (
        partial(random_plan, only=("power",)),
        [(recovery, "_fill", _untold_swap)],
    ),
}
