"""`python -m jurymast.supervisor.standby RUN_DIRECTORY NODE`: waits to become the next supervisor on this
node.

It imports everything and reads the journal in advance, so that a takeover takes milliseconds. One line on its
input starts it: the epoch whose supervisor is gone, and since when that supervisor has been silent, by this
node's monotonic clock. If that is there at once, nothing is done in advance. It ends with its input, and so
with its agent.

A thread with a higher nice value imports and reads, so that other processes on the node go first. It does not
get the highest, because the takeover waits for this thread.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jurymast.journal import JournalFollower

FOLLOW_EVERY_S = 2.0
NICE = 5


def _called(limit_s: float) -> bool:
    return bool(select.select([0], [], [], limit_s)[0])


def _call(followers: list[JournalFollower]) -> str:
    """Wait for the line that starts the takeover, and return it; "" at the end of the input."""
    while not _called(FOLLOW_EVERY_S):
        for follower in followers:
            with suppress(OSError):  # storage fails: try again later
                follower.catch_up()
    return os.read(0, 64).decode()


def _get_ready(run_directory: str, followers: list[JournalFollower]) -> None:
    """Import everything, and add one that has read the journal."""
    os.nice(NICE)  # on Linux, applies to this thread alone
    import jurymast.supervisor.epoch  # noqa: F401
    from jurymast.errors import JurymastError
    from jurymast.journal import JournalFollower
    from jurymast.rundir import RunDirectory

    with suppress(OSError, JurymastError):
        follower = JournalFollower(RunDirectory(run_directory))
        follower.catch_up()
        followers.append(follower)


def main(run_directory: str, node: str) -> int:
    followers: list[JournalFollower] = []
    if not _called(0.0):  # else there is no time to get ready
        threading.Thread(target=_get_ready, args=(run_directory, followers), daemon=True).start()
    call = _call(followers)
    if not call:
        os._exit(0)  # at once, without waiting for imports
    from jurymast.journal import replay
    from jurymast.rundir import RunDirectory
    from jurymast.supervisor.epoch import serve
    from jurymast.supervisor.real_io import Takeover

    directory = RunDirectory(run_directory)
    replayed = followers[0].catch_up if followers else partial(replay, directory)
    after, since = call.split()
    return serve(directory, replayed, takeover=Takeover(node, int(after), float(since)))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    from jurymast.processes import end_at_once

    end_at_once(code)  # a thread may wait for storage or for Slurm still
