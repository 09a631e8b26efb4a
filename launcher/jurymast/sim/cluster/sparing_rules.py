"""What must hold for ranks that go on in their processes after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state import messages as msg
from jurymast.core.state.images import StateId

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimHost
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.training import SimGroup
    from jurymast.sim.cluster.world import Token

GO_ON = "45: ranks that can go on in their processes do"
NOT_FOR_EVER = "46: recoveries in process without a new step are bounded"

# Nothing else that happens is a reason to start new processes.
PLAIN = frozenset({"rank", "power", "stopped", "hang"})
# Attempts without a new step that may be in process.
IN_A_ROW_MAX = 3


class SparingRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.count = 0  # recoveries in process

    def starts(self, host: SimHost, order: msg.Launch) -> None:
        """The host starts the ranks of an attempt."""
        fruitless, wanted = self._oracle.fruitless, self._oracle.cluster.wanted
        kinds = {fault.kind for fault in wanted.faults}
        # Otherwise a new supervisor may know of fewer attempts.
        if kinds <= {*PLAIN, "breaks"} and order.spare and fruitless > IN_A_ROW_MAX:
            self._oracle.fail(NOT_FOR_EVER, f"attempt {order.attempt}, the {fruitless}th without a new step")
        # Ranks of another number begin anew.
        plain = kinds <= PLAIN and not (wanted.at_term or wanted.least)
        whole = any(rank.step >= 0 for rank in host.spared)
        if plain and whole and not order.spare and fruitless <= 1:
            self._oracle.fail(GO_ON, f"{host.site.name} starts attempt {order.attempt} without {host.spared}")

    def goes_on(self, group: SimGroup, token: Token) -> None:
        """All ranks of the group go on from a state that some of them have."""
        self.count += 1
        attempt = next(
            (one.attempt for one in self._oracle.cluster.groups.values() if one.number == token.history[-1]),
            0,
        )
        self._oracle.went_on(group, StateId(token.step, attempt))
