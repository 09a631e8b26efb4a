"""`python -m jurymast.supervisor.standby RUN_DIRECTORY NODE`: waits to become the next supervisor on this
node.

It imports everything and reads the journal ahead, so that a take-over costs milliseconds. One line on its
input calls it: the epoch whose supervisor is gone, and since when nobody has heard that supervisor, by this
node's monotonic clock. It ends with its input, and so with its agent.

A nicer thread imports and reads, so that others on the node go first. It does not get the lowest priority:
once called, the process has to wait for it.
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
        """What calls it, "" at the end of the input."""
        threading.Thread(target=self._get_ready, name="ready", daemon=True).start()
        while True:
            told, _, _ = select.select([0], [], [], FOLLOW_EVERY_S)
            if told:
                return os.read(0, 64).decode()
            if self._follower is not None:
                with suppress(OSError):  # storage is in trouble: later, then
                    self._follower.catch_up()

    def _get_ready(self) -> None:
        os.nice(NICE)  # on Linux: this thread alone
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
        os._exit(0)  # at once: what is still being imported is for nothing
    return standby.serve(node, call)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
