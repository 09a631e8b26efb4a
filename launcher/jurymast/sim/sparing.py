"""Recovery in process in a simulated run: which ranks live, and after which step they go on.

A failure is taken to end a rank: the others wait for a new one, which starts as all do after a restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from jurymast.core.judges.forecast import UPDATE_SHARE
from jurymast.core.state.evidence import SparedRank


class SimSparing:
    """One rank stands for those of a node. `wanted`: the script's ranks can go on in their processes."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._able: set[str] = set()  # nodes whose ranks can be spared
        self._step = -1  # after which their state is; -1: they have no whole one

    def stepped(self, placement: Iterable[str]) -> None:
        """All ranks have done the first step of their attempt: they can be spared from then on."""
        if self._wanted:
            self._able = set(placement)

    def halted(self, step: int, into: float) -> None:
        """A rank failed with the share `into` of the step after `step` behind it."""
        self._step = -1 if 1.0 - UPDATE_SHARE <= into < 1.0 else step

    def gone(self, node: str) -> None:
        self._able.discard(node)

    def spared(self, node: str) -> tuple[SparedRank, ...]:
        return (SparedRank(0, 1, self._step),) if node in self._able else ()

    def launched(self, spare: bool, saved: int, lost: int) -> int | None:
        """Return the step from which an attempt goes on whose ranks would else restore step `saved`; None if
        they do. Of several nodes that are `lost` at once, one may have kept what was another's own."""
        if not spare:
            self._able, self._step = set(), -1
        goes_on = spare and self._step >= saved and lost <= 1
        if not goes_on:
            self._step = saved
        return self._step if goes_on else None
