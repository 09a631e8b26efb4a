"""Which nodes cannot copy from which, or write to which tier: what two cannot bring about, a third one does.

Some failures in a row say so, whatever the reason is. After a while the two are tried again, each time after
twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIES = 2
PAUSE_S = 300.0
PAUSE_MAX_S = 14_400.0

Pair = tuple[str, str]  # the node that copies or writes, and the one whose image it is, or the tier


@dataclass
class _Failing:
    times: int = 0
    until: float = 0.0


@dataclass
class Reach:
    """`tries`: so many failures in a row. Times are the caller's clock, in seconds."""

    tries: int = TRIES
    _failing: dict[Pair, _Failing] = field(default_factory=dict)

    def failed(self, pair: Pair, now: float) -> bool:
        """True when that is news: at the first time, and when the two are given up."""
        known = self._failing.setdefault(pair, _Failing())
        known.times += 1
        if known.times >= self.tries:
            known.until = now + min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(known.times - self.tries, 10))
        return known.times <= self.tries

    def worked(self, pair: Pair) -> None:
        self._failing.pop(pair, None)

    def forget(self, node: str) -> None:
        """It is gone, or another agent of it is here."""
        for pair in [pair for pair in self._failing if node in pair]:
            del self._failing[pair]

    def given_up(self, now: float) -> frozenset[Pair]:
        """Pairs that are not asked for now."""
        return frozenset(pair for pair, known in self._failing.items() if known.until > now)
