"""Its model."""

from .layers import build

__all__ = ["build"]
