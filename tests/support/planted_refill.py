"""Bugs in how lost nodes are replaced by small jobs, and drained ones left: see `support.planted`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from jurymast.core.run import ladder, refill
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskForNode, Effect, Record
from jurymast.core.state.run import RunState
from jurymast.core.supervision.refilling import Refilling
from jurymast.core.supervision.withdrawals import Withdrawals
from jurymast.sim.cluster.plans import Fault, Plan, random_plan
from jurymast.supervisor.supervisor import Hold
from jurymast.worker.link import ScheduleFollower

_ask, _lacking, _moves = Refilling._ask, refill.lacking, Withdrawals.moves


def with_pool(seed: int, free: int = 2) -> Plan:
    """Nodes are lost, and others are free."""
    return replace(random_plan(seed, ("power", "agent", "supervisor")), pool=free)


def _without_free_nodes(seed: int) -> Plan:
    return with_pool(seed, 0)


def _moved(seed: int) -> Plan:
    """Nothing fails, and ranks are to leave nodes."""
    return random_plan(seed, ("drained", "admin drains"))


def _goes_on(self: ScheduleFollower, step: int) -> None: ...


def _drained(seed: int) -> Plan:
    """An administrator drains a node for minutes, and a spare is there."""
    return Plan(seed, 2, 1, 1, 5, 8, (Fault(6.0, "admin drains", node=seed % 3, seconds=200.0),))


def _forgotten(seed: int) -> Plan:
    """The supervisor is lost while ranks save before their node is removed."""
    chance = Random(seed)
    at = chance.uniform(6.0, 12.0)
    lost = Fault(at + chance.uniform(0.2, 2.0), "supervisor")
    return Plan(seed, 2, 2, 1, 5, 8, (Fault(at, "drained", node=2, seconds=120.0), lost))


def _forgets(self: Withdrawals, now: float) -> list[msg.Ask]:
    state = self._state
    wanted, state.to_remove = state.to_remove, {}
    asks, state.to_remove = _moves(self, now), wanted
    return asks


def removed_while_another_is_lost(seed: int, how: str = "drained") -> Plan:
    """A node fails while ranks save before another leaves, and there are spares for both."""
    chance = Random(seed)
    at = chance.uniform(6.0, 12.0)
    kind = chance.choice(("snap", "power", "host"))
    lost = Fault(at + chance.uniform(0.2, 2.0), kind, node=chance.randrange(2), seconds=30.0)
    return Plan(seed, 3, 2, 1, 5, 8, (Fault(at, how, node=2, seconds=200.0), lost))


def _isolated(seed: int) -> Plan:
    """The supervisor's node is cut off from the others, and its storage hangs: another takes over, and for
    the first one all other nodes are lost."""
    chance = Random(seed)
    at = chance.uniform(5.0, 9.0)
    faults = (
        Fault(at, "isolate", node=0, seconds=chance.uniform(15.0, 30.0)),
        Fault(at + chance.random(), "storage hangs here", node=0, seconds=chance.uniform(10.0, 20.0)),
    )
    return Plan(seed, 2, 1, 1, 5, 8, faults, pool=2)


def _leaves_nobody_out(self: Refilling, now: float) -> list[Effect]:
    effects = _ask(self, now)
    return [AskForNode(one.number, ()) if isinstance(one, AskForNode) else one for one in effects]


def _asks_beside(state: RunState) -> bool:
    return state.may_refill and state.end_order is None


def _too_many(state: RunState) -> int:
    return _lacking(state) + 1


def _only_told(self: Refilling, now: float) -> list[Effect]:
    return [one for one in _ask(self, now) if isinstance(one, Record)]


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


async def _never_asks(self: Hold) -> bool:
    return False


def _never_waits(state: RunState) -> str:
    return "no spare came in time"


def _waits_for_ever(state: RunState) -> str:
    return "" if state.may_refill else "no spare came in time"


PLANTED_REFILL: dict[str, Any] = {
    "41: a lost node is not replaced": (with_pool, [(Refilling, "_ask", _nothing)]),
    "41: one more node is asked for": (with_pool, [(refill, "lacking", _too_many)]),
    "42: nodes of the run are not left out": (with_pool, [(Refilling, "_ask", _leaves_nobody_out)]),
    "42: a node is asked for while another is expected": (
        with_pool,
        [(refill, "may_ask", _asks_beside), (refill, "coming", _nothing)],
    ),
    "53: ranks do not wait to be moved": (_moved, [(ScheduleFollower, "stay", _goes_on)]),
    "52: a supervisor asks for nodes although another has taken over": (
        _isolated,
        [(Hold, "is_superseded_now", _never_asks)],
    ),
    "43: a run is requeued although a node may come": (with_pool, [(refill, "why_not_held", _never_waits)]),
    "54: a removal is forgotten with the supervisor": (
        _forgotten,
        [(Withdrawals, "moves", _forgets)],
    ),
    "54: a removal is forgotten if another node is lost first": (
        removed_while_another_is_lost,
        [(ladder, "_wished", _nothing)],
    ),
    "44: ranks stay on a node that is drained": (_drained, [(Withdrawals, "moves", _nothing)]),
    "6: a run holds its nodes for ever": (
        _without_free_nodes,
        [(refill, "why_not_held", _waits_for_ever)],
    ),
}
