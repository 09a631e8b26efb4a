"""Checkpoints: what a training script uses, the tiers they live in, and their format on disk.

`directory` has the format and needs no torch; everything else here does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jurymast.checkpoint.checkpointer import Checkpointer
    from jurymast.checkpoint.state import RandomState

__all__ = ["Checkpointer", "RandomState"]


def __getattr__(name: str) -> Any:
    # Commands read the format, and must not wait for torch's import.
    if name == "Checkpointer":
        from jurymast.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name == "RandomState":
        from jurymast.checkpoint.state import RandomState

        return RandomState
    raise AttributeError(f"module 'jurymast.checkpoint' has no attribute {name!r}")
