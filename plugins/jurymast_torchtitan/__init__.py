"""jurymast's checkpoints for loops in the style of torchtitan's, in place of its checkpoint manager:

    self.checkpointer = jurymast_torchtitan.CheckpointManager(states)
    self.checkpointer.load()                      # True if a state was restored
    self.checkpointer.save(self.step)             # after every step; it saves when it is time

`states` maps names to objects with `state_dict` and `load_state_dict`: the model's parts, optimizers,
schedules, the loader, and the trainer with its step.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jurymast import Checkpointer

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Stands in for torchtitan's checkpoint manager. `options` are the Checkpointer's."""

    def __init__(self, states: MutableMapping[str, Any], **options: Any) -> None:
        self._states, self._options = states, options
        self._made: Checkpointer | None = None

    @property
    def _checkpoint(self) -> Checkpointer:
        """Made at its first use: until then, states may be added."""
        if self._made is None:
            import jurymast

            self._made = jurymast.Checkpointer(self._states, **self._options)
        return self._made

    def load(self, step: int = -1) -> bool:
        """Restore the newest state; returns whether there was one. Raises ValueError for another `step`,
        which torchtitan's own manager could load: a run goes back for all ranks, and for good."""
        if step != -1:
            raise ValueError(f"to go back to step {step}: jurymast checkpoints RUN rollback {step}")
        return self._checkpoint.restore() > 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        if last_step:
            self._checkpoint.save(curr_step)
        else:
            self._checkpoint.step(curr_step)

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: a save is one copy in memory, which is complete when it returns."""

    def close(self) -> None:
        """Do nothing: the node's agent writes the saved states to storage."""
