"""The srun that a batch script finds: a training step goes to the run's agents, any other step unchanged to
the real srun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from jurymast.cluster.sbatch_options import CommandLine
from jurymast.rundir import RunDirectory
from jurymast.script import recognise, shims
from jurymast.script.notes import say
from jurymast.script.srun_options import parse

if TYPE_CHECKING:
    from jurymast.script.step import Step


def run(arguments: list[str]) -> int:
    """Run in place of srun; returns its exit code. Raises what a step raises."""
    if not shims.in_the_script(os.environ):
        _really(arguments, shims.without_shims(os.environ))
    if shims.STEP_VARIABLE in os.environ:
        _really(arguments, os.environ)
    srun = parse(arguments)
    job = RunDirectory(os.environ[shims.RUN_VARIABLE])
    if not _may_train(srun) and not shims.trainings(job).exists():  # most steps: lose no time
        _really(arguments, os.environ)
    from jurymast.script.step import Step

    step = Step(job)
    code = None if srun is None else _as_training(step, srun)
    if code is None:
        environment, arguments = step.around_lost(os.environ, arguments, srun)
        _really(arguments, environment)
    return code


def _really(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    os.execve(shims.real("srun", os.environ), ["srun", *arguments], dict(environment))


def _may_train(srun: CommandLine | None) -> bool:
    read = recognise.read_shell_script
    return srun is not None and (
        recognise.starts_launcher(srun.command, read)
        or recognise.starts_ranks(srun.command, read)
        or recognise.names_python(srun.command)
    )


def _as_training(step: Step, srun: CommandLine) -> int | None:
    """Run a training step; returns its exit code, or None if the step is not a training."""
    tasks = recognise.tasks_a_node(srun, os.environ, step.active)
    read = recognise.read_shell_script
    if recognise.starts_launcher(srun.command, read):
        if tasks == 1:
            return step.run(srun)
        training = recognise.part_of(srun, os.environ, step.nodes[: step.active], read)
        if training is None:
            return None
        from jurymast.script import parts

        return parts.run(step, srun, training)
    if tasks * step.active > 1:
        if recognise.starts_ranks(srun.command, read):
            return step.run_tasks(srun, tasks)
        if recognise.names_python(srun.command):
            say(
                f"{srun.command[0]}: not recognized as a training; "
                "ranks that it starts run without failure handling"
            )
    return None
