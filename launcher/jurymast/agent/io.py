"""What an agent needs of the world, besides an event loop: there are two of each, the real one in `real_io`
and the simulator's. The loop gives time, timers and tasks; all that may hang is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from jurymast import background
from jurymast.agent.driver import Driver
from jurymast.core.agent import effects as do
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.findings import Finding
from jurymast.core.state.host_messages import Apart, FromHosts
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.settings import RunPlan
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.storage.orders import Answer


class OrderChannel(Protocol):
    """An authenticated connection to a supervisor: see `wire.channel.Channel`."""

    @property
    def peer_address(self) -> str: ...
    def send(self, *messages: msgspec.Struct) -> None: ...
    async def listen(self, hear: Callable[[msg.Order], None]) -> Exception: ...
    def close(self) -> None: ...


class Host(Protocol):
    """A torchrun host's process."""

    def tell(self, order: msg.Launch | msg.Stop | Apart) -> None: ...

    def kill(self) -> None:
        """Kill it at once; its end is told."""

    async def end(self) -> None:
        """Kill it, and wait for its end."""


class Standby(Protocol):
    """A process that can supervise at once."""

    @property
    def ended(self) -> bool: ...

    async def begin(self, start: do.StartSupervisor) -> None:
        """Supervise. Raises OSError."""

    async def wait(self) -> None:
        """Wait for its end."""

    async def dismiss(self) -> None:
        """End it; it does not supervise yet."""


class Phases:
    """Those of an order. `reached` is called with each that is done, and `advanced` from time to time with
    the bytes that are written. `turns` are the orders to go on, which may come before the process has the
    order itself."""

    def __init__(
        self, reached: Callable[[WritePhase], None], advanced: Callable[[int], None] = lambda size: None
    ) -> None:
        self.reached, self.advanced = reached, advanced
        self.turns: asyncio.Queue[msg.ContinueWrite] = asyncio.Queue()


class StorageAccess(Protocol):
    """Storage, as this node writes to it."""

    def checkpoints_at(self, event: within.CheckpointsKept) -> None:
        """The script writes its checkpoints there."""

    def warm(self) -> None:
        """Start, once, the process that completes shared checkpoints, so that it is ready when needed."""

    async def write(self, order: msg.Write, loans: list[Loan], phases: Phases) -> Answer:
        """Write what the keeper has lent. If this is cancelled, it waits until nothing is written any
        more."""

    async def close(self) -> None: ...

    async def forget_local(self) -> None:
        """Remove the images on this node's disk, from which nobody restores any more."""


class NodeTestAccess(Protocol):
    """The processes that test this node. Their answers are events."""

    def carry_out(self, effect: do.ForTests) -> None: ...

    async def gone(self) -> None:
        """Wait until all that were ended have released the devices."""

    async def close(self) -> None: ...


class ProbeAccess(Protocol):
    """The node's health. Findings go to the supervisor."""

    @property
    def joules(self) -> float | None:
        """What this node's GPUs have used since the agent first saw them; None: nobody can say."""

    def start(self) -> None: ...

    def known(self) -> tuple[Finding, ...]:
        """Return findings for a hello."""

    def wall(self) -> float:
        """Return Unix time by this node's clock, by which findings have their times."""

    def new_supervisor(self) -> None: ...

    def clock(self, theirs: float) -> None:
        """Compare this node's clock with the supervisor's Unix time, which has just arrived."""

    async def close(self) -> None: ...


class RankAccess(Protocol):
    """The ranks of this node, as they can be seen and signalled from outside."""

    def attempt_begins(self) -> None:
        """Forget the last attempt's heartbeats, its schedule of saves, and what killed it."""

    def report(self, pids: tuple[int, ...]) -> msg.RanksSeen:
        """Return the progress of the ranks with these ids, for a heartbeat."""

    def wants_cadence(self, event: within.Cadence) -> None: ...
    def set_cadence(self, order: msg.CadenceSet) -> None: ...

    def variables(self, order: msg.Launch) -> dict[str, str]:
        """Return variables that ranks need in this attempt only."""

    async def take_stacks(self, pids: tuple[int, ...]) -> None:
        """Send the supervisor the stacks of these ranks."""

    async def look(self, number: int, pids: tuple[int, ...]) -> None:
        """Tell the supervisor where these ranks stand, as it has asked in question `number`."""

    def evidence(self, code: int, failed: msg.Failed | None = None) -> dict[str, Any]:
        """Return what the node knows about the end of the host, or of a rank, with this exit code."""

    def kill(self, pids: tuple[int, ...]) -> None:
        """Kill the ranks and everything that they have started."""

    async def gone(self, pids: tuple[int, ...], limit_s: float) -> None:
        """Wait until the ranks are gone, at most `limit_s`."""

    async def end(self, pids: tuple[int, ...], grace_s: float) -> None:
        """Terminate the ranks, and kill those that are still there after `grace_s`."""

    async def end_strays(self, spared: tuple[int, ...]) -> bool:
        """End what ranks have left behind, but for what these `spared` ones use; returns whether all of that
        is gone."""


class AgentIo(Protocol):
    """The world of one agent's process. `hello`: what that process says of itself, without what changes;
    `address`: this node's on the way to the supervisor, "" before the first connection."""

    plan: RunPlan
    hello: msg.Hello
    address: str

    @property
    def keeper(self) -> Keeper: ...

    @property
    def storage(self) -> StorageAccess: ...

    @property
    def tests(self) -> NodeTestAccess: ...

    @property
    def probing(self) -> ProbeAccess: ...

    @property
    def ranks(self) -> RankAccess: ...

    async def begin(self) -> None:
        """Begin: from now on signals and messages of ranks are told."""

    async def close(self) -> None:
        """Give back what this process has of the node."""

    # The supervisor.

    async def connect(self, targets: tuple[tuple[str, int], ...], limit_s: float) -> OrderChannel | None:
        """Connect to the first of these (host, port) that answers; None if none does so within `limit_s`."""

    def connected(self, channel: Any) -> None:
        """This is the connection from now on."""

    async def find(self) -> tuple[msg.Endpoint | None, int | None]:
        """Return what the run directory says: the newest supervisor's address and the number of the newest
        attempt, each None if it cannot be known."""

    async def read_pulse(self) -> str | None:
        """Return the pulse in the run directory; None if it cannot be read."""

    async def stand_by(self) -> Standby:
        """Start a process that can supervise. Raises OSError."""

    async def leave_verdict(self, order: msg.LeaveVerdict) -> None:
        """Tell the site that this node is bad, and the supervisor that this is done, or why not."""

    # The torchrun host.

    async def start_host(
        self, said: Callable[[FromHosts], None], ended: Callable[[int, str], None], failed: background.Failed
    ) -> Host:
        """Start a host; its messages, its exit code and its last words are told."""

    async def unloadable(self) -> str:
        """Return why a host cannot load torch here, or ""."""


# Makes the world of an agent, whose machine is driven so; messages of ranks go to the function.
MakeIo = Callable[[Driver, Callable[[within.FromRanks], None]], AgentIo]
