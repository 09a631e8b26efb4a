"""`python -m jurymast.supervisor RUN_DIRECTORY`: one epoch of supervision, on a node of the allocation.

The batch script starts it, and starts it again if it crashes: the ranks go on meanwhile, the state comes
back from the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time

from jurymast import __version__
from jurymast.cluster.allocation import Allocation, announced_hosts, run_command
from jurymast.cluster.batch import SUPERSEDED, tell_of_requeue
from jurymast.cluster.control import requeue, why_ending
from jurymast.core import events as ev
from jurymast.core.state import Phase, Role, RunState
from jurymast.errors import JurymastError
from jurymast.journal import JournalWriter, first_events, replay
from jurymast.rundir import RunDirectory
from jurymast.supervisor.door import allow_files
from jurymast.supervisor.hold import Hold
from jurymast.supervisor.supervisor import Supervisor
from jurymast.wire.endpoint import claim_epoch

BATCH_LIMIT_S = 3.0


async def supervise(
    directory: RunDirectory, allocation: Allocation, node: str, listener: socket.socket
) -> RunState | None:
    """The state at the end, None when a newer epoch took over. Raises RunDirectoryError when the run
    directory cannot be read or written."""
    plan = directory.plan()
    epoch = claim_epoch(directory.epochs)
    hold = Hold(directory.epochs, epoch)
    hold.begin()  # now: until the journal of months is read, agents must not take this one for dead
    directory.hold_reserve()
    state = await asyncio.to_thread(replay, directory)
    journal = JournalWriter(directory.journal, epoch)

    def why() -> str:
        return "cancelled" if plan.cluster == "local" else why_ending(allocation)

    supervisor = Supervisor(directory, state, journal, why, hold)
    if state.epoch == 0:
        for event in first_events(directory, supervisor.now(), __version__):
            supervisor.feed(event)
    supervisor.feed(ev.SupervisorStarted(t=supervisor.now(), epoch=epoch, node=node))
    if trouble := allow_files(plan.nodes):
        supervisor.feed(ev.Noted(t=supervisor.now(), message=trouble))
    if state.allocation != allocation.key:
        supervisor.feed(
            ev.AllocationStarted(
                t=supervisor.now(), slurm_job=allocation.job, restarts=allocation.restarts,
                nodes=allocation.nodes, host=allocation.host, eligible_at=allocation.eligible_at,
            )
        )  # fmt: skip
    if (newest := await asyncio.to_thread(directory.newest_attempt)) > state.attempt:
        supervisor.feed(ev.AttemptFound(t=supervisor.now(), node="", attempt=newest))
    assert state.phase is not Phase.QUEUED
    hosts = ["127.0.0.1"] if plan.cluster == "local" else announced_hosts()
    await supervisor.run(listener, hosts, allocation.key, node, os.getpid())
    return None if supervisor.superseded else supervisor.state


def end_job(directory: RunDirectory, allocation: Allocation, state: RunState) -> None:
    """After a takeover no batch process carries the outcome out, unless its node was only cut off."""
    if state.phase is Phase.REQUEUED:
        lost = [node.name for node in state.nodes.values() if node.role is Role.FAILED]
        requeue(directory.plan(), allocation, lost, sorted(state.excluded), tell_of_requeue)
        return
    time.sleep(BATCH_LIMIT_S)  # a batch process that lives reads the outcome and ends the job with its code
    run_command(["scancel", allocation.job])


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument(
        "--takeover", default="", metavar="NODE", help="the batch host is gone; act for it here"
    )
    parser.add_argument("--listen-fd", type=int, default=-1, help="a listening socket to inherit")
    arguments = parser.parse_args()
    print(f"supervisor: pid {os.getpid()} at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}", flush=True)
    try:
        directory = RunDirectory(arguments.run_directory)
        allocation = Allocation.load(directory)
        inherited = arguments.listen_fd >= 0
        listener = socket.socket(fileno=arguments.listen_fd) if inherited else socket.create_server(("", 0))
        node = arguments.takeover or allocation.host
        state = asyncio.run(supervise(directory, allocation, node, listener))
        if state is None:
            return SUPERSEDED
        if arguments.takeover and (state.ended or state.phase is Phase.REQUEUED):
            end_job(directory, allocation, state)
    except JurymastError as error:
        print(f"jurymast supervisor: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
