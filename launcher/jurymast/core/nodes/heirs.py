"""Which nodes are to take the supervision over, if this supervisor's node is lost, and in which order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Set

from jurymast.core.run.state import Role, RunState

HEIRS = 3
LOOK_EVERY_S = 5.0


class Heirs:
    """Of the nodes that are `here`, spares first: nobody waits for their processors. `now` is the watcher's
    clock."""

    def __init__(self, state: RunState, here: Set[str]) -> None:
        self._state, self._here = state, here
        self._heirs: tuple[str, ...] = ()
        self._look_at = -math.inf
        self._among = 0

    def look(self, now: float) -> None:
        """Now and then, as there may be thousands of nodes; at once when an heir has gone, or while there are
        too few."""
        enough = len(self._heirs) == HEIRS or len(self._here) == self._among
        if now < self._look_at and enough and all(name in self._here for name in self._heirs):
            return
        self._look_at, self._among = now + LOOK_EVERY_S, len(self._here)
        nodes = self._state.nodes
        able = (nodes[name] for name in self._here if name in nodes and name != self._state.supervised_on)
        chosen = heapq.nsmallest(HEIRS, able, key=lambda node: (node.role is not Role.SPARE, node.order))
        self._heirs = tuple(node.name for node in chosen)

    def place(self, node: str) -> int | None:
        """From 0 on; None: it is not one of the first."""
        return self._heirs.index(node) if node in self._heirs else None
