"""jurymast: a resilient job launcher for Slurm clusters that train large models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jurymast.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and the command line, the agent and the supervisor never need it.
    if name == "Checkpointer":
        from jurymast.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module 'jurymast' has no attribute {name!r}")
