"""Which messages of agents may be acknowledged: those of which every later supervisor will know.

A supervisor that has been replaced may not know it yet, and what it still writes does not count. But one that
takes over claims its epoch before it reads the journal: whatever was on the disk when a look began that found
no newer epoch, it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Disk:
    """What a supervisor knows of the run directory: it has not answered for `waits_s` seconds; so many
    entries were `appended` to the journal, and so many of them are `written` to the disk; and the last look
    that found no newer supervisor began at `looked_at`."""

    waits_s: float = 0.0
    appended: int = 0
    written: int = 0
    looked_at: float = -math.inf

    @property
    def unwritten(self) -> bool:
        """Whether some lines of the journal are not on the disk yet."""
        return self.written < self.appended


UNASKED = Disk()


@dataclass(frozen=True)
class _Stage:
    """What was heard before `heard_until` is appended (as one of the first `entries`), or was written by
    `written_at`."""

    heard_until: float
    entries: int = 0
    written_at: float = math.inf


class Known:
    """`until`: what was heard before is known to every later supervisor."""

    def __init__(self) -> None:
        self.until = -math.inf
        self._appended: _Stage | None = None
        self._written: _Stage | None = None

    def on_time(self, disk: Disk, now: float) -> None:
        written, appended = self._written, self._appended
        if written is not None and disk.looked_at >= written.written_at:
            self.until, self._written = written.heard_until, None
        if appended is not None and self._written is None and disk.written >= appended.entries:
            self._written = _Stage(appended.heard_until, written_at=now)
            self._appended = None
        if self._appended is None:
            self._appended = _Stage(now, disk.appended)
