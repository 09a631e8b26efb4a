"""What follows from what a rank says itself: its saves, what it restored, why it started cold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.effects import Effect, Record
from jurymast.core.run.state import RunState
from jurymast.errors import never

# What agents say again is among so many last saves.
SAVES_KEPT = 64


@dataclass
class RankEvents:
    state: RunState
    checkpoints: Checkpoints
    _saves: deque[msg.RankEvent] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))

    def hear(self, node: str, message: msg.RankEvent, now: float) -> list[Effect]:
        """`now` is Unix time in seconds."""
        said, attempt = message.event, message.attempt
        match said:
            case within.Saved():
                if message in self._saves:  # said over two connections
                    return []
                self._saves.append(message)
                saved = ev.Saved(
                    t=now, attempt=attempt, step=said.step, tier=said.tier, ok=said.ok,
                    stall_s=said.stall_s, size_bytes=said.size_bytes, error=said.error,
                )  # fmt: skip
                return [Record(saved)]
            case within.Restored():
                self.checkpoints.restored(attempt, said.step, said.tier)
                restored = ev.Restored(
                    t=now, attempt=attempt, step=said.step, tier=said.tier, seconds=said.seconds,
                    size_bytes=said.size_bytes, skipped=said.skipped,
                )  # fmt: skip
                return [Record(restored)]
            case within.RestoreWaits():
                rank = self._rank(node, said.local_rank)
                waits = ev.RestoreWaits(
                    t=now, attempt=attempt, node=node, rank=rank, path=said.path, seconds=said.seconds
                )
                return [Record(waits)]
            case within.ColdStart():
                if self.state.cold:
                    return []
                rank = self._rank(node, said.local_rank)
                cold = ev.ColdStart(
                    t=now, attempt=attempt, node=node, rank=rank, why=said.why, seconds=said.seconds
                )
                return [Record(cold)]
            case within.Skipped():
                rank = self._rank(node, said.local_rank)
                return self.checkpoints.skipped(attempt, said.step, rank, said.why, now)
            case _:
                return never(said)

    def _rank(self, node: str, local_rank: int) -> int:
        return self.state.places.get(node, 0) * self.state.ranks_per_node + local_rank
