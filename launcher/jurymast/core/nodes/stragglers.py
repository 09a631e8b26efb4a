"""Collects where the time of every rank's steps goes, and tells who is slow."""

from __future__ import annotations

from dataclasses import replace

from jurymast.core import events as ev
from jurymast.core.effects import Effect, Record, SaveFirst
from jurymast.core.messages import Beat
from jurymast.core.nodes import slowness
from jurymast.core.nodes.slowness import Timed, Windows
from jurymast.core.run.state import Phase, RunState

# A rank that is only slow can wait for a save as long as a drain by hand does.
SAVE_LIMIT_S = 60.0


class Stragglers:
    """What is to be swapped out is saved first: then nothing is done twice for it."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._attempt = 0
        self._windows = Windows(0, 0.0)
        self._waiting: dict[str, ev.Straggling] = {}  # for a save, by what it is asked for

    def beat(self, node: str, beat: Beat, now: float) -> list[Effect]:
        """A heartbeat; now and then one has its ranks' times."""
        state = self._state
        if beat.times is None or beat.attempt != state.attempt:
            return []
        if not state.settings.straggler or state.phase is not Phase.RUNNING or node not in state.places:
            return []
        if self._attempt != state.attempt:
            self._attempt = state.attempt
            self._windows = Windows(len(state.placement) * state.ranks_per_node, state.settings.straggler)
        first = state.places[node] * state.ranks_per_node
        effects: list[Effect] = []
        for local_rank, times in enumerate(beat.times):
            if times[0]:
                found = self._windows.report(first + local_rank, node, Timed(*times))
                if found is not None:
                    effects += self._found(slowness.told(state, now, *found))
        return effects

    def saved(self, why: str, now: float) -> list[Effect]:
        """What was asked for is saved, or could not be."""
        event = self._waiting.pop(why, None)
        return [] if event is None else [Record(replace(event, t=now))]

    def _found(self, event: ev.Straggling) -> list[Effect]:
        current = slowness.is_current(self._state, event)
        if not current or slowness.refusal(self._state, event, saved=True):
            return [Record(event)]
        why = f"the swap of {event.node}, which is slow"
        is_new = why not in self._waiting
        self._waiting[why] = event
        return [SaveFirst(why, SAVE_LIMIT_S)] if is_new else []
