"""Submission through submitit: its batch script and pickled entry, with sbatch's options passed through."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from jurymast.cluster.batch_script import BatchScript
from jurymast.cluster.entry import BatchEntry
from jurymast.cluster.planning import WARN_SIGNAL
from jurymast.cluster.request import Request, Submitted, script_file
from jurymast.core.settings import RunPlan
from jurymast.errors import RunDirectoryError, SubmissionError
from jurymast.processes import run_module
from jurymast.rundir import RunDirectory, write_atomically


class JurymastExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor, whose batch process is our Python itself.

    With a `request` it sends that request's script and command line as they are.
    """

    def __init__(self, folder: Path, python: str, request: Request | None = None) -> None:
        super().__init__(folder=folder, python=shlex.quote(python))
        self.request = request
        self.accepted: tuple[str, str] | None = None  # job id and cluster, once sbatch has taken the job
        self.notes = ""  # what sbatch, or the site's submission plugin, said besides

    @classmethod
    def affinity(cls) -> int:
        # A dry run needs no Slurm, and before a submission the commands are looked for with a better message.
        return 2

    @property
    def _submitit_command_str(self) -> str:
        # exec: Python becomes the batch process, so that signals for the batch process (B:) reach it.
        return f"exec {super()._submitit_command_str}"

    def render(self) -> str:
        text: str = super()._make_submission_file_text(self._submitit_command_str, "")
        return text

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.request.script if self.request is not None else self.render()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # job.sh has the script already, under the name that the dry run showed.
        return list(self.request.argv) if self.request is not None else ["sbatch", str(submission_file_path)]

    def _submit_command(self, command: str) -> Any:
        # submitit's own drops what sbatch says when it takes the job (a site's "moved to partition X"), and
        # prints a refusal that is reported as an error once more.
        done = sbatch(self._make_submission_command(self.folder / "job.sh"))
        self.notes = done.stderr.strip()
        if done.returncode != 0:
            raise FailedSubmissionError(f"sbatch refused the job: {slurms_words(done.stderr)}")
        return self.job_class(self.folder, self._get_job_id_from_submission_command(done.stdout))

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:
        text = string if isinstance(string, str) else string.decode()
        # `jobid[;cluster]`, alone on its line whatever a site's submission plugin prints around it.
        for line in reversed(text.splitlines()):
            job, _, cluster = line.strip().partition(";")
            if job.isdigit():
                self.accepted = (job, cluster)
                return job
        raise FailedSubmissionError(f"sbatch --parsable printed no job id: {text.strip()!r}")


def sbatch(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run sbatch until it has taken the job."""
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        # With SBATCH_WAIT sbatch returns at the job's end, and the entry would be in place too late.
        env={name: value for name, value in os.environ.items() if name != "SBATCH_WAIT"},
        start_new_session=True,  # Ctrl-C is for us alone: see _interrupt_held
    )


def script_around(plan: RunPlan, script: BatchScript) -> str:
    """What sbatch gets in place of a user's batch script: its options, and what runs it. Our own are on
    the command line, where they count more."""
    run = run_module(plan.python, "jurymast.script", "job", plan.directory)
    return f'#!/bin/sh\n{script.head}\nexec {shlex.join(run)} "$@"\n'


def render_script(plan: RunPlan) -> str:
    """The batch script's text."""
    folder = RunDirectory(plan.directory).submission
    executor = JurymastExecutor(folder, plan.python)
    extra: dict[str, Any] = {
        "no-kill": True,
        "open-mode": "append",
        "output": str(folder / "job-%j.log"),
        "signal": WARN_SIGNAL,
    }
    extra["requeue" if plan.requeue else "no-requeue"] = True
    executor.update_parameters(
        job_name=plan.name,
        nodes=plan.nodes,
        ntasks_per_node=1,
        time=None,  # submitit's own default is 5 minutes; without one the partition's limit holds
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,
        # Away from the user's files: Python looks for modules in the directory it starts in, and a queue.py
        # there must not replace Python's own. The ranks start in the plan's working directory.
        setup=[f"cd {shlex.quote(str(folder))} || exit {RunDirectoryError.exit_code}"],
        additional_parameters=extra,
    )
    return executor.render()


def command(plan: RunPlan) -> tuple[str, ...]:
    """sbatch's command line. The user's options stand here, where they win over those in the script."""
    nodes = plan.excluded_at(plan.submitted_at)
    exclude = (f"--exclude={','.join(nodes)}",) if nodes else ()
    arguments = plan.arguments if plan.batch else ()
    return ("sbatch", "--parsable", *plan.sbatch_options, *exclude, str(script_file(plan)), *arguments)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Let Ctrl-C take effect afterwards, so that a job is never taken by Slurm and forgotten here."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def submit_slurm(request: Request) -> Submitted:
    """Hand the request to sbatch. Raises SubmissionError with Slurm's own words.

    When anything fails after Slurm took the job (Ctrl-C, a full disk), the job is cancelled.
    """
    run = request.run_directory
    executor = JurymastExecutor(run.submission, request.plan.python, request)
    try:
        with _interrupt_held():
            executor.submit(BatchEntry(str(run.root)))
        job, cluster = executor.accepted or ("", "")
        write_atomically(run.submission / "jobs" / job, cluster.encode())
    except BaseException as error:
        if executor.accepted is not None:
            _cancel(*executor.accepted)
        if isinstance(error, FailedSubmissionError):
            raise SubmissionError(str(error)) from error
        if isinstance(error, OSError):
            raise SubmissionError(f"the job could not be submitted: {error}") from error
        raise
    return Submitted(request, slurm_job=job, slurm_cluster=cluster, notes=executor.notes)


def _cancel(job: str, cluster: str) -> None:
    where = [f"--clusters={cluster}"] if cluster else []
    subprocess.run(["scancel", *where, job], check=False, stdin=subprocess.DEVNULL)


def slurms_words(text: str) -> str:
    """sbatch's complaint on one line, without the program's name before each part."""
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"


def test_only(request: Request) -> str:
    """Slurm's words on whether and when the job could start; submits nothing. Raises SubmissionError."""
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
