"""What machines want done. Whoever drives one carries its effects out, in their order."""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.core.events import Event
from jurymast.core.message import ToAgent
from jurymast.core.run.instructions import Instruction


@dataclass(frozen=True)
class Send:
    """To the agent of `node`, if it is connected: one that is not hears what matters when it joins."""

    node: str
    message: ToAgent


@dataclass(frozen=True)
class Record:
    """The event goes into the journal, and `core.run.machine` decides what follows from it. Never leaves
    `core.supervision`."""

    event: Event


@dataclass(frozen=True)
class Answer:
    """GoOn to the agent of `node`, with the time that it is by then: its heartbeats are heard, and so many of
    the messages that it keeps until then."""

    node: str
    patience_s: float
    heard: int = 0
    epoch: int = 0
    heir: int | None = None


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
    """Slurm is to let `job` go on without `node`. Answered by `given_back`, which may take long."""

    job: str
    node: str


@dataclass(frozen=True)
class SaveFirst:
    """Have all ranks save, within `limit_s` seconds. Answered by `saved`, with `why`. Never leaves
    `core.supervision`."""

    why: str
    limit_s: float


@dataclass(frozen=True)
class Journal:
    """Write this event down, and what was decided on it. `flush`: it is to be on the disk, if that can be had
    soon, before what follows."""

    event: Event
    decided: tuple[Instruction, ...] = ()
    flush: bool = False


@dataclass(frozen=True)
class Fence:
    """Write into the run directory that this is the newest attempt: earlier ones publish no checkpoint any
    more. Answered by `fenced`."""

    attempt: int


@dataclass(frozen=True)
class WhyEnding:
    """Ask Slurm why the job ends. Answered by `why_ending`."""

    node: str = ""
    connection: int = 0


@dataclass(frozen=True)
class AskSuperseded:
    """See in the run directory whether another supervisor has taken over. Answered by `superseded`."""


@dataclass(frozen=True)
class End:
    """Everything is decided, and all agents have gone or had time to: end this process."""


@dataclass(frozen=True)
class GiveWay:
    """Another supervisor has taken over: end this process, and nothing else."""


Effect = (
    Send | Record | Answer | Disconnect | Pulse | GiveBack | SaveFirst | Journal | Fence | WhyEnding
    | AskSuperseded | End | GiveWay
)  # fmt: skip
