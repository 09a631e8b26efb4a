"""What an agent's machines want done. What takes time says which event brings its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jurymast.core import messages as msg

NEVER = math.inf
Obeyed = msg.GoOn | msg.Cadence | msg.LeaveVerdict | msg.KeeperOrder


@dataclass(frozen=True)
class WakeAt:
    """`tick` at this time on the machines' clock, in seconds; the newest holds, NEVER is never."""

    at: float


@dataclass(frozen=True)
class Send:
    """To the supervisor."""

    message: msg.ToSupervisor


@dataclass(frozen=True)
class Beat:
    """A heartbeat now, with how far these ranks of `attempt` are."""

    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Obey:
    """Nothing is left to decide here about this order: carry it out."""

    order: Obeyed


@dataclass(frozen=True)
class Leave:
    """End this agent, and its ranks. `over`: so is the run, with this `exit_code`; nobody restores from this
    node's disk."""

    over: bool = False
    exit_code: int = 0


# The ranks and their host.


@dataclass(frozen=True)
class StartHost:
    """Start a torchrun host; what it says and its end are events."""


@dataclass(frozen=True)
class Prepare:
    """The ranks of earlier attempts are gone, those of this order are about to start: make room for them.
    Answered by `prepared`, once nothing holds a device any more."""

    order: msg.Launch


@dataclass(frozen=True)
class StartRanks:
    """Tell the host. `cold`: with nothing loaded ahead."""

    order: msg.Launch
    cold: bool


@dataclass(frozen=True)
class StopRanks:
    """Tell the host to stop the ranks of this attempt and of those before it."""

    attempt: int


@dataclass(frozen=True)
class TakeStacks:
    """See where these ranks stand, and tell the supervisor. Answered by `stacks_taken`."""

    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class LookAtRanks:
    """See where these ranks stand, and tell the supervisor, who has asked for it by this `number`."""

    number: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class KillRanks:
    """At once, with what they have started."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class KillHost:
    """At once; its end is an event."""


@dataclass(frozen=True)
class StartProbes:
    """Look after the node's health: nothing else on it is in a hurry."""


# Tests of this node. Each set of processes has a number, from 1 on.


@dataclass(frozen=True)
class StartTests:
    """So many processes that test this node. Answered by `tests_started`."""

    number: int
    count: int


@dataclass(frozen=True)
class TestDevices:
    """Each by itself. Answered by `tests_answered`."""

    number: int


@dataclass(frozen=True)
class TestTogether:
    """All of them, as ranks from `rank` on of a `world` that meets at `host` ("": here) under this name.
    Answered by `tests_answered`."""

    number: int
    name: str
    host: str
    port: int
    limit_s: float
    world: int
    rank: int


@dataclass(frozen=True)
class EndTests:
    """At once. What they would have said is no news any more."""

    number: int


# The connection.


@dataclass(frozen=True)
class Connect:
    """To the first of these (host, port) that answers. Answered by `connected` or `unreached`, unless there
    was a Greet meanwhile."""

    targets: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Find:
    """See in the run directory where the newest supervisor listens. Answered by `found`, unless there was a
    Greet meanwhile."""


@dataclass(frozen=True)
class Greet:
    """A supervisor is there: give up all other tries, and say hello to it."""


@dataclass(frozen=True)
class HangUp:
    """Close the connection."""


# Succession.


@dataclass(frozen=True)
class ReadPulse:
    """In the run directory. Answered by `pulse`."""


@dataclass(frozen=True)
class StandBy:
    """Get a process ready that can supervise at once. Its end is no event."""


@dataclass(frozen=True)
class EndStandby:
    """End that process: another node is the first to take over."""


@dataclass(frozen=True)
class StartSupervisor:
    """On this node: the process that stands by, or a new one. Its end is an event. It replaces the supervisor
    of the epoch `after`, unless another does, which nobody has heard for `silent_s`."""

    after: int
    silent_s: float


# Checkpoints.


@dataclass(frozen=True)
class StartWrite:
    """Write images of this node. Its end is an event; one that was cancelled says nothing else."""

    order: msg.Write


@dataclass(frozen=True)
class CancelWrite:
    """Stop writing."""

    id: str


@dataclass(frozen=True)
class WarmWriter:
    """Get the process ready that brings shared checkpoints together."""


@dataclass(frozen=True)
class SayForeseen:
    """Tell the supervisor how large this node's images will be, and what room there is now."""

    image_bytes: int
    own_bytes: int


ToRanks = (
    StartHost | Prepare | StartRanks | StopRanks | TakeStacks | LookAtRanks | KillRanks | KillHost
    | StartProbes
)  # fmt: skip
ForTests = StartTests | TestDevices | TestTogether | EndTests
ForCheckpoints = StartWrite | CancelWrite | WarmWriter | SayForeseen
ToOthers = (
    Send | Beat | Obey | Leave | Connect | Find | Greet | HangUp | ReadPulse | StandBy | EndStandby
    | StartSupervisor
)  # fmt: skip
Effect = WakeAt | ToOthers | ToRanks | ForTests | ForCheckpoints
