"""Our front ends, found before the real programs: in a directory that is first on PATH, and, for programs of
Python's (torchrun of an activated environment, `python -m torch.distributed.run`), by a hook that Python
imports when it starts."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from jurymast.errors import ClusterUnavailableError
from jurymast.processes import run_module
from jurymast.rundir import RunDirectory, make_folder, write_atomically

# The batch script's run directory, for whatever runs below the script.
RUN_VARIABLE = "JURYMAST_SCRIPT_RUN"
# The step's folder, for whatever runs below the command of a training step.
STEP_VARIABLE = "JURYMAST_STEP"
PROGRAMS = ("srun", "torchrun")
LAUNCHER = "launcher"  # for the hook: the first argument says which
HOOK = str(Path(__file__).parent / "hook")
# A module that is loaded by the script may put the real srun before ours on PATH; a function of the shell
# comes before all of PATH.
FUNCTION = "BASH_FUNC_srun%%"


def folder(directory: RunDirectory) -> Path:
    return directory.submission / "bin"


def write(directory: RunDirectory, python: str) -> None:
    """Raises OSError."""
    place = folder(directory)
    make_folder(place)
    texts = {name: _front_end(python, name) for name in PROGRAMS}
    texts[LAUNCHER] = _front_end(python)
    for name, text in texts.items():
        write_program(place / name, text)


def write_program(path: Path, text: str) -> None:
    """Raises OSError."""
    write_atomically(path, text.encode())
    os.chmod(path, 0o700)


def _front_end(python: str, *name: str) -> str:
    return f'#!/bin/sh\nexec {shlex.join(run_module(python, "jurymast.script", *name))} "$@"\n'


def with_shims(environment: Mapping[str, str], directory: RunDirectory) -> dict[str, str]:
    """`environment` with ours before all others, once."""
    values = without_shims(environment)
    place = str(folder(directory))
    values["PATH"] = os.pathsep.join([place, values.get("PATH", os.defpath)])
    values["PYTHONPATH"] = os.pathsep.join([HOOK, *filter(None, [values.get("PYTHONPATH")])])
    values[FUNCTION] = f'() {{  {shlex.quote(place + "/srun")} "$@"\n}}'
    values[RUN_VARIABLE] = str(directory.root)
    return values


def without_shims(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as the user has it."""
    values = dict(environment)
    run = values.pop(RUN_VARIABLE, "")
    values.pop(STEP_VARIABLE, None)
    values.pop(FUNCTION, None)
    for name, ours in (("PATH", str(folder(RunDirectory(run))) if run else ""), ("PYTHONPATH", HOOK)):
        if name in values:
            kept = [entry for entry in values[name].split(os.pathsep) if entry != ours]
            values[name] = os.pathsep.join(kept)
            if not kept:
                del values[name]
    return values


def real(program: str, environment: Mapping[str, str]) -> str:
    """The path of the program that the user would get without ours. Raises ClusterUnavailableError."""
    found = shutil.which(program, path=without_shims(environment).get("PATH", os.defpath))
    if found is None:
        raise ClusterUnavailableError(f"{program} is not on PATH: {environment.get('PATH', '')}")
    return found
