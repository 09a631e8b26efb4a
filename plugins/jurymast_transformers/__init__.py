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
    """What `trainer.train()` returns, from the newest checkpoint on; `options` are the Checkpointer's. Saves
    after those steps for which it is time; what the Trainer saves itself it saves besides. Raises
    CheckpointError for a transformers older than 5."""
    from jurymast_transformers.trainer import train_on

    return train_on(trainer, options)
