"""The real world of a supervisor: threads, files, sockets, signals and Slurm.

It accepts connections of agents and operators, who prove that they know the run's secret. Everybody on the
cluster's network can reach the port: see `wire.handshakes`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jurymast
from jurymast import foreign
from jurymast.checkpoint.directory import BadCheckpoint, CheckpointDirectory
from jurymast.cluster import control, pool, refill, reservations
from jurymast.cluster.allocation import Allocation, announced_by
from jurymast.cluster.batch import SIGNALS
from jurymast.cluster.control import Ending, ended_as, kill_wait_s
from jurymast.cluster.signals import WARNINGS
from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.judges.pool import PoolMember, PoolNeed
from jurymast.core.run.ends import unexplained
from jurymast.core.state import events as ev
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import read_said
from jurymast.core.state.run import RunState
from jurymast.core.state.settings import RunPlan
from jurymast.core.supervision.ahead import Reservation
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import RunDirectoryError
from jurymast.journal import JournalWriter, first_events
from jurymast.reading import patiently
from jurymast.rundir import RunDirectory, renew, write_json
from jurymast.supervisor.claiming import Taking
from jurymast.supervisor.io import Accept, Journal
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel, Listener
from jurymast.wire.handshakes import STRANGERS_MAX, Handshakes, Proven
from jurymast.wire.protocol import SUPERVISOR

T = TypeVar("T")

# Open files besides connections: the journal, the run's files, commands.
OWN_FILES = 128


def allow_files(nodes: int) -> str:
    """Raise this process's limit of open files as far as allowed. Return what to report if that is too low
    for so many nodes, or "".

    Slurm passes on the soft limit of the shell that submitted the job, often 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a hard limit above fs.nr_open cannot be set, not even unchanged
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * nodes + STRANGERS_MAX + OWN_FILES
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return ""
    return (
        f"a process may open {allowed} files here, and the supervisor of {nodes} nodes may need {needed}: "
        "raise the hard limit of open files (LimitNOFILE of slurmd, or limits.conf)"
    )


@dataclass(frozen=True)
class Takeover:
    """A takeover: the batch host is gone, and this process acts for it on `node`. It replaces the supervisor
    of epoch `after`, unless another process does. That supervisor has been silent since `silent_since`, in
    seconds of the monotonic clock."""

    node: str
    after: int
    silent_since: float


