"""`python -m jurymast.agent RUN_DIRECTORY [--node NAME]`: started once per node, by srun or a small job."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket

from jurymast.agent import guard
from jurymast.agent.real_io import serve
from jurymast.cluster.refill import become
from jurymast.errors import JurymastError
from jurymast.processes import end_at_once, log_as
from jurymast.rundir import RunDirectory

AGENT_KILLED = 1  # exit code of the guard of an agent that a signal has ended


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.agent")
    parser.add_argument("run_directory")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    parser.add_argument(
        "--end-as", choices=("agent", "launcher", "task", "refill"), default="agent",
        help="launcher: exit with 1 if the run fails, as torchrun does; task: with the run's exit code; "
        "refill: with 0",
    )  # fmt: skip
    parser.add_argument(
        "--refill", type=int, default=0, help="number of the small job that brings this node to the run"
    )
    parser.add_argument("--allocation", default="", help="key of the allocation for which that was submitted")
    parser.add_argument(
        "--supervisor", default="", help="HOST:PORT of a supervisor to try until the run directory names one"
    )
    arguments = parser.parse_args()
    log_as(f"agent on {arguments.node}")
    host, _, port = arguments.supervisor.rpartition(":")
    directory = RunDirectory(arguments.run_directory)
    hint = (host, int(port)) if host and port.isdigit() else None
    if arguments.refill:
        try:
            nothing = become(directory, arguments.refill, arguments.allocation)
        except JurymastError as error:
            return _failed(error)
        if nothing is not None:
            return nothing

    def agent(oom_kills: int) -> int:
        try:
            work = serve(directory, arguments.node, hint, oom_kills, refill=arguments.refill)
            code = asyncio.run(work)
        except JurymastError as error:
            return _failed(error)
        return {"agent": 0, "launcher": min(code, 1), "task": code, "refill": 0}[arguments.end_as]

    # For a plain run, an srun that says "killed" then means the guards as well: Slurm has ended their step.
    return guard.run(agent, AGENT_KILLED if arguments.end_as == "agent" else None)


def _failed(error: JurymastError) -> int:
    logging.getLogger("jurymast.agent").error("%s", error)
    return error.exit_code


if __name__ == "__main__":
    end_at_once(main())  # Slurm waits for it before it requeues the job
