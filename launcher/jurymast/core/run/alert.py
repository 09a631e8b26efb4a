"""A warning that waits for people. It has a module of its own so that agents, which do not need the rest of
the state, start sooner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Alert:
    """Something that people must decide, because no node may be blamed for it. It lasts while more `nodes`
    are affected, the last of them at `until`; alerts of one `subject` soon after each other are one."""

    subject: str
    at: float
    until: float
    message: str
    nodes: dict[str, None]
