"""Programs that are not ours, such as Slurm's commands: where they are, and what they print.

They are found by PATH, but never in the directory that this process was started in: an empty or relative part
of PATH means another directory in each directory, and in one of another user's its `squeue` would run that
user's code. What trains is not ours: a user's script finds its programs as it does without us.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

ENV = "/usr/bin/env"


def located(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Where the program is; None if it is in no absolute part of PATH."""
    parts = environment.get("PATH", os.defpath).split(":")
    return shutil.which(name, path=":".join(part for part in parts if part.startswith("/")))


def executable(name: str) -> str:
    """The same as a path. Raises FileNotFoundError."""
    if "/" in name:
        return name
    found = located(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return found


def at_once(command: Sequence[str]) -> list[str]:
    """The command line by which this program, named by its path, is started without waiting for the storage
    that it is on. A process stands still, with all its threads, until the kernel has opened the program of
    one that it starts: `env` is of the node's own system."""
    program = command[0]
    plain = program.startswith("/") and "=" not in program and os.access(ENV, os.X_OK)
    return [ENV, *command] if plain else [*command]


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it prints is text, whatever bytes others have put there (Slurm keeps
    names of jobs and reasons of nodes as they are). Raises OSError, subprocess.TimeoutExpired."""
    words = at_once([executable(command[0]), *command[1:]])
    return subprocess.run(words, text=True, errors="replace", check=False, **options)
