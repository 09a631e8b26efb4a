"""Which of a run's nodes the state machine sees by name.

The state machine treats healthy placed nodes alike, and each of its decisions walks over all placed nodes. So
a few placed nodes have names of their own, and one name stands for all the others; a node that fails gets a
name that has not been needed yet. Decisions are the same as with a name for every node (a test compares
them), and cost the same for 12,500 nodes as for ten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jurymast.core.run.attribution import MANY_LOST, MANY_LOST_FRACTION
from jurymast.sim.faults import TraceFault

OTHERS = "others"
NAMED = 6
# Names come free when the next attempt is launched, well within this time.
WINDOW_S = 60.0
# Losses within this time may be one incident: the time of detection and of stopping the ranks.
TOGETHER_S = 15.0


def names_needed(faults: Sequence[TraceFault]) -> int:
    """Return how many placed nodes need names: the most that a plan hits within a minute, and some for later
    ones. If several are hit at once, there are enough names that their share reaches the limit for a fault of
    the fabric only if it would with a name for every node."""
    together = _most_within(faults, TOGETHER_S)
    wide = math.ceil(together / MANY_LOST_FRACTION) if together > MANY_LOST else 0
    return max(NAMED + _most_within(faults, WINDOW_S), wide)


def _most_within(faults: Sequence[TraceFault], window_s: float) -> int:
    most = hit = first = 0
    for fault in faults:
        hit += len(fault.nodes)
        while fault.t - faults[first].t > window_s:
            hit -= len(faults[first].nodes)
            first += 1
        most = max(most, hit)
    return most


class Names:
    """The names of nodes. Numbers 0 .. active - 1 are placed first; the rest are the spares."""

    def __init__(self, active: int, spares: int, allocation: int, named: int) -> None:
        own = active if active <= named else named
        self.others = active - own  # nodes that `OTHERS` stands for
        numbers = [*range(own), *range(active, active + spares)]
        self._names = {number: f"n{number}" + f".{allocation}" * bool(allocation) for number in numbers}
        # The names lent longest ago come first, because decisions look back at the last incidents' nodes.
        self._lendable = [self._names[number] for number in range(own)]
        self._placed = tuple(self._lendable)

    def all(self) -> tuple[str, ...]:
        return ((OTHERS,) if self.others else ()) + tuple(self._names.values())

    @property
    def active(self) -> int:
        """The number of places, as the state machine counts them."""
        return len(self._lendable) + bool(self.others)

    def of(self, number: int, healthy_placed: Collection[str]) -> str | None:
        """Return the name of a node, which may take over the name of one in `healthy_placed`. None: no name
        is left, because as many nodes as have names are out at the same time."""
        name = self._names.get(number)
        if name is None:
            name = next((n for n in self._lendable if n in healthy_placed), None)
            if name is None:
                return None
            lender = next(other for other, its in self._names.items() if its == name)
            del self._names[lender]
            self._names[number] = name
        if name in self._lendable:
            self._lendable.remove(name)
            self._lendable.append(name)
        return name

    def placed(self, placement: Sequence[str]) -> list[tuple[int, int]]:
        """Note the nodes of the newest attempt, whose names may be lent. Returns, for each new node, the pair
        (number of the node that left the placement, number of the node in its place)."""
        numbers = {name: number for number, name in self._names.items()}
        gone = [numbers[name] for name in self._placed if name not in placement and name in numbers]
        new = [numbers[name] for name in placement if name not in self._placed and name in numbers]
        self._placed = tuple(placement)
        kept = [name for name in self._lendable if name in placement]
        self._lendable = kept + [name for name in placement if name != OTHERS and name not in kept]
        return list(zip(gone, new, strict=False))
