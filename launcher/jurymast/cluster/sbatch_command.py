"""Runs the installed sbatch: its environment, the job in its answer, its reason for a refusal. Light, since a
supervisor asks for nodes by it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from jurymast import foreign, programs
from jurymast.cluster.sbatch import version_of
from jurymast.core.judges.slurm_variables import without_a_job
from jurymast.errors import SubmissionError


def environment_for_sbatch(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job that is submitted from this one, which may be another job's. With SBATCH_WAIT,
    sbatch, and therefore we, would return only when the job ends."""
    values = without_a_job(environment)
    values.pop("SBATCH_WAIT", None)
    return values


def sbatch(
    argv: Sequence[str],
    variables: Mapping[str, str] | None = None,
    given: Path | None = None,
    limit_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run sbatch, which returns once it has accepted the job, with these variables (None: our own, without
    those of another job), and with the file `given` as its standard input. Raises SubmissionError with
    Slurm's own words, or if it has not answered within `limit_s`: it may have submitted the job then."""
    with nullcontext(subprocess.DEVNULL) if given is None else foreign.reading(given) as file:
        try:
            done = programs.run(
                argv,
                capture_output=True,
                stdin=file,
                env=environment_for_sbatch(os.environ) if variables is None else variables,
                start_new_session=True,  # only we get Ctrl-C: see `slurm._interrupt_held`
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as error:
            raise SubmissionError(f"sbatch did not answer within {limit_s:g} s") from error
    if done.returncode != 0:
        raise SubmissionError(
            f"sbatch refused the job: {slurms_words(done.stderr)}", hint=hint_for(done.stderr, argv)
        )
    return done


def hint_for(said: str, argv: Sequence[str]) -> str:
    """A hint for what sbatch said: of an option that the installed one does not have, or of a total of GPUs
    that one node cannot have; "" if it has refused something else."""
    if "node configuration" in said and any(word.startswith("--gpus=") for word in argv):
        return "without --nodes, a total of --gpus counts as that of one node: give --nodes=N as well"
    found = re.search(r"(?:unrecognized|invalid|unknown) option:? (?:-- )?'?(-{0,2}[\w-]+)", said)
    if found is None:
        return ""
    where = version_of("sbatch") or "Slurm"
    return f"{where}, which is installed here, does not have {found[1]}: leave it out, or use a newer Slurm"


def accepted(said: str) -> tuple[str, str]:
    """The job's id and its Slurm cluster, "" for this one. They are on a line of their own
    (`jobid[;cluster]`) among what a site's submission plugin prints. Raises SubmissionError."""
    for line in reversed(said.splitlines()):
        job, _, cluster = line.strip().partition(";")
        if job.isdigit():
            return job, cluster
    raise SubmissionError(
        f"sbatch --parsable printed no job id: {said.strip()!r}",
        hint="see squeue --me: the job may have been submitted",
    )


def slurms_words(text: str) -> str:
    """sbatch's error on one line, without the program's name before each part."""
    lines = [line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it gave no reason"
