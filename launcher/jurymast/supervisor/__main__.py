"""`python -m jurymast.supervisor RUN_DIRECTORY`: one epoch of supervision, on a node of the allocation.

The batch script starts it, and starts it again if it crashes: meanwhile the ranks continue, and the journal
gives the state back.
"""

from __future__ import annotations

import argparse
import gc
import socket
import sys
from functools import partial

from jurymast.journal import replay
from jurymast.rundir import RunDirectory
from jurymast.supervisor.epoch import Takeover, serve

# The objects for thousands of nodes live long, and few are in reference cycles. Searching them for garbage as
# often as Python does by default takes a tenth of the time, and stops the loop for long.
NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS = 50_000, 20, 100


def main() -> int:
    gc.set_threshold(NEW_OBJECTS, YOUNG_LOOKS, OLD_LOOKS)
    parser = argparse.ArgumentParser(prog="jurymast.supervisor")
    parser.add_argument("run_directory")
    parser.add_argument(
        "--takeover", default="", metavar="NODE", help="act for the batch host, which is gone"
    )
    parser.add_argument("--after", type=int, default=0, help="the epoch whose supervisor is gone")
    parser.add_argument(
        "--silent-since", type=float, default=0.0, metavar="S",
        help="nobody has heard that supervisor since then, in seconds of this node's monotonic clock",
    )  # fmt: skip
    parser.add_argument(
        "--listen-fd", type=int, action="append", default=[], help="a listening socket to inherit"
    )
    arguments = parser.parse_args()
    directory = RunDirectory(arguments.run_directory)
    listeners = [socket.socket(fileno=file) for file in arguments.listen_fd]
    takeover = None
    if arguments.takeover:
        takeover = Takeover(arguments.takeover, arguments.after, arguments.silent_since)
    return serve(directory, partial(replay, directory), takeover=takeover, listeners=listeners)


if __name__ == "__main__":
    sys.exit(main())
