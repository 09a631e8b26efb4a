"""Bugs to plant in recoveries in process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from jurymast.core.agent.ranks import Ranks
from jurymast.core.judges import rejoining
from jurymast.core.judges.rejoining import GoBack, GoOn, Rejoiner
from jurymast.core.run import sparing
from jurymast.core.run.decision import Decision
from jurymast.core.state.run import RunState
from jurymast.sim.cluster.plans import Plan, random_plan
from jurymast.sim.cluster.rejoining import APART, TWINS


def _lives(*kinds: str, spread: str = "") -> Callable[[int], Plan]:
    return lambda seed: replace(random_plan(seed, only=kinds), lives=True, at_term="", spread=spread)


def _takers_of_any_part(ranks: Sequence[Rejoiner], step: int) -> dict[int, tuple[int, ...]]:
    """As if all ranks had all of the model."""
    return _takers([replace(rank, part="") for rank in ranks], step)


def _oldest_whole(ranks: Sequence[Rejoiner], saved: int) -> GoOn | GoBack:
    return newest_whole([replace(rank, kept=()) for rank in ranks], saved)


def _without_shards(ranks: Sequence[Rejoiner], step: int) -> str:
    return _missing([replace(rank, part="") for rank in ranks], step)


def _whatever_is_their_own(ranks: Sequence[Rejoiner], step: int) -> str:
    return _missing([replace(rank, needs_own=False) for rank in ranks], step)


_takers, _missing, newest_whole = rejoining._takers, rejoining._missing, rejoining.newest_whole


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
    "47: a rank is given another one's shard": (
        _lives("rank", spread=TWINS),
        [(rejoining, "_takers", _takers_of_any_part)],
    ),
    "47: ranks go on although nobody has the shards that were lost": (
        _lives("rank", spread=APART),
        [(rejoining, "_missing", _without_shards)],
    ),
    "47: ranks go on although what is their own is gone": (
        _lives("power"),
        [(rejoining, "_missing", _whatever_is_their_own)],
    ),
    "48: what another node keeps of a lost one is not used": (
        _lives("power"),
        [(rejoining, "newest_whole", _oldest_whole)],
    ),
    "10: ranks that live go on after a rollback": (
        _lives("rollback", "rank"),
        [(sparing, "ANEW", frozenset())],
    ),
}
