"""When a failed copy is tried again, and which failures are news: by tier, by pair of node and tier, or by
pair of nodes.

Several failures in a row mean that the two of a pair cannot reach each other, for whatever reason: then a
third node takes over. After a while the pair is tried again, each time after twice as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jurymast.core.signatures import ErrorSignature, error_signature

# A failed copy is tried again after this long, with the newest step by then, and after twice as long each
# further time, because storage may hang for hours.
RETRY_S = 5.0
RETRY_MAX_S = 300.0


@dataclass
class _Failing:
    at: float
    times: int
    why: ErrorSignature


@dataclass
class Retries:
    """Retries by tier. `now` is Unix time in seconds."""

    _failing: dict[str, _Failing] = field(default_factory=dict)

    def due(self, tier: str, now: float, *, hurry: bool = False) -> bool:
        """Return True unless it failed a short while ago. In a `hurry` it is tried as often as after one
        failure."""
        last = self._failing.get(tier)
        if last is None:
            return True
        pause_s = RETRY_S if hurry else min(RETRY_MAX_S, RETRY_S * 2.0 ** min(last.times - 1, 10))
        return now >= last.at + pause_s

    def failed_at(self, tier: str) -> float:
        """Return when the last try failed, if none has succeeded since."""
        last = self._failing.get(tier)
        return last.at if last is not None else -math.inf

    def failed(self, tier: str, why: str, now: float) -> bool:
        """Note a failure; returns True if it is news, because the last try did not fail for the same
        reason."""
        last = self._failing.get(tier)
        reason = error_signature("", why)
        self._failing[tier] = _Failing(now, last.times + 1 if last else 1, reason)
        return last is None or last.why != reason

    def succeeded(self, tier: str) -> None:
        self._failing.pop(tier, None)


TRIES = 2
PAUSE_S = 300.0
PAUSE_MAX_S = 14_400.0

Pair = tuple[str, str]  # the node that copies or writes, and the one whose image it is, or the tier


@dataclass
class _Unreachable:
    times: int = 0
    until: float = 0.0


@dataclass
class Reachability:
    """`tries` failures in a row mean that a pair cannot reach each other. Times are the caller's clock, in
    seconds."""

    tries: int = TRIES
    _failing: dict[Pair, _Unreachable] = field(default_factory=dict)

    def failed(self, pair: Pair, now: float) -> bool:
        """Note a failure; returns True if it is news: the first one, and when the pair is given up."""
        known = self._failing.setdefault(pair, _Unreachable())
        known.times += 1
        if known.times >= self.tries:
            known.until = now + min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(known.times - self.tries, 10))
        return known.times <= self.tries

    def worked(self, pair: Pair) -> None:
        self._failing.pop(pair, None)

    def forget(self, node: str) -> None:
        """Forget a node that is gone, or whose agent is a new one."""
        for pair in [pair for pair in self._failing if node in pair]:
            del self._failing[pair]

    def given_up(self, now: float) -> frozenset[Pair]:
        """Return the pairs that are not used now."""
        return frozenset(pair for pair, known in self._failing.items() if known.until > now)
