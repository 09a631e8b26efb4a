"""`python -m jurymast.supervisor RUN_DIRECTORY`: one epoch of supervision, on a node of the allocation.

The batch script starts it, and starts it again if it crashes: meanwhile the ranks continue, and the journal
gives the state back. Agents start `jurymast.supervisor.standby` instead.
"""

from __future__ import annotations

import argparse
import socket
from functools import partial

from jurymast.journal import replay
from jurymast.processes import end_at_once
from jurymast.rundir import RunDirectory
from jurymast.supervisor.epoch import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="jurymast.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument(
        "--listen-fd", type=int, action="append", default=[], help="a listening socket to inherit"
    )
    arguments = parser.parse_args()
    directory = RunDirectory(arguments.run_directory)
    listeners = [socket.socket(fileno=file) for file in arguments.listen_fd]
    return serve(directory, partial(replay, directory), listeners=listeners)


if __name__ == "__main__":
    end_at_once(main())  # a thread may wait for storage or for Slurm still
