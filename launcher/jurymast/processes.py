"""How a process becomes a helper that lives and dies with the one that started it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """This signal for this process when its parent's thread that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_helper(nice: int) -> int:
    """Become the agent's helper: `nice` to the ranks, and deaf to what Slurm signals to everything in the
    job, since whether to end is the agent's decision. Returns a descriptor for answers on what was stdout:
    what libraries print goes to stderr from now on."""
    os.nice(nice)
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def log_as(name: str) -> None:
    """What this process logs goes to its standard output, the job's log, with the time and `name`."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format=f"%(asctime)s {name}: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )  # fmt: skip


# Away from the user's files: Python looks for modules in the directory it starts in, and a queue.py there
# must not replace Python's own.
_AWAY = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def run_module(python: str, module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules in whatever directory the user is."""
    return [python, "-c", _AWAY, module, *arguments]


def name_process(name: str) -> None:
    """What `ps -o comm` shows of this process; 15 characters at most."""
    try:
        with open("/proc/self/comm", "w", encoding="utf-8") as file:
            file.write(name)
    except OSError:
        pass  # only people look at it
