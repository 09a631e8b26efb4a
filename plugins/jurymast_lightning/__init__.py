"""jurymast's checkpoints for Lightning, in one line each.

    Trainer(..., callbacks=[jurymast_lightning.Checkpoints()])           # then trainer.fit as usual
    checkpoint = jurymast_lightning.checkpointer(state)                  # Fabric: the state of fabric.save

Lightning is imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jurymast_lightning.fabric import checkpointer
    from jurymast_lightning.trainer import Checkpoints

__all__ = ["Checkpoints", "checkpointer"]


def __getattr__(name: str) -> Any:
    if name == "Checkpoints":
        from jurymast_lightning.trainer import Checkpoints

        return Checkpoints
    if name == "checkpointer":
        from jurymast_lightning.fabric import checkpointer

        return checkpointer
    raise AttributeError(f"module 'jurymast_lightning' has no attribute {name!r}")
