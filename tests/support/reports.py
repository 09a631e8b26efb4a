"""What agents say of ranks, for tests that say it in their place."""

from __future__ import annotations

from typing import Any

import msgspec

from jurymast.core.state.messages import Hello, RankReport

STEPPING = RankReport(
    step=30, beats=5, explicit=True, phase="stepping", quiet_s=0.1, beat_s=0.1, longest_s=0.2, settled=0,
    idle_s=0.0, stopped_s=0.0,
)  # fmt: skip


def reported(**fields: Any) -> RankReport:
    """A rank that steps, but for these fields."""
    return msgspec.structs.replace(STEPPING, **fields)


def hello(node: str, **fields: Any) -> Hello:
    """An agent whose host waits for its first attempt, but for these fields."""
    first = Hello(
        node=node, allocation="local-1.0", address="127.0.0.1", incarnation="i", pid=1, boot_id="b", gpus=0,
        attempt=0, ranks="waiting", store_port=29500, pids=(), data_port=1,
    )  # fmt: skip
    return msgspec.structs.replace(first, **fields)
