"""Bugs in what people are told, and in who takes over: see `support.planted`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from jurymast.core.agent.succession import Succession
from jurymast.core.checkpoints import replicas
from jurymast.core.goodput import Interval, Ledger, StepCounts
from jurymast.core.judges import explained
from jurymast.core.run import ends, machine, recovery
from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from jurymast.core.supervision.departure import Departure
from jurymast.core.supervision.machine import Supervision
from jurymast.sim.cluster.plans import Fault, Plan, mixed_plan, random_plan

_on_step_ended = ends.step_ended
_on_pulse, _missing, _book = Succession.on_pulse, replicas.missing_replicas, Ledger._book


def _given_up_in_a_recovery(seed: int) -> Plan:
    """Somebody cancels the run when a rank has failed, and its steps are done again."""
    at = Random(seed).uniform(6.0, 12.0)
    return Plan(seed, 2, 1, 1, 5, 8, (Fault(at, "rank", node=1), Fault(at + 1.5, "given up")))


def step_ends(seed: int) -> Plan:
    """Slurm ends the step of all agents, at any moment of the run, and maybe something else strikes it."""
    chance = Random(seed)
    plan = mixed_plan(seed)
    at = chance.choice((chance.uniform(0.3, 4.0), chance.uniform(4.0, 20.0)))
    others = plan.faults[: chance.choice((0, 0, 1, 2))]
    faults = sorted((*others, Fault(round(at, 2), "step ends")), key=lambda fault: fault.at)
    return replace(plan, faults=tuple(faults))


def _deaf(self: Succession, value: str | None, now: float) -> Any:
    if value is not None and self._quiet_since is not None:
        self._pulse = value
    return _on_pulse(self, value, now)


def _as_a_job(state: RunState) -> None:
    _on_step_ended(state)
    state.step_alone = False


def _forgets(state: RunState, how: str, code: int, reason: str) -> Any:
    if state.incident is not None:
        state.incidents.pop()
    return recovery.finish(state, how, code, reason)


def _without_words(self: Supervision, node: str, _: str, now: float) -> Any:
    return self.record(ev.Noted(t=now, node=node, message=""))


def _saved_untold(state: RunState, event: ev.Saved) -> Any:
    before = state.saved_step
    machine._saved(state, event)
    state.saved_step = before


_untold: dict[type[ev.Event], Any] = {**machine._HANDLERS, ev.Saved: _saved_untold}


class _Forgetful:
    def __init__(self, copies: Any) -> None:
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def nodes_with(self, *_: Any) -> frozenset[str]:
        return frozenset()


def _all_again(copies: Any, *rest: Any, **named: Any) -> Any:
    return _missing(_Forgetful(copies), *rest, **named)  # type: ignore[arg-type]


def _refuses(*_: Any) -> str:
    return "no"


def _over(_: RunState) -> bool:
    return False


def _back_in_time(self: Ledger, until: int, activity: str, incident: int | None = None) -> None:
    if until < self._frontier:
        self.timeline.append(Interval(self._frontier, until, activity))
        self._frontier = until
    _book(self, until, activity, incident)


PLANTED_TOLD: dict[str, Any] = {
    "57: agents that are cut off do not see the pulse": (
        partial(random_plan, only=("cut", "isolate")),
        [(Succession, "on_pulse", _deaf)],
    ),
    "58: a run that is cancelled forgets its last failure": (
        _given_up_in_a_recovery,
        [(ends, "finish_from_outside", _forgets)],
    ),
    "59: notes say nothing": (
        partial(random_plan, only=("timeout",)),
        [(Supervision, "note", _without_words)],
    ),
    "60: what is saved is not told": (
        random_plan,
        [(machine, "_HANDLERS", _untold)],
    ),
    "61: whoever has an image copies it again": (random_plan, [(replicas, "missing_replicas", _all_again)]),
    "62: the word of a step's end is refused": (step_ends, [(Departure, "refusal", _refuses)]),
    "62: a run does not say that its step alone has ended": (step_ends, [(ends, "step_ended", _as_a_job)]),
    "62: nobody waits for the word of a step's end": (step_ends, [(explained, "may_have_ended", _over)]),
    "21: steps that are done again count as new ones": (
        partial(random_plan, only=("rank",)),
        [(StepCounts, "again", property(lambda _: 0, lambda *_: None))],
    ),
    "21: what is booked goes back in time": (random_plan, [(Ledger, "_book", _back_in_time)]),
}
