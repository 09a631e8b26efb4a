"""When a tier that failed is tried again, and which of its failures are news."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

# A copy that failed is tried again, with the newest step then, after this long; after twice as long each
# further time, for storage may hang for hours.
RETRY_S = 5.0
RETRY_MAX_S = 300.0
# Steps, sizes, nodes' numbers and the names of temporary files: different each time, and no news.
_VARIES = re.compile(r"[0-9a-f]*\d[0-9a-f.]*")


@dataclass
class _Failing:
    at: float
    times: int
    why: str


@dataclass
class Retries:
    """By tier. `now` is Unix time in seconds."""

    _failing: dict[str, _Failing] = field(default_factory=dict)

    def due(self, tier: str, now: float, *, hurry: bool = False) -> bool:
        """True unless it failed a short while ago; in a `hurry` it is tried as often as after one failure."""
        last = self._failing.get(tier)
        if last is None:
            return True
        pause_s = RETRY_S if hurry else min(RETRY_MAX_S, RETRY_S * 2.0 ** min(last.times - 1, 10))
        return now >= last.at + pause_s

    def failed_at(self, tier: str) -> float:
        last = self._failing.get(tier)
        return last.at if last is not None else -math.inf

    def failed(self, tier: str, why: str, now: float) -> bool:
        """True when that is news: the last try had not failed for the same reason."""
        last = self._failing.get(tier)
        kind = _VARIES.sub("#", why)
        self._failing[tier] = _Failing(now, last.times + 1 if last else 1, kind)
        return last is None or last.why != kind

    def succeeded(self, tier: str) -> None:
        self._failing.pop(tier, None)
