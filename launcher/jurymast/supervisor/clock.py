"""Wall time that never runs backwards within one process."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch, anchored once and then carried by the monotonic clock. `not_before` is the
    last time an earlier supervisor wrote: the journal stays in order even if this node's clock is behind."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
