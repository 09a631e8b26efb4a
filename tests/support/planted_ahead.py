"""Bugs in what a run does before a reservation begins on its nodes: see `support.planted`."""

from __future__ import annotations

from random import Random
from typing import Any

from jurymast.core.supervision.ahead import Ahead
from jurymast.core.supervision.withdrawals import Withdrawals
from jurymast.sim.cluster.plans import Fault, Plan


def with_reservations(seed: int) -> Plan:
    """Nodes are reserved, one after the other or all at once; and perhaps a supervisor is lost, or Slurm does
    not answer for a while."""
    chance = Random(seed)
    active, spares = chance.choice((2, 2, 3)), chance.choice((0, 1, 2))
    faults = []
    for _ in range(chance.choice((1, 1, 2))):
        node, other = chance.randrange(active + spares), chance.randrange(active + spares)
        faults.append(Fault(chance.uniform(2.0, 40.0), "reserved", node, other, chance.uniform(5.0, 170.0)))
    if chance.random() < 0.3:
        faults.append(
            Fault(chance.uniform(2.0, 90.0), chance.choice(("supervisor", "slurm silent")), 0, 0, 5.0)
        )
    faults.sort(key=lambda fault: fault.at)
    return Plan(
        seed, active, spares, 1, chance.choice((5, None)), 8, tuple(faults),
        pool=chance.choice((None, None, 1, 2)), renews=chance.random() < 0.3, lives=chance.random() < 0.3,
    )  # fmt: skip


def _reserved(seed: int) -> Plan:
    """One of the nodes is reserved, and a spare is there."""
    return Plan(seed, 2, 1, 1, 5, 8, (Fault(6.0, "reserved", seed % 3, (seed + 1) % 3, 200.0),))


def _all_reserved(seed: int) -> Plan:
    """All nodes are, and storage is written seldom."""
    return Plan(seed, 2, 0, 1, None, 8, (Fault(6.0, "reserved", seconds=150.0),))


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _none(*_: Any, **__: Any) -> None:
    return None


PLANTED_AHEAD: dict[str, Any] = {
    "63: ranks stay on a node that is reserved": (_reserved, [(Withdrawals, "_going", _nothing)]),
    "63: reservations are not looked at": (_reserved, [(Ahead, "on_reservations_seen", _nothing)]),
    "64: nothing is written before a reservation begins": (_all_reserved, [(Ahead, "begin_last", _none)]),
}
