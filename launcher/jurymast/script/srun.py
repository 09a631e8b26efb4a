"""Our srun: a training step goes to the run's agents, everything else to the real one as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from jurymast.script import recognise, shims
from jurymast.script.srun_options import parse
from jurymast.script.step import Step


def run(arguments: list[str]) -> int:
    """As srun's process: its exit code. Raises what a step raises."""
    if not shims.in_the_script(os.environ):
        _really(arguments, shims.without_shims(os.environ))
    if shims.STEP_VARIABLE in os.environ:
        _really(arguments, os.environ)
    step = Step.of_environment()
    code = _as_training(step, arguments)
    if code is None:
        environment, options = step.around_lost(os.environ)
        _really([*options, *arguments], environment)
    return code


def _really(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    os.execve(shims.real("srun", os.environ), ["srun", *arguments], dict(environment))


def _as_training(step: Step, arguments: list[str]) -> int | None:
    """Exit code of a training step; None for what is none."""
    srun = parse(arguments)
    if srun is None:
        return None
    tasks = recognise.tasks_a_node(srun, os.environ, step.active)
    if recognise.starts_launcher(srun.command, recognise.read_shell_script):
        return step.run(srun) if tasks == 1 else None
    if tasks * step.active < 2:
        return None
    python = recognise.python_command(srun.command) is not None
    if python or recognise.starts_python(srun.command, recognise.read_shell_script):
        return step.run_tasks(srun, tasks)
    return None
