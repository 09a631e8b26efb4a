"""Collects where the time of every rank's steps goes, and tells who is slow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from jurymast.core import events as ev
from jurymast.core import straggler
from jurymast.core.messages import Beat
from jurymast.core.state import Phase, RunState
from jurymast.core.straggler import Slow, Timed, Windows

# A rank that is only slow can wait for a save as long as a drain by hand does.
SAVE_LIMIT_S = 60.0


class Stragglers:
    """`feed` takes an event, `spawn` runs a task, `save_first` asks for a save and waits for it."""

    def __init__(
        self,
        state: RunState,
        feed: Callable[[ev.Event], None],
        now: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        save_first: Callable[[str, float], Awaitable[bool]],
    ) -> None:
        self._state = state
        self._feed = feed
        self._now = now
        self._spawn = spawn
        self._save_first = save_first
        self._attempt = 0
        self._windows = Windows(0, 0.0)

    def beat(self, node: str, beat: Beat) -> None:
        """A heartbeat; now and then one has its ranks' times."""
        state = self._state
        if beat.times is None or beat.attempt != state.attempt:
            return
        if not state.settings.straggler or state.phase is not Phase.RUNNING or node not in state.places:
            return
        if self._attempt != state.attempt:
            self._attempt = state.attempt
            self._windows = Windows(len(state.placement) * state.ranks_per_node, state.settings.straggler)
        first = state.places[node] * state.ranks_per_node
        for local_rank, times in enumerate(beat.times):
            if times[0]:
                found = self._windows.report(first + local_rank, node, Timed(*times))
                if found is not None:
                    self._spawn(self._tell(*found))

    async def _tell(self, slow: Slow, since_s: float) -> None:
        """What is to be swapped out is saved first: then nothing is done twice for it."""
        event = straggler.told(self._state, self._now(), slow, since_s)
        current = straggler.is_current(self._state, event)
        if current and not straggler.refusal(self._state, event, saved=True):
            await self._save_first(f"the swap of {slow.node}, which is slow", SAVE_LIMIT_S)
        self._feed(replace(event, t=self._now()))
