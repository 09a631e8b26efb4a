"""The exact request of a submission. A dry run shows it; submit sends it unchanged."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.batch_script import BatchScript
from jurymast.cluster.local import batch_process, submit_local
from jurymast.core.settings import RunPlan
from jurymast.errors import RunDirectoryError
from jurymast.policy.resolve import Resolved
from jurymast.rundir import RunDirectory, write_atomically


@dataclass(frozen=True)
class Request:
    """A submission. `argv` runs in the run directory with `script`, Slurm's batch script (empty on the local
    cluster). `users`: the user's own batch script, if one is submitted."""

    plan: RunPlan
    policy: str
    script: str
    argv: tuple[str, ...]
    users: str = ""

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.plan.directory)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.plan.run,
            "cluster": self.plan.cluster,
            "directory": self.plan.directory,
            "argv": list(self.argv),
            "script": self.script,
            "policy": self.policy,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True)
class Submitted:
    """The result of a request: the Slurm job id (empty on the local cluster), or the local process."""

    request: Request
    slurm_job: str = ""
    slurm_cluster: str = ""
    pid: int | None = None
    notes: str = ""  # what sbatch printed besides the job id

    @property
    def job(self) -> str:
        """The name of the allocation: the Slurm job id, or local-PID."""
        return self.slurm_job or f"local-{self.pid}"


def script_file(plan: RunPlan) -> Path:
    return RunDirectory(plan.directory).submission / "job.sh"


def users_script(run: RunDirectory) -> Path:
    """The copy of the user's batch script, named as Slurm names it on the node that runs it."""
    return run.submission / "slurm_script"


def build_request(plan: RunPlan, policy: Resolved, script: BatchScript | None = None) -> Request:
    """Build the request for this plan, with the batch script if there is one. Writes nothing and asks no
    other program."""
    text = policy.yaml(origins=True)
    if plan.cluster == "local":
        return Request(plan, text, "", batch_process(plan))
    from jurymast.cluster.slurm import command, render_script, script_around

    if script is not None:
        return Request(plan, text, script_around(plan, script), command(plan), script.text)
    return Request(plan, text, render_script(plan), command(plan))


def check_runs_directory(runs: Path, script: BatchScript | None = None) -> None:
    """Raise RunDirectoryError if no run directory usable for `script` can be made below `runs`."""
    if script is not None and ":" in str(runs):
        raise RunDirectoryError(
            f"the runs directory {str(runs)!r} has a colon, and batch scripts find jurymast by PATH",
            hint="choose another directory with --runs DIR",
        )
    if any(mark in str(runs) for mark in "%\\\n\r"):
        raise RunDirectoryError(
            f"the runs directory {str(runs)!r} has a character that Slurm does not take: %, \\ or line break",
            hint="choose another directory with --runs DIR",
        )
    place = runs
    while not foreign.exists(place) and place != place.parent:
        place = place.parent
    if not foreign.is_directory(place) or not os.access(place, os.W_OK | os.X_OK):
        raise RunDirectoryError(
            f"cannot write to the runs directory {runs}" + ("" if place == runs else f" ({place})"),
            hint="choose another directory with --runs DIR, on storage that all nodes share",
        )


def write_run_directory(request: Request) -> None:
    """Create the run directory with its plan, policy and batch script. Raises RunDirectoryError."""
    run = request.run_directory
    run.create()
    try:
        (run.submission / "jobs").mkdir(mode=0o700)
        run.save_plan(request.plan)
        write_atomically(run.policy_file, request.policy.encode())
        if request.users:
            data = request.users.encode(errors="surrogateescape")
            write_atomically(users_script(run), data)
        if request.script:
            write_atomically(script_file(request.plan), request.script.encode())
    except BaseException as error:
        remove_run_directory(request)
        if isinstance(error, OSError):
            what = f"cannot write the run directory {run.root}: {error.strerror}"
            raise RunDirectoryError(what, hint="choose another directory with --runs DIR") from error
        raise


def remove_run_directory(request: Request) -> None:
    """Remove the run directory of a failed submission, so that nothing half submitted is left."""
    shutil.rmtree(request.plan.directory, ignore_errors=True)


def submit(request: Request) -> Submitted:
    """Send the request. Raises RunDirectoryError, ClusterUnavailableError, SubmissionError."""
    write_run_directory(request)
    try:
        if request.plan.cluster == "local":
            return Submitted(request, pid=submit_local(request.plan.directory))
        from jurymast.cluster.slurm import submit_slurm

        return submit_slurm(request)
    except BaseException:
        remove_run_directory(request)
        raise
