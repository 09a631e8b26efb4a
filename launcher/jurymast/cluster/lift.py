"""The second half of a requeue, as a small Slurm job of its own.

After `scontrol requeue`, Slurm holds a job back until 121 s after its submit time (the lifetime of its
credential + 1 s). Its owner may lift that, but only once the job is pending: while the job is completing,
Slurm overwrites the update. No process inside the job lives that long.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime, timedelta

from jurymast.errors import ClusterUnavailableError, ControllerAwayError
from jurymast.jobs import job_fields, job_state, run_command
from jurymast.processes import log_as

POLL_S = 0.1
REVOKED_S = 2
LIMIT_S = 240.0
log = logging.getLogger("jurymast.requeue")


def start_time(fields: dict[str, str]) -> str:
    """The earliest start time that Slurm handles correctly, in its own format and by its own clock, in UTC:
    in the hour that comes twice a year, local time may mean an hour later.

    The requeue revoked the job's credential, to the second: a job that starts in that same second is killed
    with "Job credential revoked" (24.11). Slurm sets SubmitTime to the moment of the requeue.
    """
    try:
        requeued = datetime.fromisoformat(fields["SubmitTime"])
    except (KeyError, ValueError):
        return "now+2"
    return (requeued + timedelta(seconds=REVOKED_S)).isoformat(timespec="seconds")


def size_changes(fields: dict[str, str], nodes: str, exclude: str) -> list[str]:
    """What to change of a job such that it gets `nodes` (MIN-MAX) without `exclude`, in this order. A job
    needs as many nodes as its tasks do, whatever NumNodes says; measured with 22.05, 24.11 and 26.05. How
    many nodes it had is not known any more: lost ones are given back before the requeue."""
    changes = [f"ExcNodeList={exclude}"] if exclude else []
    changes.append(f"NumNodes={nodes}")
    each, tasks = fields.get("NtasksPerN:B:S:C", "").partition(":")[0], fields.get("NumTasks", "")
    if each.isdigit() and tasks.isdigit() and int(each):
        fit = int(each) * int(nodes.rpartition("-")[2])
        changes += [f"NumTasks={fit}"] if int(tasks) > fit else []
    return changes


def lift(job: str, nodes: str, exclude: str) -> bool:
    """Wait until `job` is pending, and let it start at once on `nodes` (MIN-MAX) without `exclude`.

    Returns False if it was cancelled meanwhile, or not pending within `LIMIT_S`. Raises
    ClusterUnavailableError, but not while slurmctld is away: it may be so right after the requeue.
    """
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            found = job_state(job)
            if found is not None and found[0] == "PENDING":
                fields = job_fields(job, utc=True)
                starts = f"StartTime={start_time(fields)}"
                for change in [
                    *size_changes(fields, nodes, exclude),
                    starts,
                ]:  # one by one: a site may forbid one of them
                    _update(job, change)
                return True
            # A requeue never shows this on its way (22.05, 24.11 and 26.05).
            if found is not None and found[0] == "CANCELLED":
                return False
        except ControllerAwayError as error:
            log.warning("%s", error)
        time.sleep(POLL_S)
    return False


def _update(job: str, change: str) -> None:
    """Raises ControllerAwayError: then what was changed before may be changed once more."""
    try:
        run_command(["scontrol", "update", f"JobId={job}", change], utc=True)
    except ControllerAwayError:
        raise
    except ClusterUnavailableError as error:
        log.warning("%s: %s", change, error)


def main() -> int:
    log_as("requeue")
    job, nodes, *exclude = sys.argv[1:]
    try:
        return 0 if lift(job, nodes, exclude[0] if exclude else "") else 1
    except ClusterUnavailableError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
