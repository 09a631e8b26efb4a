"""A warning that waits for people. Apart from the rest of the state: agents start sooner without that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Alert:
    """Something that people must decide, because no node may be blamed for it. It goes on while more `nodes`
    come, the last of them at `until`; alerts of one `subject` soon after each other are one."""

    subject: str
    at: float
    until: float
    message: str
    nodes: dict[str, None]
