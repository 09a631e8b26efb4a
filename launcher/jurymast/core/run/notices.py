"""What people want to be told of a run while nobody looks at it, and how much of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.settings import Receiver

# A receiver gets so many notices in an hour, and then only how many more there were.
MOST, WITHIN_S = 6, 3600.0


@dataclass(frozen=True)
class Notice:
    """`kind` is one of settings.NOTICES. `key` is another for each notice of a run, so that nobody is told
    twice; `number` is that of the incident or the alert it is about."""

    key: str
    kind: str
    t: float
    number: int = 0

    @property
    def last(self) -> bool:
        return self.kind in ("stopped", "finished")


def due(state: RunState, told: Collection[str]) -> list[Notice]:
    """Return what is to be told of the run as it is, but for the keys `told`, oldest first."""
    found: list[Notice] = []
    for one in state.incidents:
        if one.action:
            t = one.decided_at or one.detected_at
            found.append(Notice(f"incident {one.id}", "incident", t, one.id))
            if one.action == "swap":
                found.append(Notice(f"spare {one.id}", "spare", t, one.id))
    for number, alert in enumerate(state.alerts):  # of which only the newest are kept
        found.append(Notice(f"alert {alert.subject} {alert.at}", "alert", alert.at, number))
    found.sort(key=lambda notice: notice.t)
    if state.ended:
        kind = "finished" if state.phase is Phase.SUCCEEDED else "stopped"
        found.append(Notice(kind, kind, state.ended_at or state.now))
    return [notice for notice in found if notice.key not in told]


@dataclass
class Quota:
    """Which notices one receiver gets. The run's end is always told."""

    receiver: Receiver
    _times: list[float] = field(default_factory=list)
    held_back: int = 0

    def wants(self, notice: Notice) -> bool:
        return notice.kind in self.receiver.when

    def takes(self, notice: Notice, now: float) -> int | None:
        """Return how many notices were held back before this one; None if it is held back as well."""
        self._times = [t for t in self._times if now - t < WITHIN_S]
        if len(self._times) >= MOST and not notice.last:
            self.held_back += 1
            return None
        self._times.append(now)
        before, self.held_back = self.held_back, 0
        return before
