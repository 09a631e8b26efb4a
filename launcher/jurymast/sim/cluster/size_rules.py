"""What must hold for runs that go on with fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jurymast.core.state.effects import Instruction, Launch
from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision.growing import RETRY_S

if TYPE_CHECKING:
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

NEVER_BELOW = "51: no attempt has fewer nodes than the policy allows"
SPARES_FIRST = "49: no node is done without while a spare is ready"
GROWS = "50: a run takes in nodes that it lacks"

# From the time when a node is ready, if nothing else happens, in seconds.
GROWN_BY_S = RETRY_S + 30.0


class SizeRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._nodes = 0  # of the newest attempt
        self._could_since: float | None = None

    def recorded(self, supervisor: SimSupervisor, decided: Sequence[Instruction]) -> None:
        for one in decided:
            if isinstance(one, Launch):
                self._launched(supervisor, len(one.placement))

    def _launched(self, supervisor: SimSupervisor, nodes: int) -> None:
        wanted, before = self._oracle.cluster.wanted, self._nodes
        self._nodes = nodes
        least = wanted.least or wanted.active
        if not least <= nodes <= wanted.active:
            self._oracle.fail(NEVER_BELOW, f"attempt {supervisor.state.attempt} has {nodes} nodes")
        left = [one.name for one in supervisor.state.spare_nodes() if one.role is Role.SPARE]
        if left and nodes < before:
            self._oracle.fail(
                SPARES_FIRST, f"attempt {supervisor.state.attempt} has {nodes} nodes, {left} are ready"
            )

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        oracle, state = self._oracle, supervisor.state
        now = oracle.cluster.world.now
        lacks = 0 < len(state.placement) < state.active and not state.alone
        steady = state.phase is Phase.RUNNING and state.incident is None and state.end_order is None
        ready = any(one.role is Role.SPARE and not one.marked for one in state.spare_nodes())
        if not (lacks and steady and ready and oracle.trains and oracle.storage_fine(GROWN_BY_S)):
            self._could_since = None
        elif self._could_since is None:
            self._could_since = now
        elif now > max(self._could_since, since, oracle.unwritable_until) + GROWN_BY_S:
            oracle.fail(GROWS, f"{len(state.placement)} of {state.active} since {self._could_since:.1f} s")
