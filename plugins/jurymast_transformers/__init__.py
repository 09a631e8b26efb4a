"""jurymast's checkpoints for Hugging Face's Trainer, in one line:

    jurymast_transformers.train(trainer)    # in place of trainer.train()

transformers is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["train"]


def train(trainer: Trainer, **options: Any) -> Any:
    """Run `trainer.train()` from the newest checkpoint, and return what it returns; `options` are the
    Checkpointer's. Saves after a step whenever a save is due; the Trainer's own saves continue. Raises
    CheckpointError for a transformers older than 5."""
    from jurymast_transformers.trainer import train_on

    return train_on(trainer, options)
