"""Events that a rank sent itself: its saves, what it restored, why it started cold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.state import RunState
from jurymast.errors import never
from jurymast.supervisor.tiers import Tiers


@dataclass
class RankEvents:
    """`feed` journals an event, `now` is the supervisor's clock."""

    state: RunState
    tiers: Tiers
    feed: Callable[[ev.Event], None]
    now: Callable[[], float]

    def hear(self, node: str, message: msg.RankEvent) -> None:
        said, attempt = message.event, message.attempt
        match said:
            case within.Saved():
                self.feed(
                    ev.Saved(
                        t=self.now(), attempt=attempt, step=said.step, tier=said.tier, ok=said.ok,
                        stall_s=said.stall_s, size_bytes=said.size_bytes, error=said.error,
                    )
                )  # fmt: skip
            case within.Restored():
                self.feed(
                    ev.Restored(
                        t=self.now(), attempt=attempt, step=said.step, tier=said.tier, seconds=said.seconds,
                        size_bytes=said.size_bytes, skipped=said.skipped,
                    )
                )  # fmt: skip
                self.tiers.restored(attempt, said.step, said.tier)
            case within.ColdStart():
                if not self.state.cold:
                    rank = self._rank(node, said.local_rank)
                    self.feed(
                        ev.ColdStart(
                            t=self.now(), attempt=attempt, node=node, rank=rank, why=said.why,
                            seconds=said.seconds,
                        )
                    )  # fmt: skip
            case within.Skipped():
                self.tiers.skipped(said.step, self._rank(node, said.local_rank), said.why)
            case _:
                never(said)

    def _rank(self, node: str, local_rank: int) -> int:
        return self.state.places.get(node, 0) * self.state.ranks_per_node + local_rank
