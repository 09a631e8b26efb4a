"""What Slurm runs before each task (slurm.conf's TaskProlog, srun's --task-prolog), for a rank that stands
for one: lines that such a program prints change the task's environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from jurymast.processes import IGNORED_BY_PYTHON

NOT_RUN = 1  # the exit code of a task whose prolog cannot be run


class PrologError(Exception):
    """A prolog failed, and so its task; `code` is the exit code of both."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(programs: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Run these `programs`, one after the other, in the place of a rank with these `variables`, and return
    what they make of the variables. What they want printed goes to this process's standard output. Raises
    PrologError."""
    changed = {**variables, "SLURM_SCRIPT_CONTEXT": "prolog_task"}  # Slurm's tasks keep it
    for program in programs:
        lines, code = _told(program, changed)
        for line in applied(lines, changed):
            os.write(1, line.encode(errors="surrogateescape") + b"\n")
        if code:
            raise PrologError(f"the task prolog {program} failed with {code}", code if code > 0 else NOT_RUN)
    return changed


def applied(lines: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Change `variables` as a prolog's lines say, `export NAME=value` and `unset NAME`; return what those
    with `print` say. Others mean nothing."""
    printed = []
    for line in lines:
        word, _, rest = line.partition(" ")
        rest = rest.lstrip()
        if word == "print":
            printed.append(rest)
        elif word == "export" and "=" in rest:
            name, _, value = rest.partition("=")
            if name.rstrip():
                variables[name.rstrip()] = value
        elif word == "unset":
            variables.pop(rest.rstrip(), None)
    return printed


def _told(program: str, variables: dict[str, str]) -> tuple[list[str], int]:
    """Run a prolog; returns the lines that it prints, and its exit code. Only with functions of `os`, so that
    the rank has no more modules than its script expects."""
    if not os.path.isabs(program):  # Slurm takes no other
        raise PrologError(f"the task prolog {program} cannot be run: its path does not begin with /", NOT_RUN)
    ours, theirs = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    try:
        pid = os.posix_spawn(
            program, [program], variables, file_actions=actions, setpgroup=0, setsigdef=IGNORED_BY_PYTHON
        )
    except OSError as error:
        raise PrologError(f"the task prolog {program} cannot be run: {error.strerror}", NOT_RUN) from error
    finally:
        os.close(theirs)
    said = b""
    while data := os.read(ours, 1 << 16):
        said += data
    os.close(ours)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said.decode(errors="surrogateescape").split("\n"), code
