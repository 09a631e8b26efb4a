"""Checkpoints: the interface for training scripts, the tiers that hold them, and their format on disk.

`directory` defines the format and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jurymast.checkpoint.checkpointer import Checkpointer
    from jurymast.checkpoint.state import HeldRandomState, RandomState

__all__ = ["Checkpointer", "HeldRandomState", "RandomState"]


def __getattr__(name: str) -> Any:
    # Commands read the format without waiting for torch's import.
    if name == "Checkpointer":
        from jurymast.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name in ("HeldRandomState", "RandomState"):
        from jurymast.checkpoint import state

        return getattr(state, name)
    raise AttributeError(f"module 'jurymast.checkpoint' has no attribute {name!r}")
