"""How late the supervisor's own loop is: no evidence against anybody, and agents are told to be patient."""

from __future__ import annotations

from collections.abc import Callable

from jurymast.core import events as ev
from jurymast.core.heartbeat import patience_s

# A loop that stood still for so long is told of.
TOLD_S = 2.0
# How late it was counts half after a minute or two.
KEPT, MOST_S = 0.999, 5.0


class Lateness:
    """`feed` takes an event, `now` gives its time."""

    def __init__(
        self, heartbeat_s: float, feed: Callable[[ev.Event], None], now: Callable[[], float]
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._feed, self._now = feed, now
        self._late_s = 0.0

    def overslept(self, seconds: float) -> None:
        """By so much the loop was late at its newest look."""
        self._late_s = min(MOST_S, max(seconds, KEPT * self._late_s))
        if seconds > TOLD_S:
            text = f"the supervisor stood still for {seconds:.1f} s: no node is blamed for that time"
            self._feed(ev.Noted(t=self._now(), message=text))

    def patience_s(self, agents: int) -> float:
        """What each of so many agents is to have, in seconds."""
        return round(patience_s(self._heartbeat_s, agents, self._late_s), 1)
