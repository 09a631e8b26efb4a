"""At the time limit of a function that keeps its own state: the job is requeued, as often as the plan says.

A process of its own, which the batch process starts when Slurm warns of the limit. What follows is as with
any requeue that somebody orders: Slurm ends the job, its ranks keep what they have to, and the run goes on
when the job starts again.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.control import ends_in_s, requeue
from jurymast.cluster.sbatch import split_command_line
from jurymast.cluster.signals import JobSignal
from jurymast.core.state.settings import RunPlan
from jurymast.errors import JurymastError
from jurymast.processes import log_as
from jurymast.rundir import RunDirectory, write_atomically

# Slurm's own warning of every run comes this long before the limit, in seconds.
WARNED_S = 120.0
# Slurm's signals come up to this much earlier than asked for, and its answers may be as old.
EARLIER_S = 75.0

log = logging.getLogger("jurymast.limit")


def is_near(plan: RunPlan, left_s: float | None) -> bool:
    """Whether the warning is one of the time limit, which is `left_s` seconds away (None: not known): the
    same signal comes before a preemption, after which Slurm itself starts the job again."""
    asked = JobSignal.read(split_command_line(plan.sbatch_options, {}).last("signal"))
    return left_s is not None and left_s <= (asked.seconds if asked else WARNED_S) + EARLIER_S


def times_file(directory: RunDirectory) -> Path:
    """How often the job was requeued at its limit."""
    return directory.submission / "timeouts.json"


def times(directory: RunDirectory) -> int:
    try:
        found = foreign.load_own(times_file(directory), foreign.NOTE_BYTES_MAX)
    except (OSError, ValueError):
        return 0
    return found if isinstance(found, int) else 0


def main(run_directory: str) -> int:
    directory = RunDirectory(Path(run_directory))
    plan, allocation = directory.own_plan(), Allocation.load(directory)
    done = times(directory)
    if not is_near(plan, ends_in_s(allocation)):
        return 0
    if done >= plan.timeouts or not plan.requeue:
        log.info("the job is not requeued at its time limit: that was done %d times", done)
        return 0
    log.info("the job is requeued at its time limit, for the %d. of %d times", done + 1, plan.timeouts)
    write_atomically(times_file(directory), json.dumps(done + 1).encode())
    requeue(plan, allocation, (), (), lambda trouble: log.warning("requeue: %s", trouble))
    return 0


if __name__ == "__main__":
    log_as("time limit")
    try:
        sys.exit(main(sys.argv[1]))
    except JurymastError as failure:
        log.error("%s", failure)
        sys.exit(failure.exit_code)
