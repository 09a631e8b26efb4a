"""Makes a rank answer a signal by writing the Python stacks of its threads to a file.

`faulthandler` writes them within the signal's handler, so a rank that is stuck in C code, or holds the GIL,
answers as well. A rank that is stopped, or stuck in the kernel, does not.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal

# A real-time signal in the middle of the range: C libraries use the lower end, programs use both ends.
NUMBER = signal.SIGRTMIN + 17
PATH_VARIABLE = "JURYMAST_STACKS"
# Where torch's flight recorder writes; the directory must exist.
FLIGHT_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"

# The descriptor kept for the answers is below this, and below the process's limit.
HIGH_DESCRIPTOR = 1024
# Heads the stack of the thread that received the signal: the main thread, unless it blocks the signal.
OWN_THREAD = "Current thread"


def file_name(attempt: int, local_rank: int) -> str:
    """Return the name of the rank's file in the agent's own temporary directory."""
    return f"stacks-{attempt}-{local_rank}.txt"


def listen() -> None:
    """Answer from now on, into the file that the environment names; do nothing if it names none."""
    path = os.environ.get(PATH_VARIABLE)
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # a rank that cannot answer still trains
    try:
        # A high descriptor, so that the script's own files get the numbers that they would get without us.
        high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _high_descriptor())
    except OSError:
        high = file
    else:
        os.close(file)
    faulthandler.register(NUMBER, file=high, all_threads=True)


def _high_descriptor() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = HIGH_DESCRIPTOR if soft == resource.RLIM_INFINITY else min(soft, HIGH_DESCRIPTOR)
    return max(3, most - 8)


def listens(pid: int) -> bool:
    """Return whether the process catches the signal, which would end it otherwise. See proc(5): SigCgt."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            caught = next((line for line in file if line.startswith("SigCgt:")), "")
    except OSError:
        return False
    return bool(int(caught.partition(":")[2] or "0", 16) >> (NUMBER - 1) & 1)
