"""What Slurm runs after each task (srun's --task-epilog, slurm.conf's TaskEpilog), for a rank that stands for
one. What these programs write to stderr is the task's; their standard output is nobody's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping

from jurymast.processes import IGNORED_BY_PYTHON, OF_JOBS

NAME = "jurymast-epilog"
# Slurm kills the user's after so many seconds, and waits for the site's for ever.
USERS_LIMIT_S, SITES_LIMIT_S = 5.0, 60.0
POLL_S = 0.01
# Both, and what it takes to start them and to kill ranks before them (seconds).
LIMIT_S = USERS_LIMIT_S + SITES_LIMIT_S + 5.0


def run(users: str, sites: str, variables: Mapping[str, str]) -> None:
    """Run both programs ("" for none), one after the other, in the place of a rank with these `variables`.
    One that fails changes nothing; this process's stderr gets a line about it."""
    changed = {**variables, "SLURM_SCRIPT_CONTEXT": "epilog_task"}
    for program, limit_s in ((users, USERS_LIMIT_S), (sites, SITES_LIMIT_S)):
        if program and (why := _failure(program, limit_s, changed)):
            sys.stderr.write(f"the task epilog {program} {why}\n")


def _failure(program: str, limit_s: float, variables: Mapping[str, str]) -> str:
    """Run one program, which is killed after `limit_s`; returns how it failed, "" if it did not."""
    if not os.path.isabs(program):  # Slurm takes no other
        return "cannot be run: its path does not begin with /"
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    ]
    by_default = (*OF_JOBS, *IGNORED_BY_PYTHON)
    try:
        pid = os.posix_spawn(
            program, [program], variables, file_actions=actions, setpgroup=0, setsigdef=by_default
        )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    until = time.monotonic() + limit_s
    while True:  # not by pidfd_open, which many Pythons and older kernels do not have
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"failed with {code}" if code else ""
        if time.monotonic() > until:
            break
        time.sleep(POLL_S)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"was killed after {limit_s:g} s"
