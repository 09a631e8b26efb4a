"""Our srun: a training step goes to the run's agents, everything else to the real one as it is."""

from __future__ import annotations

import os

from jurymast.script import recognise, shims
from jurymast.script.srun_options import parse
from jurymast.script.step import Step


def run(arguments: list[str]) -> int:
    """As srun's process: its exit code. Raises what a step raises."""
    step_code = _as_training(arguments)
    if step_code is None:
        os.execv(shims.real("srun", os.environ), ["srun", *arguments])
    return step_code


def _as_training(arguments: list[str]) -> int | None:
    """Exit code of a training step; None for what is none."""
    if shims.RUN_VARIABLE in os.environ and shims.STEP_VARIABLE not in os.environ:
        srun = parse(arguments)
        if srun is not None and recognise.starts_launcher(srun.command, recognise.read_shell_script):
            step = Step.of_environment()
            if recognise.on_all_nodes(srun, os.environ, step.active):
                return step.run(srun)
    return None
