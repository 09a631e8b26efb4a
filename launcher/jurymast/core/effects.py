"""What machines want done. Their caller carries the effects out, in order."""

from __future__ import annotations

import msgspec

from jurymast.core.events import Event
from jurymast.core.message import ToAgent
from jurymast.core.run.instructions import Instruction


class Send(msgspec.Struct, frozen=True):
    """Send this to the agent of `node`, if it is connected. Other agents learn what matters when they
    join."""

    node: str
    message: ToAgent


class Record(msgspec.Struct, frozen=True):
    """Write the event to the journal, and let `core.run.machine` decide what follows. Used within
    `core.supervision` only."""

    event: Event


class Answer(msgspec.Struct, frozen=True):
    """Send GoOn to the agent of `node`, with the current time: its heartbeats arrive, and so many of the
    messages that it keeps until then."""

    node: str
    patience_s: float
    heard: int = 0
    epoch: int = 0
    heir: int | None = None


class Disconnect(msgspec.Struct, frozen=True):
    """Close the connection to the agent of `node`, if there is one."""

    node: str


class Pulse(msgspec.Struct, frozen=True):
    """Whether this supervisor shows that it is alive. While it does not, another may take over."""

    on: bool


class GiveBack(msgspec.Struct, frozen=True):
    """Have Slurm remove `node` from the running `job`. Answered by `given_back`, which may take long."""

    job: str
    node: str


class SaveFirst(msgspec.Struct, frozen=True):
    """Have all ranks save for what `why` says, and then record `then`: of several with the same `why` the
    newest. Used within `core.supervision` only."""

    why: str
    then: Event


class Journal(msgspec.Struct, frozen=True):
    """Write this event and the decisions on it to the journal. `flush`: bring it to the disk before what
    follows, if that is possible soon."""

    event: Event
    decided: tuple[Instruction, ...] = ()
    flush: bool = False


class Fence(msgspec.Struct, frozen=True):
    """Write to the run directory that this is the newest attempt, so that earlier ones publish no more
    checkpoints. Answered by `fenced`."""

    attempt: int


class WhyEnding(msgspec.Struct, frozen=True):
    """Ask Slurm why the job ends. Answered by `why_ending`."""

    node: str = ""
    connection: int = 0


class AskSuperseded(msgspec.Struct, frozen=True):
    """Check in the run directory whether another supervisor has taken over. Answered by `superseded`."""


class End(msgspec.Struct, frozen=True):
    """End this process: everything is decided, and all agents have left or had time to."""


class GiveWay(msgspec.Struct, frozen=True):
    """End this process and nothing else: another supervisor has taken over."""


Effect = (
    Send | Record | Answer | Disconnect | Pulse | GiveBack | SaveFirst | Journal | Fence | WhyEnding
    | AskSuperseded | End | GiveWay
)  # fmt: skip
