"""One epoch of supervision, in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import jurymast
from jurymast.cluster.allocation import Allocation, announced_by, listen
from jurymast.cluster.batch import tell_of_requeue
from jurymast.cluster.control import Ending, ended_as, ends_in_s, kill_wait_s, requeue, why_ending
from jurymast.core.run.ends import unexplained
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.core.state.settings import RunPlan
from jurymast.core.supervision.batch import SUPERSEDED
from jurymast.errors import JurymastError, RunDirectoryError
from jurymast.jobs import run_command
from jurymast.journal import JournalWriter, events, first_events, read
from jurymast.processes import leave_no_core, log_as
from jurymast.rundir import RunDirectory
from jurymast.supervisor.supervisor import Hold, Supervisor, allow_files
from jurymast.wire.endpoint import claim, claim_epoch

log = logging.getLogger("jurymast.supervisor")

BATCH_LIMIT_S = 3.0
# The objects for thousands of nodes live long, and few are in reference cycles. Searching them for garbage as
# often as Python does by default takes a tenth of the time, and stops the loop for long.
NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS = 50_000, 20, 100


@dataclass(frozen=True)
class Takeover:
    """A takeover: the batch host is gone, and this process acts for it on `node`. It replaces the supervisor
    of epoch `after`, unless another process does. That supervisor has been silent since `silent_since`, in
    seconds of the monotonic clock."""

    node: str
    after: int
    silent_since: float


async def supervise(
    directory: RunDirectory,
    allocation: Allocation,
    node: str,
    listeners: Sequence[socket.socket],
    replayed: Callable[[], RunState],
    takeover: Takeover | None,
) -> Supervisor | None:
    """Supervise one epoch. Return its supervisor at its end, or None if a newer epoch took over. `replayed`
    returns the state that the journal leads to. Raises RunDirectoryError if the run directory cannot be read
    or written."""
    plan = directory.own_plan()
    epoch = takeover.after + 1 if takeover else claim_epoch(directory.epochs)
    if takeover and not claim(directory.epochs, epoch):
        return None
    hold = Hold(directory.epochs, epoch)
    hold.begin()  # before a long journal is read, so that agents do not take this supervisor for dead
    directory.hold_reserve()
    state = await asyncio.to_thread(replayed)
    journal = JournalWriter(directory.journal, epoch)

    def why() -> Ending:
        return Ending("cancelled", math.inf) if plan.cluster == "local" else why_ending(allocation)

    if plan.cluster == "slurm":  # later, slurmctld may be silent
        asyncio.get_running_loop().run_in_executor(None, kill_wait_s)
    supervisor = Supervisor(directory, state, journal, why, lambda: ends_in_s(allocation), hold)
    if state.epoch == 0:
        for event in first_events(directory, supervisor.now(), jurymast.__version__):
            supervisor.feed(event)
    supervisor.feed(
        ev.SupervisorStarted(
            t=supervisor.now(),
            epoch=epoch,
            node=node,
            silent_s=time.monotonic() - takeover.silent_since if takeover else 0.0,
            read=dict(state.lines_read),
        )
    )
    if trouble := allow_files(plan.nodes):
        supervisor.feed(ev.Noted(t=supervisor.now(), message=trouble))
    if state.allocation != allocation.key:
        started = await asyncio.to_thread(allocation_begun, plan, state, allocation, supervisor.now())
        supervisor.feed(started)
    await supervisor.read_attempt()
    assert state.phase is not Phase.QUEUED
    await supervisor.run(listeners, announced_by(listeners), allocation.key, node, os.getpid())
    return None if supervisor.superseded else supervisor


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
        before=ended_as(before, begun_at) if asks else "",
    )  # fmt: skip


def known_allocation(directory: RunDirectory) -> Allocation:
    """The run's allocation; from the journal, and written anew, if its file is damaged. Raises
    RunDirectoryError if neither says it."""
    try:
        return Allocation.load(directory)
    except RunDirectoryError as error:
        begun = (e for e in events(read(directory)) if isinstance(e, ev.AllocationStarted))
        if (last := next(iter(deque(begun, maxlen=1)), None)) is None:
            raise
        log.warning("%s: taken from the journal", error)
    found = Allocation(last.slurm_job, last.restarts, last.nodes, last.host, last.eligible_at)
    with suppress(OSError):
        found.save(directory)
    return found


def end_job(directory: RunDirectory, allocation: Allocation, state: RunState, *, requeues: bool) -> None:
    """End the Slurm job after a takeover, when no batch process acts on the outcome, unless its node was only
    cut off. A batch script's job is requeued: what follows the training in the script has not run yet."""
    plan = directory.own_plan()
    if not requeues:
        time.sleep(BATCH_LIMIT_S)  # a batch process that is alive reads the outcome and acts on it
    script_goes_on = plan.batch and plan.requeue and state.phase is not Phase.CANCELLED
    if requeues or script_goes_on:
        lost = [node.name for node in state.nodes.values() if node.role is Role.FAILED]
        requeue(plan, allocation, lost, sorted(state.excluded), tell_of_requeue)
    else:
        run_command(["scancel", allocation.job])


def serve(
    directory: RunDirectory,
    replayed: Callable[[], RunState],
    *,
    takeover: Takeover | None = None,
    listeners: Sequence[socket.socket] = (),
) -> int:
    """Run one epoch and return the process's exit code; see `supervise`."""
    gc.set_threshold(NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS)
    log_as("supervisor")
    leave_no_core()
    log.info("pid %d", os.getpid())
    try:
        allocation = known_allocation(directory)
        listeners = listeners or listen(directory.own_plan().cluster)
        node = takeover.node if takeover else allocation.host
        supervisor = asyncio.run(supervise(directory, allocation, node, listeners, replayed, takeover))
        if supervisor is None:
            return SUPERSEDED
        if takeover and (supervisor.state.ended or supervisor.requeues):
            end_job(directory, allocation, supervisor.state, requeues=supervisor.requeues)
    except JurymastError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
