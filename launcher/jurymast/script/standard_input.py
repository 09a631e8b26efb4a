"""What a step's tasks read as their standard input: srun's --input, or what srun's own standard input is."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from jurymast.cluster.sbatch import CommandLine
from jurymast.script.notes import say
from jurymast.script.output import CannotOpen, Naming, chosen, is_each_tasks

VARIABLE = "SLURM_STDINMODE"
COPY = "stdin"  # in a step's folder: what srun would have sent to its tasks


def inputs(
    srun: CommandLine, environment: Mapping[str, str], nodes: Sequence[str], tasks: int, folder: Path
) -> tuple[str, ...]:
    """Return the file that each of `tasks` on each of these `nodes` reads from its beginning, in each
    attempt: one for all of them, or one a task, where "" is none; () if no task reads anything. `folder`: the
    step's. Raises CannotOpen."""
    naming = Naming(srun, environment, nodes, tasks, folder)
    pattern, only = chosen(srun.last("input") or environment.get(VARIABLE, ""), naming.count)
    if pattern == os.devnull:
        return ()
    if pattern:
        count = naming.count if is_each_tasks(pattern) else 1
        names = [os.path.abspath(naming.name(pattern, task)) for task in range(count)]
        for name in names:
            _check(name)
        return tuple(names)
    copy = _copied(folder / COPY)
    if copy and only is not None:
        return tuple(copy if task == only else "" for task in range(naming.count))
    return (copy,) if copy else ()


def warn(srun: CommandLine, environment: Mapping[str, str]) -> None:
    """Say that ranks of a launcher have no standard input, if they are to have one."""
    said = srun.last("input") or environment.get(VARIABLE, "")
    if said and said.lower() != "none":
        say(
            f"ranks read nothing from the standard input (srun's --input={said}): give the file to the script"
        )


def _check(name: str) -> None:
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        raise CannotOpen(f"srun: could not open stdin file {name}: {error.strerror}") from error


def _copied(copy: Path) -> str:
    """Copy the rest of a file that is our standard input, as srun would read it; returns the copy's name, ""
    if there is nothing to read. A pipe may never end, so it is left alone."""
    try:
        kind = os.fstat(0).st_mode
    except OSError:  # closed
        return ""
    if not stat.S_ISREG(kind):
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            say("the tasks read nothing from srun's pipe, which may never end: use --input=FILE")
        return ""
    with open(0, "rb", closefd=False) as source, open(copy, "xb") as target:
        shutil.copyfileobj(source, target)
    return str(copy) if copy.stat().st_size else ""
