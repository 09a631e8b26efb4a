"""Health probe: host."""

from __future__ import annotations

from jurymast.health.probe import Context, Probe


def probe(context: Context) -> Probe | None:
    """None: nothing to see on this machine."""
    return None
