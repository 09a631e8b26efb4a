"""jurymast: a resilient job launcher for Slurm clusters that train large models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from jurymast.checkpoint.checkpointer import Checkpointer
    from jurymast.checkpoint.state import RandomState
    from jurymast.executor import submit
    from jurymast.worker.link import step

if getattr(sys, "argv", [])[:1] == ["-m"]:  # before anything else is imported
    from jurymast import interpreter

    if interpreter.is_ours():
        interpreter.leave_directory()

__all__ = ["Checkpointer", "RandomState", "__version__", "step", "submit"]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: `Checkpointer` and `RandomState`, which import torch, `step`,
    `submit`, or `__version__`, "unknown" without an installed package. Raises AttributeError for any other
    name."""
    # torch takes seconds to import, and the command line, the agent and the supervisor never need it.
    if name == "Checkpointer":
        from jurymast.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name == "RandomState":
        from jurymast.checkpoint.state import RandomState

        return RandomState
    if name == "step":
        from jurymast.worker.link import step

        return step
    if name == "submit":
        from jurymast.executor import submit

        return submit
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("jurymast")
        except PackageNotFoundError:  # a checkout on PYTHONPATH
            return "unknown"
    raise AttributeError(f"module 'jurymast' has no attribute {name!r}")
