"""`python -m jurymast.supervisor.standby RUN_DIRECTORY NODE`: waits to become the next supervisor on this
node.

It imports everything and reads the journal in advance, so that a takeover takes milliseconds. One line on its
input starts it: the epoch whose supervisor is gone, and since when that supervisor has been silent, by this
node's monotonic clock. It ends with its input, and so with its agent.

A thread with a higher nice value imports and reads, so that other processes on the node go first. It does not
get the highest, because the takeover waits for this thread.
"""

from __future__ import annotations

import logging
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


class Standby:
    def __init__(self, run_directory: str) -> None:
        self._run_directory = run_directory
        self._follower: JournalFollower | None = None

    def wait(self) -> str:
        """Wait for the line that starts the takeover, and return it; "" at the end of the input."""
        threading.Thread(target=self._get_ready, name="ready", daemon=True).start()
        while True:
            told, _, _ = select.select([0], [], [], FOLLOW_EVERY_S)
            if told:
                return os.read(0, 64).decode()
            if self._follower is not None:
                with suppress(OSError):  # storage fails: try again later
                    self._follower.catch_up()

    def _get_ready(self) -> None:
        os.nice(NICE)  # on Linux, applies to this thread alone
        import jurymast.supervisor.epoch  # noqa: F401
        from jurymast.errors import JurymastError
        from jurymast.journal import JournalFollower
        from jurymast.rundir import RunDirectory

        with suppress(OSError, JurymastError):
            follower = JournalFollower(RunDirectory(self._run_directory))
            follower.catch_up()
            self._follower = follower

    def serve(self, node: str, call: str) -> int:
        from jurymast.errors import JurymastError
        from jurymast.journal import replay
        from jurymast.rundir import RunDirectory
        from jurymast.supervisor.epoch import Takeover, serve

        try:
            directory = RunDirectory(self._run_directory)
            replayed = self._follower.catch_up if self._follower is not None else partial(replay, directory)
            after, since = call.split()
            return serve(directory, replayed, takeover=Takeover(node, int(after), float(since)))
        except JurymastError as error:
            logging.getLogger("jurymast.supervisor").error("%s", error)
            return error.exit_code


def main(run_directory: str, node: str) -> int:
    standby = Standby(run_directory)
    call = standby.wait()
    if not call:
        os._exit(0)  # at once, without waiting for imports
    return standby.serve(node, call)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
