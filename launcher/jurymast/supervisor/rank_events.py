"""Events that a rank sent itself: its saves, what it restored, why it started cold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jurymast.core import events as ev
from jurymast.core.state import RunState
from jurymast.supervisor.tiers import Tiers
from jurymast.wire.messages import Message


@dataclass
class RankEvents:
    """`feed` journals an event, `now` is the supervisor's clock."""

    state: RunState
    tiers: Tiers
    feed: Callable[[ev.Event], None]
    now: Callable[[], float]

    def hear(self, node: str, message: Message) -> None:
        """A malformed one is noted."""
        told, attempt = message["event"], message["attempt"]
        if told.get("event") == "Skipped":
            self.tiers.skipped(int(told["step"]), self._rank_of(node, told), str(told.get("why", "")))
            return
        fields = {key: value for key, value in told.items() if key not in ("local_rank", "t")}
        if fields.get("event") == "ColdStart":
            if self.state.cold:
                return
            fields |= {"node": node, "rank": self._rank_of(node, told)}
        elif fields.get("event") not in ("Saved", "Restored"):
            return
        try:
            event = ev.from_json({**fields, "t": self.now(), "attempt": attempt})
        except (KeyError, TypeError) as error:
            event = ev.Noted(t=self.now(), node=node, message=f"malformed event from a rank: {error}")
        self.feed(event)
        if isinstance(event, ev.Restored):
            self.tiers.restored(event.attempt, event.step, event.tier)

    def _rank_of(self, node: str, event: Message) -> int:
        place = self.state.places.get(node, 0)
        return place * self.state.ranks_per_node + int(event.get("local_rank") or 0)
