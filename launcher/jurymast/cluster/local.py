"""The local cluster: the run's batch process on this machine, without Slurm."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any

import psutil

from jurymast import foreign
from jurymast.core.settings import RunPlan
from jurymast.errors import SubmissionError
from jurymast.rundir import RunDirectory, write_atomically, write_json


def batch_process(plan: RunPlan) -> tuple[str, ...]:
    """The command line of the process that runs as long as the job, on its first node; the same under
    Slurm."""
    return (plan.python, "-m", "jurymast.cluster.batch", plan.directory)


def submit_local(run_directory: str) -> int:
    """Start the run's batch process, detached from this terminal; returns its process id.

    `slurm/local.json` keeps the id together with the process's start time, so that cancel never ends a later
    process with the same id. Raises SubmissionError, RunDirectoryError.
    """
    run = RunDirectory(run_directory)
    plan = run.plan()
    log = os.open(
        run.submission / "job-local.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        process = subprocess.Popen(
            batch_process(plan),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Not in the user's directory, where files could hide Python's own modules; ranks start in the
            # plan's working directory.
            cwd=run.submission,
            start_new_session=True,
            close_fds=True,
        )
    except OSError as error:
        raise SubmissionError(f"cannot start {plan.python}: {error.strerror}") from error
    finally:
        os.close(log)
    try:
        started = psutil.Process(process.pid).create_time()
        record = {"pid": process.pid, "started": started, "host": socket.gethostname()}
        write_json(run.submission / "local.json", record)
        write_atomically(run.submission / "jobs" / f"local-{process.pid}", b"")
    except BaseException:
        process.kill()
        process.wait()
        raise
    # The process outlives this command, which does not wait for it. With a return code, Popen does not warn
    # about that.
    process.returncode = 0
    return process.pid


def local_process(run: RunDirectory) -> psutil.Process | None:
    """The run's batch process if it still runs on this machine."""
    try:
        record: dict[str, Any] = foreign.load(run.submission / "local.json")
        process = psutil.Process(int(record["pid"]))
        same = abs(process.create_time() - float(record["started"])) < 0.01
        alive = process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if same and alive and record.get("host") == socket.gethostname() else None
