"""Bugs to plant in recoveries in process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from jurymast.core.agent.ranks import Ranks
from jurymast.core.run import sparing
from jurymast.core.run.decision import Decision
from jurymast.core.state.run import RunState
from jurymast.sim.cluster.plans import Plan, random_plan


def _lives(*kinds: str) -> Callable[[int], Plan]:
    return lambda seed: replace(random_plan(seed, only=kinds), lives=True, at_term="")


def _never(state: RunState, decision: Decision) -> Decision:
    return decision


_stopped = Ranks._stopped


def _untold(self: Ranks, attempt: int) -> Any:
    return structs.replace(_stopped(self, attempt), spared=())


PLANTED_SPARING: dict[str, tuple[Callable[[int], Plan], list[tuple[Any, str, Any]]]] = {
    "45: no rank is ever spared": (
        _lives("rank"),
        [(sparing, "considered", _never)],
    ),
    "45: agents do not tell which ranks are spared": (
        _lives("rank"),
        [(Ranks, "_stopped", _untold)],
    ),
    "46: ranks are spared however often that fails": (
        _lives("breaks"),
        [(sparing, "IN_A_ROW_MAX", math.inf)],
    ),
    "10: ranks that live go on after a rollback": (
        _lives("rollback", "rank"),
        [(sparing, "ANEW", frozenset())],
    ),
}
