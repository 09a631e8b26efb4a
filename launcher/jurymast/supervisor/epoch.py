"""The process of a supervisor: one epoch in the real world, and the end of the job after a takeover."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, repeat
from typing import Any, TypeVar

from jurymast.cluster import refill
from jurymast.cluster.allocation import Allocation, listen
from jurymast.cluster.batch import tell_of_requeue
from jurymast.cluster.control import requeue
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.core.supervision.batch import SUPERSEDED
from jurymast.errors import JurymastError, RunDirectoryError
from jurymast.interpreter import run_module
from jurymast.jobs import alone, run_command
from jurymast.journal import events, read
from jurymast.processes import leave_no_core, log_as
from jurymast.rundir import RunDirectory
from jurymast.supervisor.real_io import RealIo, Takeover
from jurymast.supervisor.supervisor import supervise

log = logging.getLogger("jurymast.supervisor")
Result = TypeVar("Result")

BATCH_LIMIT_S = 3.0
WATCHER_END_S = 5.0
# Before it is started again, whether it was killed or cannot begin.
WATCHER_PAUSES_S = (1.0, 10.0, 60.0, 300.0)
# The objects for thousands of nodes live long, and few are in reference cycles. Searching them for garbage as
# often as Python does by default takes a tenth of the time, and stops the loop for long.
NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS = 50_000, 20, 100


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
    found = Allocation(
        last.slurm_job,
        last.restarts,
        last.nodes,
        last.host,
        last.eligible_at,
        last.partition,
        last.account,
        last.began_at,
    )
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
        run_command(["scancel", alone(allocation.job)])
    refill.end_all(plan)  # at last, as this process may run in one


@contextmanager
def watched(directory: RunDirectory) -> Iterator[None]:
    """Have a process of its own tell others what happens, by the policy's `notify` and `metrics`. The run's
    end waits for a moment for it."""
    command = run_module("jurymast.report.watcher", str(directory.root))
    started: deque[subprocess.Popen[bytes]] = deque(maxlen=1)
    over = threading.Event()
    read, write = os.pipe()

    def keep() -> None:
        """Start it again whenever it ends: when memory runs out, it is among the first to be killed."""
        for pause_s in chain(WATCHER_PAUSES_S, repeat(WATCHER_PAUSES_S[-1])):
            try:
                started.append(process := subprocess.Popen(command, stdin=read))
                why = f"exit code {process.wait()}"
            except OSError as error:
                why = str(error)
            if over.is_set():
                break
            log.warning("nobody is told of the run: %s; trying again in %g s, or at its end", why, pause_s)
            over.wait(pause_s)
        os.close(read)

    keeping = threading.Thread(target=keep, name="watcher", daemon=True)
    keeping.start()
    try:
        yield
    finally:
        over.set()
        os.close(write)
        keeping.join(WATCHER_END_S)
        if keeping.is_alive():
            log.warning("not everybody was told of the end within %.0f s", WATCHER_END_S)
            for process in started:
                process.kill()


class _Threads(ThreadPoolExecutor):
    """Threads that nobody waits for in the end: one may wait for storage, or for a command of Slurm's, when
    all that a supervisor has to do is done, and its job does not go on before its process has ended."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_alone(work: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, but without waiting for threads that still do something."""

    async def begin() -> Result:
        asyncio.get_running_loop().set_default_executor(_Threads())
        return await work

    return asyncio.run(begin())


def serve(
    directory: RunDirectory,
    replayed: Callable[[], RunState],
    *,
    takeover: Takeover | None = None,
    listeners: Sequence[socket.socket] = (),
) -> int:
    """Run one epoch and return the process's exit code; see `supervisor.supervise`."""
    gc.set_threshold(NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS)
    log_as("supervisor")
    leave_no_core()
    log.info("pid %d", os.getpid())
    try:
        allocation = known_allocation(directory)
        plan = directory.own_plan()
        io = RealIo(directory, allocation, replayed, listeners or listen(plan.cluster), takeover)
        told = plan.settings.notify or plan.settings.metrics
        with watched(directory) if told else nullcontext():
            supervisor = run_alone(supervise(io))
        if supervisor is None:
            return SUPERSEDED
        if takeover and (supervisor.state.ended or supervisor.requeues):
            end_job(directory, allocation, supervisor.state, requeues=supervisor.requeues)
    except JurymastError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
