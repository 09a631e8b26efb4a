"""What agents say of ranks, for tests that say it in their place."""

from __future__ import annotations

from typing import Any

import msgspec

from jurymast.wire.messages import RankReport

STEPPING = RankReport(
    step=30, beats=5, explicit=True, phase="stepping", quiet_s=0.1, beat_s=0.1, longest_s=0.2, settled=0,
    idle_s=0.0, stopped_s=0.0,
)  # fmt: skip


def reported(**fields: Any) -> RankReport:
    """A rank that steps, but for these fields."""
    return msgspec.structs.replace(STEPPING, **fields)
