"""From which step ranks go on after a recovery in process, and who has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejoiner:
    """What one rank has. `live`: its model and optimizer are those after this step (-1: after none, or it is
    new); `own`: the steps of which it has what is its own; `needs_own`: it knows that ranks have such a
    thing, as a new one does not."""

    live: int = -1
    own: tuple[int, ...] = ()
    needs_own: bool = False


@dataclass(frozen=True)
class GoOn:
    """All go on after `step`. Ranks in `givers` have it, and each gives it to those that `takers` names, by
    giver."""

    step: int
    takers: dict[int, tuple[int, ...]]


def newest_whole(ranks: Sequence[Rejoiner], saved: int) -> GoOn | None:
    """Return the newest step that a rank has live, and of which each rank has what is its own; None if there
    is none, or an older one than was `saved`, to which all go back then. Ranks are given by number."""
    needs_own = any(rank.needs_own for rank in ranks)
    for step in sorted({rank.live for rank in ranks} - {-1}, reverse=True):
        if step < saved:
            return None
        if not needs_own or all(step in rank.own for rank in ranks):
            givers = [number for number, rank in enumerate(ranks) if rank.live == step]
            needy = [number for number, rank in enumerate(ranks) if rank.live != step]
            return GoOn(
                step, {giver: tuple(needy[place :: len(givers)]) for place, giver in enumerate(givers)}
            )
    return None
