"""Which notes to write down: a node that has no memory for replicas says so at each save, and the journal of
a long run must not grow with that."""

from __future__ import annotations

from msgspec import structs

from jurymast.core.state.events import Noted
from jurymast.core.state.signatures import error_signature

# Notes of a node that differ in numbers alone: so many are written in this time, in seconds.
MOST, WITHIN_S = 3, 600.0
KEPT_MAX = 20_000
LAST = " (not said again for 10 minutes)"


class Repeats:
    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], list[float]] = {}

    def as_told(self, note: Noted) -> Noted | None:
        """Return what to write down; None if that was written often enough. What is no node's is the
        supervisor's own, which says how long something takes."""
        if not note.node:
            return note
        key = (note.node, error_signature("", note.message).message)
        times = [at for at in self._noted.pop(key, ()) if at > note.t - WITHIN_S]
        if len(self._noted) >= KEPT_MAX:
            del self._noted[next(iter(self._noted))]  # what was said the longest ago
        if len(times) >= MOST:
            self._noted[key] = times
            return None
        if len(times) < MOST - 1:
            self._noted[key] = [*times, note.t]
            return note
        self._noted[key] = [note.t] * MOST  # the time in which it is not said begins here
        return structs.replace(note, message=note.message + LAST)
