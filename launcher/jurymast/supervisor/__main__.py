"""`python -m jurymast.supervisor RUN_DIRECTORY`: one epoch of supervision, on a node of the allocation.

The batch script starts it, and starts it again if it crashes: the ranks go on meanwhile, the state comes
back from the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time

from jurymast.cluster.allocation import Allocation, announced_hosts
from jurymast.cluster.control import cluster_for
from jurymast.core import events as ev
from jurymast.core.state import Phase
from jurymast.errors import JurymastError
from jurymast.journal import JournalWriter, replay
from jurymast.rundir import RunDirectory
from jurymast.supervisor.supervisor import Supervisor, first_events
from jurymast.wire.endpoint import claim_epoch


async def supervise(directory: RunDirectory, allocation: Allocation) -> None:
    """Raises RunDirectoryError when the run directory cannot be read or written."""
    plan = directory.plan()
    epoch = claim_epoch(directory.epochs)
    state = replay(directory)
    journal = JournalWriter(directory.journal, epoch)
    cluster = cluster_for(plan, allocation)
    supervisor = Supervisor(directory, state, journal, cluster, epoch)
    if state.epoch == 0:
        for event in first_events(directory, supervisor.now()):
            supervisor.feed(event)
    supervisor.feed(ev.SupervisorStarted(t=supervisor.now(), epoch=epoch, node=allocation.host))
    if state.allocation != allocation.key:
        supervisor.feed(
            ev.AllocationStarted(
                t=supervisor.now(), slurm_job=allocation.job, restarts=allocation.restarts,
                nodes=allocation.nodes, host=allocation.host, eligible_at=allocation.eligible_at,
            )
        )  # fmt: skip
    assert state.phase is not Phase.QUEUED
    listen = "127.0.0.1" if plan.cluster == "local" else "0.0.0.0"
    hosts = ["127.0.0.1"] if plan.cluster == "local" else announced_hosts()
    await supervisor.run(listen, hosts, allocation.key, allocation.host, os.getpid())


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument("--allocation", required=True, help="JSON of cluster.allocation.Allocation")
    arguments = parser.parse_args()
    print(f"supervisor: pid {os.getpid()} at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}", flush=True)
    try:
        allocation = Allocation.from_json(json.loads(arguments.allocation))
        asyncio.run(supervise(RunDirectory(arguments.run_directory), allocation))
    except JurymastError as error:
        print(f"jurymast supervisor: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
