"""What a supervisor needs of the world, besides an event loop: there are two of each, the real one in
`real_io` and the simulator's. The loop gives time, timers and tasks; all that may hang is awaited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from jurymast.cluster.control import Ending
from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Instruction
from jurymast.core.state.images import StateId
from jurymast.core.state.run import RunState
from jurymast.core.supervision.ahead import Reservation
from jurymast.core.supervision.refilling import SmallJob

T = TypeVar("T")


class Sender(Protocol):
    def send(self, *messages: msgspec.Struct) -> None: ...


class PeerChannel(Sender, Protocol):
    """An authenticated connection to an agent or an operator: see `wire.channel.Channel`."""

    async def receive(self) -> msg.Said: ...
    async def listen(self, hear: Callable[[msg.Said], None]) -> Exception: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


# Takes a new connection, and what writes to the log why it is refused.
Accept = Callable[[PeerChannel, Callable[[Exception], None]], None]


class Journal(Protocol):
    """See `journal.JournalWriter`."""

    error: OSError | None
    appended: int
    written: int

    def event(self, event: ev.Event) -> None: ...
    def decision(self, t: float, instruction: Instruction) -> None: ...
    def close(self) -> None: ...


class FileAccess(Protocol):
    """The run directory `root` and the checkpoints, as this node sees them. All may hang, so it is called in
    `Io.on_disk`; it raises OSError or RunDirectoryError."""

    root: str
    attempt_file: str

    def newest_epoch(self) -> int: ...
    def pulse(self, epoch: int, count: int) -> None: ...
    def newest_attempt(self) -> int: ...
    def save_attempt(self, attempt: int) -> None: ...
    def checkpoints(self, state: RunState) -> tuple[dict[StateId, int], Sequence[Rollback]]: ...


class Io(Protocol):
    """The world of one supervisor's process, which serves `allocation` on `node`."""

    node: str
    allocation: str

    @property
    def files(self) -> FileAccess: ...

    def wall(self) -> float:
        """Return the Unix time of this node's clock, in seconds."""

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Do work with files where it stops nothing else; returns or raises what it does."""

    # The beginning.

    async def claim(self) -> int | None:
        """Claim an epoch, and return its number; None if another process has it."""

    async def replayed(self) -> RunState:
        """Return the state that the journal leads to."""

    def journal(self, epoch: int) -> Journal:
        """Begin the journal of this epoch."""

    def first_events(self, t: float) -> Sequence[ev.Event]:
        """Return the events that open a new run's journal."""

    def silent_s(self) -> float:
        """Return for how long nobody has heard the supervisor before this one."""

    def trouble(self) -> str:
        """Return what people should know of this process's limits, or ""."""

    async def allocation_begun(self, state: RunState, t: float) -> ev.AllocationStarted:
        """Return the event that this allocation has begun."""

    async def serve(self, epoch: int, state: RunState, accept: Accept) -> None:
        """Announce this epoch, and give each connection to `accept`."""

    def on_signals(self, warned: Callable[[], None], terminated: Callable[[], None]) -> None:
        """Call these when Slurm warns of the job's end, and when it ends the job."""

    # Afterwards.

    def written(self, journal: Journal, then: Callable[[], None]) -> bool:
        """Wait until the journal is on disk, within a limit. False: this process stands still until then,
        and goes on with `then`."""

    async def why_ending(self) -> Ending:
        """Ask Slurm why the job ends, if it does."""

    async def ends_in_s(self) -> float | None:
        """Ask Slurm when the job reaches its time limit, in seconds from now; None without an answer."""

    async def give_back(self, job: str, node: str) -> bool:
        """Release a node; returns whether it is gone. Raises ClusterUnavailableError."""

    async def ask_for_node(self, number: int, exclude: tuple[str, ...]) -> SmallJob:
        """Take a node of the pool as small job `number`, or submit one that brings a node; none of `exclude`.
        Raises JurymastError."""

    async def top_up_pool(self, exclude: tuple[str, ...]) -> tuple[list[str], str]:
        """Submit what the pool lacks, on none of these nodes; returns the jobs, and what went wrong, or "".
        Raises JurymastError."""

    async def small_jobs(self) -> list[SmallJob]:
        """Return those of the run that wait or run. Raises ClusterUnavailableError."""

    async def end_small_job(self, job: str) -> None:
        """Raises ClusterUnavailableError."""

    async def draining(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return which of these nodes are being drained, and why. Raises ClusterUnavailableError."""

    async def reservations(self, nodes: Sequence[str]) -> list[Reservation]:
        """Return those of others that have these nodes, or will. Raises ClusterUnavailableError."""

    def refuse_more(self) -> None:
        """Accept no more connections."""

    def give_reserve_up(self) -> None:
        """Free the space on disk that is kept for the last words."""

    def write_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Tell the batch process how to end the Slurm job. Raises OSError."""
