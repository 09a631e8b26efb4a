"""What machines want done. Whoever drives one carries its effects out, in their order."""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.core.events import Event
from jurymast.core.message import ToAgent


@dataclass(frozen=True)
class Send:
    """To the agent of `node`, if it is connected: one that is not hears what matters when it joins."""

    node: str
    message: ToAgent


@dataclass(frozen=True)
class Record:
    """The event goes into the journal, and `core.run` decides what follows from it."""

    event: Event


@dataclass(frozen=True)
class Answer:
    """GoOn to the agent of `node`, with the time that it is by then: its heartbeats are heard."""

    node: str
    patience_s: float


@dataclass(frozen=True)
class Disconnect:
    """Close the connection to the agent of `node`, if there is one."""

    node: str


@dataclass(frozen=True)
class Pulse:
    """Whether this supervisor shows that it lives. While it does not, another may take over."""

    on: bool


@dataclass(frozen=True)
class GiveBack:
    """Slurm is to let `job` go on without `node`. Answered to `core.nodes.sick`, which may take long."""

    job: str
    node: str


@dataclass(frozen=True)
class SaveFirst:
    """Have all ranks save, within `limit_s` seconds. Answered to `core.nodes.stragglers`, by `why`."""

    why: str
    limit_s: float


Effect = Send | Record | Answer | Disconnect | Pulse | GiveBack | SaveFirst
