"""What an agent's machines want done. An effect that takes time names the event that brings its answer."""

from __future__ import annotations

import math

from msgspec import Struct

from jurymast.core.state import messages as msg

NEVER = math.inf
Obeyed = (
    msg.GoOn | msg.CadenceSet | msg.LeaveVerdict | msg.KeeperOrder | msg.Write | msg.ContinueWrite
    | msg.CancelWrite
)  # fmt: skip


class WakeAt(Struct, frozen=True):
    """Call `on_time` at this time of the machines' clock, in seconds. Only the newest one counts; NEVER means
    never."""

    at: float


class Send(Struct, frozen=True):
    """Send this to the supervisor."""

    message: msg.ToSupervisor


class Beat(Struct, frozen=True):
    """Send a heartbeat now, with the progress of these ranks of `attempt`."""

    attempt: int
    pids: tuple[int, ...]


class Obey(Struct, frozen=True):
    """Carry out this order; nothing about it is left to decide. The phases that a write reaches, and its end,
    are events, unless it was cancelled."""

    order: Obeyed


class Leave(Struct, frozen=True):
    """End the ranks, which have `grace_s` for what they do at a SIGTERM, and then this agent. `over`: the run
    has ended, too, with this `exit_code`, so nobody will restore from this node's disk. `ordered`: by the
    supervisor, which waits until that is done."""

    over: bool = False
    exit_code: int = 0
    grace_s: float = 0.0
    ordered: bool = False


# The ranks and their host.


class StartHost(Struct, frozen=True):
    """Start a torchrun host. Its messages and its end are events."""


class Prepare(Struct, frozen=True):
    """Make room for the ranks of this order: those of earlier attempts are gone. Answered by
    `on_node_prepared` once no process holds a device."""

    order: msg.Launch


class StartRanks(Struct, frozen=True):
    """Tell the host to start the ranks; if `cold`, without preloaded modules."""

    order: msg.Launch
    cold: bool


class StopRanks(Struct, frozen=True):
    """Tell the host to stop the ranks of this attempt and of those before it. They have at least `grace_s`.
    If `spare`, those that can leave their step wait in their processes."""

    attempt: int
    grace_s: float = 0.0
    spare: bool = True


class PartRanks(Struct, frozen=True):
    """Tell the host that the end of one rank of this attempt ends no other, unless it is told to stop."""

    attempt: int


class TakeStacks(Struct, frozen=True):
    """Take the stacks of these ranks and send them to the supervisor. Answered by `on_stacks_taken`."""

    attempt: int
    pids: tuple[int, ...]


class LookAtRanks(Struct, frozen=True):
    """See where these ranks stand, and answer the supervisor's question `number`."""

    number: int
    pids: tuple[int, ...]


class KillRanks(Struct, frozen=True):
    """Kill the ranks and everything they have started, at once."""

    pids: tuple[int, ...]


class KillHost(Struct, frozen=True):
    """Kill the host at once. Its end is an event."""


class StartProbes(Struct, frozen=True):
    """Start the probes. This is the least urgent work on a new node."""


# Tests of this node. Each set of processes has a number, from 1 on.


class StartTests(Struct, frozen=True):
    """Start this many processes that test this node. Answered by `on_tests_started`."""

    number: int
    count: int


class TestDevices(Struct, frozen=True):
    """Test each device by itself. Answered by `on_tests_answered`."""

    number: int


class TestTogether(Struct, frozen=True):
    """Test all devices together, as ranks from `rank` on of a `world` that meets at `host` ("": this node)
    under this name. Answered by `on_tests_answered`."""

    number: int
    name: str
    host: str
    port: int
    limit_s: float
    world: int
    rank: int


class EndTests(Struct, frozen=True):
    """End the test processes at once, and ignore their answers."""

    number: int


# The connection.


class Connect(Struct, frozen=True):
    """Connect to the first of these (host, port) that answers. Answered by `on_connected` or
    `on_supervisor_unreached`, unless a Greet came first."""

    targets: tuple[tuple[str, int], ...]


class FindSupervisor(Struct, frozen=True):
    """Look in the run directory for the newest supervisor's address, and for the newest attempt. Answered by
    `on_supervisor_found`, unless a Greet came first."""


class Greet(Struct, frozen=True):
    """A supervisor is connected: stop all other attempts to connect, and send it the hello."""


class HangUp(Struct, frozen=True):
    """Close the connection."""


# Succession.


class ReadPulse(Struct, frozen=True):
    """Read the pulse in the run directory. Answered by `on_pulse`."""


class StandBy(Struct, frozen=True):
    """Start a process that can supervise at once. Its end is not an event."""


class EndStandby(Struct, frozen=True):
    """End the standby process: another node is the first to take over."""


class StartSupervisor(Struct, frozen=True):
    """Start a supervisor on this node, in the standby process or a new one. Its end is an event. It replaces
    the supervisor of epoch `after`, which has been silent for `silent_s`, unless another node does so
    first."""

    after: int
    silent_s: float


# Checkpoints.


class WarmWriter(Struct, frozen=True):
    """Start the process that joins shared checkpoints, so that it is ready."""


class SayForeseen(Struct, frozen=True):
    """Tell the supervisor how large this node's images will be, and how much memory is available."""

    image_bytes: int
    own_bytes: int


ForTests = StartTests | TestDevices | TestTogether | EndTests
ForSuccession = ReadPulse | StandBy | EndStandby | StartSupervisor
Effect = (
    WakeAt | Send | Beat | Obey | Leave | StartHost | Prepare | StartRanks | StopRanks | PartRanks
    | TakeStacks | LookAtRanks | KillRanks | KillHost | StartProbes | ForTests | Connect | FindSupervisor
    | Greet | HangUp | ForSuccession | WarmWriter | SayForeseen
)  # fmt: skip
