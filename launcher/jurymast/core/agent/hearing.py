"""What an agent hears of its supervisor, and how long that is usually silent."""

from __future__ import annotations

from collections import deque

from jurymast.core import messages as msg
from jurymast.core.agent.effects import NEVER
from jurymast.core.nodes.heartbeat import BEATS, Arrivals

# Gaps remembered: half a minute. While everything starts, all is slow.
MEMORY = 60


def recent(every_s: float, now: float) -> Arrivals:
    """Of signs of life that come so often."""
    return Arrivals(every_s, now, deque(maxlen=MEMORY))


class Hearing:
    """`now` is monotonic, in seconds. `heir`: this node's place among those that are to take over first, from
    0 on, None if it is none of them or was not told yet; `epoch`: of the supervisor, None before its first
    answer."""

    def __init__(self, answer_every_s: float) -> None:
        """So often a supervisor answers heartbeats, in seconds."""
        self._answer_every_s = answer_every_s
        self.epoch: int | None = None
        self.heir: int | None = None
        self.heard_at = 0.0
        self.suspect_at = NEVER  # silence from then on is unusual for this supervisor,
        self.late_at = NEVER  # and from then on for one that answers on time

    def begin(self, now: float) -> None:
        """A new connection."""
        self._answers = recent(self._answer_every_s, now)
        self.epoch = self.heir = None
        self._heard(now)

    def heard(self, order: msg.Order, now: float) -> None:
        if isinstance(order, msg.GoOn):
            self._answers.beat(now)
            self.epoch, self.heir = order.epoch, order.heir
        self._heard(now)

    def _heard(self, now: float) -> None:
        self.heard_at, self.suspect_at = now, now + self._answers.limit_s()
        self.late_at = now + BEATS * self._answer_every_s
