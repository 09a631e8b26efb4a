"""What follows from a rank's own reports: its saves, what it restored, why it started cold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import asdict

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.effects import Effect, Record
from jurymast.core.run.state import RunState
from jurymast.errors import never

# Repeated reports of agents are among this many last saves.
SAVES_KEPT = 64


@dataclass
class RankEvents:
    state: RunState
    checkpoints: Checkpoints
    _saves: deque[msg.RankEvent] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))

    def hear(self, node: str, message: msg.RankEvent, now: float) -> list[Effect]:
        """Process a report. `now` is Unix time in seconds."""
        said, attempt, fields = message.event, message.attempt, asdict(message.event)
        local_rank = fields.pop("local_rank")
        rank = self.state.places.get(node, 0) * self.state.ranks_per_node + local_rank
        match said:
            case within.Saved():
                if message in self._saves:  # said over two connections
                    return []
                self._saves.append(message)
                return [Record(ev.Saved(t=now, attempt=attempt, **fields))]
            case within.Restored():
                self.checkpoints.restored(attempt, said.step, said.tier)
                return [Record(ev.Restored(t=now, attempt=attempt, **fields))]
            case within.RestoreWaits():
                return [Record(ev.RestoreWaits(t=now, attempt=attempt, node=node, rank=rank, **fields))]
            case within.ColdStart():
                if self.state.cold:
                    return []
                return [Record(ev.ColdStart(t=now, attempt=attempt, node=node, rank=rank, **fields))]
            case within.Skipped():
                return self.checkpoints.skipped(attempt, said.step, rank, said.why, now)
            case _:
                return never(said)
