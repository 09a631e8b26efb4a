"""Bugs in how runs share a pool of waiting nodes: see `support.planted`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jurymast.core.judges import pool
from jurymast.core.supervision.pooling import Pooling
from jurymast.sim.cluster.members import SimPoolAccess
from jurymast.sim.cluster.plans import Plan, random_plan
from jurymast.supervisor import claiming
from jurymast.supervisor.claiming import Taking

_lacking = pool.lacking
_take = SimPoolAccess.take


def _shared(seed: int) -> Plan:
    """Nodes are lost, others wait in a pool, and more are free."""
    plan = random_plan(seed, ("power", "power", "agent"))
    return replace(plan, active=plan.nodes, spares=0, pool=4, members=2)


async def _takes_anyway(access: SimPoolAccess, job: str) -> bool:
    await _take(access, job)
    return True


async def _asks_slurm(*_: Any) -> None:
    return None


def _one_more(wanted: int, there: int) -> int:
    return _lacking(wanted, there) + 1


def _nothing(*_: Any) -> list[Any]:
    return []


PLANTED_POOL: dict[str, Any] = {
    "65: a node is taken although another run has it": (_shared, [(SimPoolAccess, "take", _takes_anyway)]),
    "66: nodes that wait are forgotten": (_shared, [(Taking, "take", _asks_slurm)]),
    "67: an answer is waited for without end": (_shared, [(claiming, "ANSWER_LIMIT_S", 1000.0)]),
    "68: one more node is kept waiting": (_shared, [(pool, "lacking", _one_more)]),
    "68: a pool is not filled": (_shared, [(Pooling, "on_time", _nothing)]),
}
