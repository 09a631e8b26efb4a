"""`python -m jurymast.report.watcher RUN_DIRECTORY`: follows a run for those who are to hear of it, by the
policy's `notify` and `metrics`.

It is a process beside the supervisor and only reads the journal, so that a receiver that fails or hangs
concerns no run. It ends with its input, that is with the supervisor: at once if the run goes on, because the
next supervisor has one of its own; else once the run's end is told.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from typing import Protocol

from jurymast.core.state.settings import Settings
from jurymast.errors import JurymastError
from jurymast.processes import die_first, leave_no_core, log_as
from jurymast.report.notifier import Notifier
from jurymast.report.status import StatusWatcher
from jurymast.report.tracking import Tracking
from jurymast.rundir import RunDirectory

log = logging.getLogger("jurymast.watcher")

POLL_S = 1.0
# After the supervisor's end, for what is not delivered yet.
END_S = 20.0
NICE = 10


class Follower(Protocol):
    """Tells others of a run; both methods are called when the journal was read."""

    def look(self) -> None: ...

    def finish(self, until: float) -> None:
        """The end: at this time of the monotonic clock at the latest."""


def followers(watcher: StatusWatcher, settings: Settings) -> list[Follower]:
    found: list[Follower] = []
    if settings.notify:
        found.append(Notifier(watcher, settings.notify))
    if settings.metrics.trackers:
        found.append(Tracking(watcher, settings.metrics.trackers))
    if settings.metrics.scraped:
        try:
            from jurymast.report.exporter import Exporter
        except ImportError as error:
            log.error("metrics: %s: pip install 'jurymast[metrics]'", error)
        else:
            found.append(Exporter(watcher, settings.metrics))
    return found


class Following:
    """A problem, of storage say, is told once; everything is tried again."""

    def __init__(self, directory: RunDirectory) -> None:
        settings = directory.own_plan().settings
        self._watcher = StatusWatcher(directory)
        self._followers = followers(self._watcher, settings)
        self._problems: set[str] = set()

    def look(self) -> None:
        try:
            self._watcher.poll()
        except (OSError, JurymastError) as error:
            self._tell(error)
            return
        for follower in self._followers:
            try:
                follower.look()
            except (OSError, JurymastError) as error:
                self._tell(error)

    def _tell(self, problem: Exception) -> None:
        if str(problem) not in self._problems:
            log.warning("%s", problem)
        self._problems.add(str(problem))

    def finish(self) -> None:
        self.look()
        until = time.monotonic() + END_S
        for follower in self._followers:
            follower.finish(until)


def main(run_directory: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        # The job's; this ends with its input. Not SIG_IGN, which commands would inherit.
        signal.signal(number, lambda *_: None)
    os.nice(NICE)
    log_as("watcher")
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it may tell addresses
    leave_no_core()
    die_first()
    try:
        following = Following(RunDirectory(run_directory))
        while not select.select([0], [], [], POLL_S)[0]:
            following.look()
        following.finish()
    except (OSError, JurymastError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # a receiver that hangs is not waited for