class RealPool:
    """See `supervisor.claiming.PoolAccess`."""

    def __init__(self, plan: RunPlan, allocation: Allocation, number: int, exclude: tuple[str, ...]) -> None:
        self._plan, self._allocation, self._exclude = plan, allocation, exclude
        self._claim = pool.PoolClaim(
            run=plan.run, directory=plan.directory, number=number, key=allocation.key
        )
        self._place = pool.PoolDirectory(plan.settings.pool_directory)

    def now(self) -> float:
        return time.time()

    async def need(self) -> PoolNeed:
        return await asyncio.to_thread(pool.need_of, self._plan, self._allocation, self._exclude)

    async def waiting(self) -> list[PoolMember]:
        return await self._ask(self._place.members)

    async def take(self, job: str) -> bool:
        return await self._ask(partial(self._place.take, job))

    async def tell(self, member: PoolMember) -> None:
        await self._ask(partial(self._place.tell, member, self._claim))

    async def answered(self, job: str) -> bool:
        return await self._ask(partial(self._place.answered, job))

    async def withdraw(self, job: str) -> bool:
        return await self._ask(partial(self._place.withdraw, job))

    async def end(self, job: str) -> None:
        await asyncio.to_thread(refill.end, job)

    async def _ask(self, what: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(what)
        except OSError as error:
            raise RunDirectoryError(f"pool.directory {self._place.root}: {error}") from error


class RunFiles:
    """See `supervisor.io.FileAccess`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.root, self.attempt_file = str(directory.root), str(directory.attempt_file)

    def newest_epoch(self) -> int:
        return endpoint.newest_epoch(self._directory.epochs)

    def pulse(self, epoch: int, count: int) -> None:
        endpoint.pulse(self._directory.epochs, epoch, count)

    def newest_attempt(self) -> int:
        return self._directory.newest_attempt()

    def save_attempt(self, attempt: int) -> None:
        self._directory.save_attempt(attempt)

    def checkpoints(self, state: RunState) -> tuple[dict[StateId, int], Sequence[Rollback]]:
        found = CheckpointDirectory(state.checkpoints or self._directory.checkpoints, state.run)
        renew(found.root)  # this node's view of it may be outdated
        try:
            return found.sizes(), found.own_rollbacks()
        except BadCheckpoint as error:
            raise OSError(str(error)) from error


class RealIo:
    """See `supervisor.io.Io`. `replayed` reads the journal."""

    def __init__(
        self,
        directory: RunDirectory,
        allocation: Allocation,
        replayed: Callable[[], RunState],
        listeners: Sequence[socket.socket] = (),
        takeover: Takeover | None = None,
    ) -> None:
        self._taking = Taking()
        self.node = takeover.node if takeover else allocation.host
        self.allocation = allocation.key
        self.files = RunFiles(directory)
        self._directory, self._allocation, self._listeners = directory, allocation, listeners
        self._replay, self._takeover = replayed, takeover
        self._accepting: Listener | None = None

    @cached_property
    def _plan(self) -> RunPlan:
        return self._directory.own_plan()

    def wall(self) -> float:
        return time.time()

    async def on_disk(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except RuntimeError as error:  # no thread can be started: tried again, like storage that fails
            raise OSError(errno.EAGAIN, str(error)) from error

    # The beginning.

    async def claim(self) -> int | None:
        epochs = self._directory.epochs
        if self._takeover is None:
            return endpoint.claim_epoch(epochs)
        epoch = self._takeover.after + 1
        return epoch if endpoint.claim(epochs, epoch) else None

    async def replayed(self) -> RunState:
        self._directory.hold_reserve()
        return await asyncio.to_thread(patiently, self._read_journal, self._directory.root)

    def _read_journal(self) -> RunState:
        """Raises OSError: what this supervisor does not read would count no more, for anybody."""
        foreign.names(self._directory.journal)  # one that cannot be listed is not without entries
        return self._replay()

    def journal(self, epoch: int) -> JournalWriter:
        if self._plan.cluster == "slurm":  # later, slurmctld may be silent
            asyncio.get_running_loop().run_in_executor(None, kill_wait_s)
        return JournalWriter(self._directory.journal, epoch)

    def first_events(self, t: float) -> Sequence[ev.Event]:
        return first_events(self._directory, t, jurymast.__version__)

    def silent_s(self) -> float:
        return time.monotonic() - self._takeover.silent_since if self._takeover else 0.0

    def trouble(self) -> str:
        return allow_files(self._plan.nodes)

    async def allocation_begun(self, state: RunState, t: float) -> ev.AllocationStarted:
        return await asyncio.to_thread(allocation_begun, self._plan, state, self._allocation, t)

    async def serve(self, epoch: int, state: RunState, accept: Accept) -> None:
        known = [node.address for node in state.nodes.values() if node.address]
        secret = self._directory.secret()
        handshakes = Handshakes(secret, SUPERVISOR, state.active + state.spares, known)
        port = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            handshakes.listen(listener)

        def enter(proven: Proven) -> None:
            accept(Channel.of(proven, read_said), partial(handshakes.log_refusal, proven.address))

        self._accepting = Listener(handshakes, enter)
        hosts = tuple(announced_by(self._listeners))
        place = endpoint.Endpoint(epoch, hosts, port, self.node, self.allocation, os.getpid())
        endpoint.announce(self._directory.epochs, place)

    def on_signals(self, warned: Callable[[], None], terminated: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, warned if number in WARNINGS else terminated)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the batch process has blocked them

    # Afterwards.

    def written(self, journal: Journal, then: Callable[[], None]) -> bool:
        assert isinstance(journal, JournalWriter)
        journal.flush()
        return True

    async def why_ending(self) -> Ending:
        if self._plan.cluster == "local":
            return Ending("cancelled", math.inf)
        return await asyncio.to_thread(control.why_ending, self._allocation)

    async def ends_in_s(self) -> float | None:
        return await asyncio.to_thread(control.ends_in_s, self._allocation)

    async def give_back(self, job: str, node: str) -> bool:
        return await asyncio.to_thread(control.give_back, job, node)

    async def ask_for_node(self, number: int, exclude: tuple[str, ...]) -> SmallJob:
        if self._plan.pooled:
            place = RealPool(self._plan, self._allocation, number, exclude)
            if (member := await self._taking.take(place, number)) is not None:
                return member
        job = await asyncio.to_thread(refill.ask, self._plan, self._allocation, number, exclude)
        return SmallJob(number, job)

    async def top_up_pool(self, exclude: tuple[str, ...]) -> tuple[list[str], str]:
        return await asyncio.to_thread(pool.top_up, self._plan, self._allocation, exclude)

    async def small_jobs(self) -> list[SmallJob]:
        return await asyncio.to_thread(refill.look, self._plan)

    async def end_small_job(self, job: str) -> None:
        await asyncio.to_thread(refill.end, job)

    async def draining(self, nodes: Sequence[str]) -> dict[str, str]:
        return await asyncio.to_thread(control.draining, nodes)

    async def reservations(self, nodes: Sequence[str]) -> list[Reservation]:
        return await asyncio.to_thread(reservations.of_others, self._allocation, nodes)

    def refuse_more(self) -> None:
        if self._accepting is not None:
            self._accepting.close()

    def give_reserve_up(self) -> None:
        self._directory.give_reserve_up()

    def write_outcome(self, outcome: Mapping[str, Any]) -> None:
        write_json(self._directory.outcome_file, outcome)


def allocation_begun(
    plan: RunPlan, state: RunState, allocation: Allocation, t: float
) -> ev.AllocationStarted:
    """Return the event that this allocation has begun. If nobody knows how the one before ended, Slurm's
    accounts are asked."""
    before, begun_at = state.allocation.rpartition(".")[0], state.allocated_at
    asks = plan.cluster == "slurm" and unexplained(state)
    return ev.AllocationStarted(
        t=t, slurm_job=allocation.job, restarts=allocation.restarts, nodes=allocation.nodes,
        host=allocation.host, eligible_at=allocation.eligible_at,
        before=ended_as(before, begun_at) if asks else "", partition=allocation.partition,
        account=allocation.account, began_at=allocation.began_at,
    )  # fmt: skip
