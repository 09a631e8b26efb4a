"""A run that goes on with fewer nodes than it wants gets those that are ready by now: its ranks save, and as
many as the run wants go on from there."""

from __future__ import annotations

import math

from jurymast.core.run import size
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Effect, Record, SaveFirst
from jurymast.core.state.run import RunState
from jurymast.core.state.texts import NODES_TOLD, some

# So long after a try that came to nothing, in seconds.
RETRY_S = 30.0


class Growing:
    """`now` is the supervisor's clock."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._not_before = -math.inf

    def on_time(self, now: float) -> list[Effect]:
        """Ask for a save, after which the attempt ends, if nodes are ready that the run lacks."""
        state = self._state
        if now < self._not_before or state.first_step_at is None or not size.can_grow(state):
            return []
        self._not_before = now + RETRY_S
        nodes = [node.name for node in size.growers(state, state.spare_nodes())]
        by = f"jurymast, as {some(nodes, NODES_TOLD)} can take part"
        grow = ev.Asked(t=now, what=ev.GROW, by=by)
        return [Record(ev.Asked(t=now, what="save", by=by)), SaveFirst(by, grow)]
