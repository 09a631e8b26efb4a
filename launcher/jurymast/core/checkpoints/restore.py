"""What an attempt restores, and which states are void because a user rolled the run back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.checkpoints.copies import Copies, Key, RestorePlan, Source
from jurymast.core.effects import Effect, Record, Send
from jurymast.core.run.instructions import Launch
from jurymast.core.run.state import RunState


class RestoreChoice:
    """`chosen` is what the newest launched attempt restores."""

    def __init__(self, state: RunState, copies: Copies) -> None:
        self._state, self._copies = state, copies
        self.rollbacks: list[Rollback] = []
        self.chosen: RestorePlan | None = None

    def is_void(self, key: Key) -> bool:
        return bool(self.rollbacks) and any(back.voids(*key) for back in self.rollbacks)

    def go_back(self, step: int, now: float) -> None:
        self.rollbacks.append(Rollback(step, self._state.attempt, now))

    def found_rollbacks(self, rollbacks: Iterable[Rollback]) -> None:
        """Take in the rollbacks found on storage."""
        self.rollbacks += [back for back in rollbacks if back not in self.rollbacks]

    def missed_rollback(self) -> int | None:
        """The step that the newest attempt should have gone back to: the rollback was written to storage
        while no supervisor could be asked, or this one did not know of it yet when it chose."""
        begun, chosen = self._state.attempt, self.chosen
        missed = [back.step for back in self.rollbacks if begun <= back.attempt]
        if chosen is not None:
            missed += [back.step for back in self.rollbacks if back.voids(chosen.step, chosen.attempt)]
        return min(missed, default=None)

    def choose(self, launch: Launch, shared: Mapping[Key, int], now: float) -> list[Effect]:
        """Choose the state of an attempt. Called once per attempt, because all its nodes must continue from
        one state."""
        on_shared = {one: shared[one, attempt] for one, attempt in sorted(shared, key=cp.age)}
        failed, count = self._state.failed_to_restore(), self._state.ranks_per_node
        chosen = self.chosen = cp.plan_restore(self._copies, on_shared, launch.placement, count, failed)
        return [
            Record(
                ev.RestorePlanned(
                    t=now, attempt=launch.attempt, step=chosen.step, tier=chosen.tier,
                    expected_s=round(chosen.expected_s, 6), tiers=dict(chosen.tiers), reason=chosen.reason,
                )
            )
        ]  # fmt: skip

    def message(self, node: str, ranks: range) -> msg.Restore | None:
        """Return what one node's ranks restore; None: they look in the shared tier themselves. Nearly all
        nodes have nearly all images in their own memory. To name other sources for these, too, would take
        most of the time of a launch of thousands of nodes."""
        chosen = self.chosen
        if chosen is None or chosen.tier != cp.MEMORY:
            return None
        key = chosen.step, chosen.attempt
        sources = {rank: self._sources(key, rank, node) for rank in ranks}
        return msg.Restore(step=chosen.step, attempt=chosen.attempt, ranks=sources)

    def _sources(self, key: Key, rank: int, node: str) -> tuple[Source, ...]:
        if self._copies.has_whole(key, rank, node) is not None:
            return ()
        return self._copies.sources(key, rank, node)

    def sources(self, node: str, ask: msg.AskSources) -> Effect:
        """Return the sources for a node that cannot use the image in its own memory."""
        found = self._copies.sources((ask.step, ask.attempt), ask.rank, node)
        sources = tuple(one for one in found if (one.node, one.tier) != (node, cp.MEMORY))
        return Send(node, msg.Sources(step=ask.step, attempt=ask.attempt, rank=ask.rank, sources=sources))
