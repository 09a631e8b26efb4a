"""The bounds of every loop over simulated time. A simulation whose time stands still, or crawls, ends with an
error that names what it waits for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from jurymast.errors import JurymastError

# Far more than happens at one instant, and in a simulated year without a fault.
AT_ONCE_MAX, EVENTS_MAX = 10_000, 200_000


class StandsStill(JurymastError):
    """Simulated time does not go on, or so slowly that the simulation would not end. An error in jurymast, or
    a request for times that are too short."""


class Bounds:
    """Counts events. Each loop over simulated time calls `event` in each round, and `goes_on` when something
    happens that cannot happen without end, like the next fault of a finite plan. `seed` names it."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._now = -math.inf
        self._at_once = self._events = 0

    def goes_on(self) -> None:
        self._at_once = self._events = 0

    def event(self, now: float, waits_for: object) -> None:
        """Note that something happens at `now`, in simulated seconds. `waits_for`: a text, or what is called.

        Raises StandsStill.
        """
        self._events += 1
        self._at_once = self._at_once + 1 if now <= self._now else 1
        self._now = max(now, self._now)
        if self._at_once > AT_ONCE_MAX:
            self._fail(f"stands still at {now:.3f} s: {self._at_once - 1} events at that time", waits_for)
        if self._events > EVENTS_MAX:
            self._fail(f"crawls at {now:.3f} s: {self._events - 1} events in a row", waits_for)

    def _fail(self, how: str, waits_for: object) -> None:
        of = "" if self._seed is None else f" of seed {self._seed}"
        raise StandsStill(
            f"the simulation{of} {how}, the last one {_name(waits_for)}",
            hint="longer steps, saves less often, or fewer days; otherwise this is an error in jurymast",
        )


def _name(what: object) -> str:
    while isinstance(what, partial):
        what = what.func
    name: Callable[[str, Any], Any] = partial(getattr, what)
    return what if isinstance(what, str) else str(name("__qualname__", type(what).__qualname__))
