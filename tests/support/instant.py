"""A Checkpointer that keeps every step's state in this process, so that a test can restore each of them in
milliseconds. It converts states as the real one does, and only skips storage."""

from __future__ import annotations

import pickle
from collections.abc import MutableMapping
from typing import Any

from jurymast.checkpoint.state import ScriptState


class Kept:
    """What was saved, as bytes by step. Of these `newest` is the one that is restored; 0 for none."""

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}
        self.newest = 0
        self.samples = self.tokens = 0.0

    def at(self, step: int) -> Kept:
        other = Kept()
        other.states, other.newest = {step: self.states[step]}, step
        return other


class InstantCheckpointer:
    """`directory` is a Kept. Saves at every step."""

    def __init__(self, state: MutableMapping[str, Any], *, directory: Kept) -> None:
        self._state, self._kept = ScriptState(state), directory

    def restore(self) -> int:
        step = self._kept.newest
        if step:
            self._state.trees()  # as the real one does, to ask for memory
            trees = pickle.loads(self._kept.states[step])
            self._state.apply(trees, {key: {} for key in trees})
            self._state.trees()
        return step

    def batch_is_kept(self, why_not: str = "") -> None:
        """Always is: there is one rank."""

    def step(self, step: int, *, samples: float = 0, tokens: float = 0) -> None:
        self._kept.samples += samples
        self._kept.tokens += tokens
        self._keep(step)  # not by `save`, which an adapter may override

    def save(self, step: int) -> bool:
        self._keep(step)
        return True

    def _keep(self, step: int) -> None:
        if step not in self._kept.states:
            self._kept.states[step] = pickle.dumps(self._state.trees())
