"""Words for people that several decisions need."""

from __future__ import annotations

from collections.abc import Sequence

# Of the nodes of an incident; a switch takes hundreds along.
NODES_TOLD = 20


def some(names: Sequence[str], most: int = 6, separator: str = ", ") -> str:
    """The names, the later ones counted only."""
    if len(names) <= most:
        return separator.join(names)
    return f"{separator.join(names[:most])} and {len(names) - most} more"


def size(count: int) -> str:
    """Bytes of memory: 1.5 GiB."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
