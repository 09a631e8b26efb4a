"""Changes that a run makes to its own Slurm job, with its owner's rights: requeue it without the bad nodes,
or end it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jurymast.cluster import earlier
from jurymast.cluster.allocation import Allocation, job_fields, run_command
from jurymast.cluster.sbatch import seconds_of, split_command_line, where_options
from jurymast.core.settings import RunPlan
from jurymast.errors import ClusterUnavailableError, ControllerAwayError, UsageError
from jurymast.interpreter import run_module
from jurymast.rundir import RunDirectory

Answer = TypeVar("Answer")

STILL_RUNNING = "running"
# A restart or fail-over of slurmctld must not end the run. Limit and interval of further tries, in seconds.
CONTROLLER_LIMIT_S = 600.0
CONTROLLER_RETRY_S = 5.0


def requeue(
    plan: RunPlan,
    allocation: Allocation,
    lost: Sequence[str],
    exclude: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Requeue this job without the nodes in `exclude`, so that it starts again within seconds. `say` reports
    what goes wrong.

    The batch process must call this after its srun has ended: an srun that is still alive cancels the step of
    the same number after the requeue. The `lost` nodes are given back first, because Slurm would wait for
    their answer before it lets the job be pending (SlurmdTimeout, 300 s by default). Slurm then delays the
    job; a small job outside of this one lifts the delay, because no process inside lives until the job is
    pending. Does nothing if the job was already requeued or has ended; waits while slurmctld does not answer.
    Raises ClusterUnavailableError if the job cannot be requeued at all.
    """
    if _patiently(lambda: _is_over(allocation), say):
        return
    job = f"JobId={allocation.job}"
    nodes, told = earlier.banned(plan, exclude, os.environ.get("SLURM_JOB_PARTITION", ""), time.time())
    banned = ",".join(nodes)
    sizes = f"{plan.active}-{plan.nodes}"
    if told:
        say(told)

    def attempt(command: Callable[[], list[str]]) -> bool:
        try:
            run_command(command())
        except (ClusterUnavailableError, UsageError) as error:
            say(str(error))
            return False
        return True

    # If there is no helper job, that costs Slurm's two minutes of delay, not the run.
    helped = attempt(lambda: _lift_command(plan, allocation.job, sizes, banned))
    kept = [node for node in allocation.nodes if node not in lost]
    if lost and kept and allocation.host in kept:
        attempt(lambda: ["scontrol", "update", job, f"NodeList={','.join(kept)}"])
    _patiently(lambda: _requeue_once(allocation), say)
    if helped:
        # The helper job does the rest. An update now would block (5 s each) until the job and this process
        # have ended, and Slurm would have to kill what could have ended by itself.
        return
    attempt(lambda: ["scontrol", "update", job, f"NumNodes={sizes}"])
    if banned:
        attempt(lambda: ["scontrol", "update", job, f"ExcNodeList={banned}"])


def _is_over(allocation: Allocation) -> bool:
    """Whether the job has ended or was requeued: then this process must not requeue it."""
    return reason_of(job_fields(allocation.job), allocation.restarts) in ("requeued", "cancelled", "timeout")


def _requeue_once(allocation: Allocation) -> None:
    # Slurm may have carried out an earlier request whose answer was lost.
    if not _is_over(allocation):
        run_command(["scontrol", "requeue", allocation.job])


def _patiently(ask: Callable[[], Answer], say: Callable[[str], None]) -> Answer:
    """Return what `ask` returns once slurmctld answers. Raises ClusterUnavailableError if it refuses, or does
    not answer for `CONTROLLER_LIMIT_S`."""
    end = time.monotonic() + CONTROLLER_LIMIT_S
    while True:
        try:
            return ask()
        except ControllerAwayError as error:
            if time.monotonic() > end:
                raise
            say(f"{error}; trying again in {CONTROLLER_RETRY_S:g} s")
        time.sleep(CONTROLLER_RETRY_S)


def give_back(job: str, node: str) -> bool:
    """Remove the live node `node` from this running job; False if the job no longer has it. Raises
    ClusterUnavailableError if the node is the batch host, or the site forbids it (disable_job_shrink).

    Measured on Slurm 22.05: the agents' step continues, everything that still runs on the node is killed, and
    a later requeue may get any nodes again.
    """
    nodes = run_command(["scontrol", "show", "hostnames", job_fields(job)["NodeList"]]).split()
    if node not in nodes:
        return False
    kept = ",".join(name for name in nodes if name != node)
    run_command(["scontrol", "update", f"JobId={job}", f"NodeList={kept}"])
    return True


def _lift_command(plan: RunPlan, job: str, sizes: str, banned: str) -> list[str]:
    """The sbatch command line of the helper job."""
    folder = RunDirectory(plan.directory).submission
    lift = run_module("jurymast.cluster.lift", job, sizes, *filter(None, [banned]))
    command = ["sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--time=5", "--job-name=jurymast-lift"]
    command += [f"--output={folder}/lift.log", "--open-mode=append", "--no-requeue", f"--chdir={folder}"]
    command += where_options(split_command_line(plan.sbatch_options, {}).options)
    if banned:
        command.append(f"--exclude={banned}")
    return [*command, f"--wrap=exec {shlex.join(lift)}"]


def why_ending(allocation: Allocation) -> str:
    """Why the job is ending, asked after a SIGTERM: cancelled, timeout, preempted, requeued, running, or
    Slurm's own word for another state; unknown without an answer.

    Slurm signals every process of the job, so the first scontrol may be killed as well.
    """
    for pause_s in (0.2, 0.5, 0.0):
        try:
            return reason_of(job_fields(allocation.job), allocation.restarts)
        except ClusterUnavailableError:
            time.sleep(pause_s)
    return "unknown"


def reason_of(job: dict[str, str], restarts: int) -> str:
    """The same from the fields of `scontrol show job`. While a job is completing, Slurm 22.05 shows
    COMPLETING in place of the reason, which then follows from the other fields."""
    states = set(job.get("JobState", "").split(","))
    preempted = job.get("PreemptTime", "None")
    if preempted not in ("None", "") and preempted >= job.get("StartTime", ""):
        return "preempted"  # the state remains RUNNING during the grace time
    if states == {"RUNNING"}:
        return STILL_RUNNING
    for word in ("CANCELLED", "TIMEOUT", "PREEMPTED"):
        if word in states:
            return word.lower()
    if int(job.get("Restarts", "0")) > restarts or "PENDING" in states:
        return "requeued"
    limit_s, ran_s = seconds_of(job.get("TimeLimit", "")), seconds_of(job.get("RunTime", ""))
    if limit_s is not None and ran_s is not None and ran_s >= limit_s:
        return "timeout"
    return "cancelled" if "COMPLETING" in states else job.get("JobState", "").lower() or "unknown"
