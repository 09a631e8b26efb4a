"""Submission to Slurm: submitit writes the batch script, and sbatch gets it with the user's options."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from jurymast.cluster.batch_script import BatchScript
from jurymast.cluster.local import batch_process
from jurymast.cluster.planning import WARN_SIGNAL
from jurymast.cluster.request import Request, Submitted, script_file
from jurymast.core.settings import RunPlan
from jurymast.errors import RunDirectoryError, SubmissionError
from jurymast.processes import run_module
from jurymast.rundir import RunDirectory, write_atomically


def sbatch(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run sbatch, which returns once it has accepted the job."""
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        # With SBATCH_WAIT, sbatch, and therefore we, would return only when the job ends.
        env={name: value for name, value in os.environ.items() if name != "SBATCH_WAIT"},
        start_new_session=True,  # only we get Ctrl-C: see _interrupt_held
    )


def script_around(plan: RunPlan, script: BatchScript) -> str:
    """The script that sbatch gets in place of a user's batch script: its options, and the command that runs
    it. Our own options are on the command line, which takes precedence."""
    run = run_module(plan.python, "jurymast.script", "job", plan.directory)
    return f'#!/bin/sh\n{script.head}\nexec {shlex.join(run)} "$@"\n'


def render_script(plan: RunPlan) -> str:
    """The batch script's text."""
    folder = RunDirectory(plan.directory).submission
    extra: dict[str, Any] = {
        "no-kill": True,
        "open-mode": "append",
        "output": str(folder / "job-%j.log"),
        "signal": WARN_SIGNAL,
    }
    extra["requeue" if plan.requeue else "no-requeue"] = True
    # submitit only formats the options: its executor would submit a pickle with signal handlers that requeue
    # by themselves, which is the supervisor's decision.
    text: str = _make_sbatch_string(
        # With exec, Python becomes the batch process, so that signals for the batch process (B:) reach it.
        command=f"exec {shlex.join(batch_process(plan))}",
        folder=folder,
        job_name=plan.name,
        nodes=plan.nodes,
        ntasks_per_node=1,
        time=None,  # submitit's own default is 5 minutes; without one the partition's limit holds
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        # Not in the user's directory: Python looks for modules in the directory in which it starts, and a
        # queue.py there must not replace Python's own. The ranks start in the plan's working directory.
        setup=[f"cd {shlex.quote(str(folder))} || exit {RunDirectoryError.exit_code}"],
        additional_parameters=extra,
    )
    return text


def command(plan: RunPlan) -> tuple[str, ...]:
    """sbatch's command line. It contains the user's options, so that they override those in the script."""
    nodes = plan.excluded_at(plan.submitted_at)
    exclude = (f"--exclude={','.join(nodes)}",) if nodes else ()
    arguments = plan.arguments if plan.batch else ()
    return ("sbatch", "--parsable", *plan.sbatch_options, *exclude, str(script_file(plan)), *arguments)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of this context, so that no job is accepted by Slurm and then forgotten
    here."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def submit_slurm(request: Request) -> Submitted:
    """Submit the request with sbatch. Raises SubmissionError with Slurm's own words.

    If anything fails after Slurm accepted the job (Ctrl-C, a full disk), the job is cancelled.
    """
    job, cluster = "", ""
    try:
        with _interrupt_held():
            done = sbatch(request.argv)
            if done.returncode != 0:
                raise SubmissionError(f"sbatch refused the job: {slurms_words(done.stderr)}")
            job, cluster = accepted(done.stdout)
        write_atomically(request.run_directory.submission / "jobs" / job, cluster.encode())
    except BaseException as error:
        if job:
            _cancel(job, cluster)
        if isinstance(error, OSError):
            raise SubmissionError(f"the job could not be submitted: {error}") from error
        raise
    # A site's submission plugin may print more ("moved to partition X"), which is for the user.
    return Submitted(request, slurm_job=job, slurm_cluster=cluster, notes=done.stderr.strip())


def accepted(said: str) -> tuple[str, str]:
    """The job's id and its Slurm cluster, "" for this one. They are on a line of their own
    (`jobid[;cluster]`) among what a site's submission plugin prints. Raises SubmissionError."""
    for line in reversed(said.splitlines()):
        job, _, cluster = line.strip().partition(";")
        if job.isdigit():
            return job, cluster
    raise SubmissionError(f"sbatch --parsable printed no job id: {said.strip()!r}")


def _cancel(job: str, cluster: str) -> None:
    where = [f"--clusters={cluster}"] if cluster else []
    subprocess.run(["scancel", *where, job], check=False, stdin=subprocess.DEVNULL)


def slurms_words(text: str) -> str:
    """sbatch's error on one line, without the program's name before each part."""
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"


def test_only(request: Request) -> str:
    """Slurm's estimate of whether and when the job could start; submits nothing. Raises SubmissionError."""
    with tempfile.NamedTemporaryFile("w", prefix="jurymast-", suffix=".sh") as file:
        file.write(request.script)
        file.flush()
        ours = str(script_file(request.plan))
        done = subprocess.run(
            [file.name if word == ours else word for word in request.argv],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode != 0:
        raise SubmissionError(f"sbatch refused the job: {slurms_words(done.stderr)}")
    return slurms_words(done.stderr)
