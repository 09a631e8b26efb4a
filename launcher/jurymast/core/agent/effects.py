"""What an agent's machines want done. What takes time says which event brings its answer."""

from __future__ import annotations

import math

from msgspec import Struct

from jurymast.core import messages as msg

NEVER = math.inf
Obeyed = msg.GoOn | msg.CadenceSet | msg.LeaveVerdict | msg.KeeperOrder


class WakeAt(Struct, frozen=True):
    """`tick` at this time on the machines' clock, in seconds; the newest holds, NEVER is never."""

    at: float


class Send(Struct, frozen=True):
    """To the supervisor."""

    message: msg.ToSupervisor


class Beat(Struct, frozen=True):
    """A heartbeat now, with how far these ranks of `attempt` are."""

    attempt: int
    pids: tuple[int, ...]


class Obey(Struct, frozen=True):
    """Nothing is left to decide here about this order: carry it out."""

    order: Obeyed


class Leave(Struct, frozen=True):
    """End this agent, and its ranks. `over`: so is the run, with this `exit_code`; nobody restores from this
    node's disk."""

    over: bool = False
    exit_code: int = 0


# The ranks and their host.


class StartHost(Struct, frozen=True):
    """Start a torchrun host; what it says and its end are events."""


class Prepare(Struct, frozen=True):
    """The ranks of earlier attempts are gone, those of this order are about to start: make room for them.
    Answered by `prepared`, once nothing holds a device any more."""

    order: msg.Launch


class StartRanks(Struct, frozen=True):
    """Tell the host. `cold`: with nothing loaded ahead."""

    order: msg.Launch
    cold: bool


class StopRanks(Struct, frozen=True):
    """Tell the host to stop the ranks of this attempt and of those before it."""

    attempt: int


class TakeStacks(Struct, frozen=True):
    """See where these ranks stand, and tell the supervisor. Answered by `stacks_taken`."""

    attempt: int
    pids: tuple[int, ...]


class LookAtRanks(Struct, frozen=True):
    """See where these ranks stand, and tell the supervisor, who has asked for it by this `number`."""

    number: int
    pids: tuple[int, ...]


class KillRanks(Struct, frozen=True):
    """At once, with what they have started."""

    pids: tuple[int, ...]


class KillHost(Struct, frozen=True):
    """At once; its end is an event."""


class StartProbes(Struct, frozen=True):
    """Look after the node's health: nothing else on it is in a hurry."""


# Tests of this node. Each set of processes has a number, from 1 on.


class StartTests(Struct, frozen=True):
    """So many processes that test this node. Answered by `tests_started`."""

    number: int
    count: int


class TestDevices(Struct, frozen=True):
    """Each by itself. Answered by `tests_answered`."""

    number: int


class TestTogether(Struct, frozen=True):
    """All of them, as ranks from `rank` on of a `world` that meets at `host` ("": here) under this name.
    Answered by `tests_answered`."""

    number: int
    name: str
    host: str
    port: int
    limit_s: float
    world: int
    rank: int


class EndTests(Struct, frozen=True):
    """At once. What they would have said is no news any more."""

    number: int


# The connection.


class Connect(Struct, frozen=True):
    """To the first of these (host, port) that answers. Answered by `connected` or `unreached`, unless there
    was a Greet meanwhile."""

    targets: tuple[tuple[str, int], ...]


class FindSupervisor(Struct, frozen=True):
    """See in the run directory where the newest supervisor listens. Answered by `found`, unless there was a
    Greet meanwhile."""


class Greet(Struct, frozen=True):
    """A supervisor is there: give up all other tries, and say hello to it."""


class HangUp(Struct, frozen=True):
    """Close the connection."""


# Succession.


class ReadPulse(Struct, frozen=True):
    """In the run directory. Answered by `pulse`."""


class StandBy(Struct, frozen=True):
    """Get a process ready that can supervise at once. Its end is no event."""


class EndStandby(Struct, frozen=True):
    """End that process: another node is the first to take over."""


class StartSupervisor(Struct, frozen=True):
    """On this node: the process that stands by, or a new one. Its end is an event. It replaces the supervisor
    of the epoch `after`, unless another does, which nobody has heard for `silent_s`."""

    after: int
    silent_s: float


# Checkpoints.


class StartWrite(Struct, frozen=True):
    """Write images of this node. Its end is an event; one that was cancelled says nothing else."""

    order: msg.Write


class CancelWrite(Struct, frozen=True):
    """Stop writing."""

    id: str


class WarmWriter(Struct, frozen=True):
    """Get the process ready that brings shared checkpoints together."""


class SayForeseen(Struct, frozen=True):
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
    Send | Beat | Obey | Leave | Connect | FindSupervisor | Greet | HangUp | ReadPulse | StandBy | EndStandby
    | StartSupervisor
)  # fmt: skip
Effect = WakeAt | ToOthers | ToRanks | ForTests | ForCheckpoints
