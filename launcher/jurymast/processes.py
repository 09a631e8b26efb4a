"""How a process becomes a helper that ends together with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process when the thread that started it ends, for whatever
    reason."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_helper(nice: int) -> int:
    """Become the agent's helper: lower the priority by `nice` in favour of the ranks, and ignore the signals
    that Slurm sends to the whole job, since the agent decides when to end. Returns a descriptor for answers
    on the former stdout: what libraries print goes to stderr from now on."""
    os.nice(nice)
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def leave_no_core() -> int:
    """Have the kernel write no core file of this process, which would hold the run's secret and the ranks'
    images. Returns the limit that held before, in bytes, for those that it starts for the user."""
    before, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    return before


def allow_core(limit: int) -> None:
    """Restore the limit that `leave_no_core` returned."""
    resource.setrlimit(resource.RLIMIT_CORE, (limit, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def log_as(name: str) -> None:
    """Send this process's log to its standard output, the job's log, with the time and `name`."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format=f"%(asctime)s {name}: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )  # fmt: skip


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` shows for this process; 15 characters at most."""
    with contextlib.suppress(OSError):  # only people look at the name
        Path("/proc/self/comm").write_text(name, encoding="utf-8")
