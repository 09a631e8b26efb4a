"""How much counters have grown: joules of devices on a node, and of nodes in a run."""

from __future__ import annotations


class EnergyUsed:
    """The sum of what counters grew by since each was first read. One that shows less than before twice in a
    row has begun anew, at 0: then at least what it shows now has been added since. (Once may be a mistake of
    its driver's: all that it ever counted would be added.) What it counted after it was last read, before it
    began anew, is lost: the sum is a lower bound."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self._shown: dict[str, float] = {}
        self._less: set[str] = set()  # those that showed less the last time

    def __bool__(self) -> bool:
        return bool(self._shown)

    def take(self, counter: str, shows: float) -> None:
        before = self._shown.get(counter, shows)
        if shows < before and counter not in self._less:
            self._less.add(counter)
            return
        self._less.discard(counter)
        self._shown[counter] = shows
        self.total += shows - before if shows >= before else shows
