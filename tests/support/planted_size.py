"""Bugs in how runs go on with fewer nodes, and with more again: see `support.planted`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.checkpoints.collecting import Collecting
from jurymast.core.checkpoints.replicas import Replicas
from jurymast.core.keeper import effects
from jurymast.core.keeper.holding import Holding
from jurymast.core.keeper.restores import Collected
from jurymast.core.run import recovery, size
from jurymast.core.state.effects import Effect, Instruction
from jurymast.core.state.run import RunState
from jurymast.core.supervision.growing import Growing
from jurymast.sim.cluster.plans import Fault, Plan

_shrink = recovery._shrink


def _one_lost(seed: int) -> Plan:
    """One of three nodes is lost for good, at some step."""
    lost = Fault(8.0 + seed % 7, "power", node=seed % 3)
    return Plan(seed, 3, 0, 1, 5, 8, (lost,), least=2)


def _two_lost(seed: int) -> Plan:
    """Two of five at once, of which one is a spare."""
    first = seed % 4
    at = 8.0 + seed % 7
    lost = tuple(Fault(at, "power", node=node % 5) for node in (first, first + 1))
    return Plan(seed, 4, 1, 1, 5, 8, lost, least=2)


def _too_many_lost(seed: int) -> Plan:
    """Two of four at once, and no spare is there."""
    at = 8.0 + seed % 7
    lost = tuple(Fault(at, "power", node=(seed + number) % 4) for number in range(2))
    return Plan(seed, 4, 0, 1, 5, 8, lost, least=3)


def _back_again(seed: int) -> Plan:
    """The node that was lost boots again, and is tested before it is used."""
    lost = Fault(8.0 + seed % 7, "power", node=seed % 3, seconds=12.0)
    return Plan(seed, 3, 0, 1, 5, 8, (lost,), least=2, tests=True)


def _unsaved(seed: int) -> Plan:
    """One of three nodes is lost before the newest state is on storage, which is slow."""
    return replace(_one_lost(seed), copy_s=6.0)


def _corrupt(seed: int) -> Plan:
    """The same, just after a bit has turned on each of the others."""
    plan = _unsaved(seed)
    (lost,) = plan.faults
    turned = tuple(Fault(lost.at - 0.5, "corrupt", node=(lost.node + one) % 3) for one in (1, 2))
    return replace(plan, faults=(*turned, lost))


def _grown(seed: int) -> Plan:
    """The lost node comes back, and the ranks save for that: older images are still there."""
    return replace(_back_again(seed), copy_s=6.0)


def _too_little_memory(seed: int) -> Plan:
    """Two nodes are drained, one after the other. After the first move some node has memory for one image, so
    that all ranks save to storage together, which is newer than what memory has."""
    drained = Fault(9.19, "drained", node=3, other=1), Fault(18.82, "drained", node=0, other=2)
    return Plan(seed, 4, 1, 1, 5, 1, drained, least=3, pool=1)


def _no(*_: Any) -> bool:
    return False


def _never(*_: Any) -> None:
    return None


def _unverified(work: Collected) -> None:
    work.do(effects.Show(work.number, tuple(work._images)))


def _to_any(state: RunState, nodes: int) -> bool:
    return 0 < nodes < state.active and state.end_order is None


def _without_spares(state: RunState, places: list[int], _: list[str], why: str) -> list[Instruction]:
    return _shrink(state, places, [], why)


def _as_it_is(*_: Any) -> tuple[list[Effect], str]:
    return [], ""


def _nothing(*_: Any) -> list[Any]:
    return []


PLANTED_SIZE: dict[str, Any] = {
    "51: a run goes below its least number of nodes": (_too_many_lost, [(size, "may_shrink_to", _to_any)]),
    "49: spares are left while a run shrinks": (_two_lost, [(recovery, "_shrink", _without_spares)]),
    "50: a run never grows": (_back_again, [(Growing, "on_time", _nothing)]),
    "1: what more ranks saved is not brought to storage": (_one_lost, [(Checkpoints, "reshard", _as_it_is)]),
    "69: what memory has is written all the same": (_unsaved, [(Collecting, "look", _never)]),
    "70: what is shown is not verified": (_corrupt, [(Collected, "_next", _unverified)]),
    "19: what was shown is shown for ever": (_unsaved, [(Holding, "unshow", _never)]),
    "53: what ranks save together is not known": (
        _too_little_memory,
        [(Checkpoints, "on_saved_together", _never)],
    ),
    "19: what all nodes have never counts as safe": (_grown, [(Replicas, "_resharded", _no)]),
}  # fmt: skip
