"""What each rank runs of a function that was submitted to submitit's executor `jurymast`, and what the
function can learn there of its job: `python -m jurymast.worker.function FOLDER`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.job_environment import JobEnvironment, SignalHandler
from submitit.core.utils import (
    DelayedSubmission,
    JobPaths,
    UncompletedJobError,
    cloudpickle_dump,
    temporary_save_path,
)

from jurymast import foreign
from jurymast.core.state.texts import expanded
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.worker.link import LOCAL_RANK_VARIABLE, WORLD_SIZE_VARIABLE
from jurymast.worker.rank import ERRORS_VARIABLE, LOG_VARIABLE

PREFIX = "SUBMITIT_JURYMAST_"
# Where a rank's numbers stand: under torchrun's names, or, if it stands for a task of Slurm's, under those.
NUMBERS = {
    "global_rank": ("RANK", "SLURM_PROCID"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    "node": ("GROUP_RANK", "SLURM_NODEID"),
    "num_tasks": ("WORLD_SIZE", "SLURM_NTASKS"),
    "num_nodes": ("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES"),
}
UNWANTED = "Job not requeued because: checkpoint function returned None."  # submitit's words
# submitit's helpers set these, and refuse to if they are there.
TORCHS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class JurymastJobEnvironment(JobEnvironment):
    """submitit's view of the job in a rank. Whether and where the job goes on is the supervisor's decision:
    at its SIGTERM the state is kept (`checkpoint`), and nothing is requeued from here."""

    _env = {name: PREFIX + name.upper() for name in (*NUMBERS, "job_id", "nodes")}
    # The function's pickle, open; the name may be another user's file by the time that submitit reads it.
    held: int | None = None

    @property
    def paths(self) -> JobPaths:
        found = super().paths
        return found if self.held is None else HeldPaths(found, self.held)

    @property
    def hostnames(self) -> list[str]:
        return expanded(os.environ.get(self._env["nodes"], "")) or [self.hostname] * self.num_nodes

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        paths = super().paths  # what it keeps is another file
        handler = SignalHandler(self, paths, submission)
        keeps = hasattr(submission.function, "checkpoint") and self.global_rank == 0

        def keep(number: int, frame: FrameType | None) -> None:
            before = paths.submitted_pickle.stat()
            with contextlib.suppress(SystemExit):
                handler.checkpoint_and_exit(number, frame)
            if keeps and os.path.samestat(before, paths.submitted_pickle.stat()):  # it returned None
                _end_with_job(paths)

        def leave(number: int, frame: FrameType | None) -> None:
            keep(number, frame)
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, leave)
        signal.signal(self._usr_sig(), keep)


class HeldPaths(JobPaths):
    def __init__(self, paths: JobPaths, held: int) -> None:
        super().__init__(paths._folder, paths.job_id, paths.task_id)
        self._held = Path(f"{foreign.HELD}{held}")

    @property
    def submitted_pickle(self) -> Path:
        return self._held


def own_variables(variables: Mapping[str, str], job: str) -> dict[str, str]:
    """The variables of `JurymastJobEnvironment`, for a rank with these `variables` of the Slurm job `job`, or
    of the local one."""
    torchrun = "RANK" in variables
    found = {PREFIX + to.upper(): variables[names[not torchrun]] for to, names in NUMBERS.items()}
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    found[f"{PREFIX}JOB_ID"] = job if torchrun or array is None else f"{array}_{task}"
    found[f"{PREFIX}NODES"] = "" if torchrun else variables.get("SLURM_JOB_NODELIST", "")
    return {**found, "SUBMITIT_EXECUTOR": "jurymast"}


def _life() -> dict[str, Any]:
    """The Slurm job, and how often it was requeued."""
    run = RunDirectory(os.environ["JURYMAST_RUN_DIR"])
    found: dict[str, Any] = foreign.load(run.allocation_file, foreign.PLAN_BYTES_MAX)
    return found


def _unwanted(paths: JobPaths) -> Path:
    return paths.folder / f"{paths.job_id}_0_unwanted"


def _end_with_job(paths: JobPaths) -> None:
    """Note that the function does not go on when the job is started again, as submitit would have it.
    Restarts within the job are none of that: it never hears of them elsewhere."""
    write_atomically(_unwanted(paths), json.dumps(_life()["restarts"]).encode())


def _has_ended(paths: JobPaths, restarts: int) -> bool:
    """Whether the function wanted to end with an earlier life of the job. If so, that is its result."""
    note = _unwanted(paths)
    if not foreign.exists(note) or foreign.load_own(note, foreign.NOTE_BYTES_MAX) >= restarts:
        return False
    with temporary_save_path(paths.result_pickle) as temporary:
        cloudpickle_dump(("error", f"UncompletedJobError: {UNWANTED}"), temporary)
    return True


def main(folder: str) -> None:
    """Run the function, and leave its result in the folder. Raises what the function raises."""
    life = _life()
    os.environ.update(own_variables(os.environ, life["job"]))
    for ours, name in ((LOCAL_RANK_VARIABLE, "LOCAL_RANK"), (WORLD_SIZE_VARIABLE, "WORLD_SIZE")):
        os.environ.setdefault(ours, os.environ.get(name, ""))
    for name in TORCHS:
        os.environ.pop(name, None)
    os.environ["SUBMITIT_FOLDER"] = folder
    paths = JurymastJobEnvironment().paths
    # To read another user's would run that user's code.
    JurymastJobEnvironment.held = foreign.open_own(paths.submitted_pickle, closed=0)
    _prepare(paths, os.environ)
    if _has_ended(paths, life["restarts"]):
        raise UncompletedJobError(UNWANTED)
    from submitit.core.submission import process_job

    process_job(folder)


def _prepare(paths: JobPaths, variables: Mapping[str, str]) -> None:
    """Have submitit's names of this rank's logs lead to those of this attempt, and remove what an attempt
    before has left: its result, and what it had half written."""
    paths.folder.mkdir(parents=True, exist_ok=True)
    for path, name in ((paths.stdout, LOG_VARIABLE), (paths.stderr, ERRORS_VARIABLE)):
        if log := variables.get(name):
            new = path.with_name(f".{path.name}.{os.getpid()}")
            new.symlink_to(log)
            new.replace(path)
    written = [paths.result_pickle] + [paths.submitted_pickle] * (not paths.task_id)
    for path in (paths.result_pickle, *(path.with_suffix(f"{path.suffix}.save_tmp") for path in written)):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
