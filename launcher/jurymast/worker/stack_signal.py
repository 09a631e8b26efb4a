"""Makes a rank answer a signal by writing the Python stacks of its threads to a file.

`faulthandler` writes them within the signal's handler, so a rank that is stuck in C code, or holds the GIL,
answers as well. A rank that is stopped, or stuck in the kernel, does not.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import platform
import resource
import signal

# A real-time signal in the middle of the range: C libraries use the lower end, programs use both ends.
NUMBER = signal.SIGRTMIN + 17
PATH_VARIABLE = "JURYMAST_STACKS"
# Where torch's flight recorder writes; the directory must exist.
FLIGHT_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"

# The descriptor kept for the answers is below this, and below the process's limit.
HIGH_DESCRIPTOR = 1024
# Heads the stack of the thread that received the signal, which is the main thread's.
OWN_THREAD = "Current thread"
# The number of the system call tgkill, which C libraries have a function for only since 2019.
_TGKILL = {"x86_64": 234, "aarch64": 131}


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


def ask(pid: int) -> None:
    """Send the signal to the process's main thread. What is sent to the process any thread may take, as it
    does while the main thread waits for a processor: no stack is then known to be the main thread's. OSError
    if the process is gone."""
    call = _TGKILL.get(platform.machine())
    if call is None:
        os.kill(pid, NUMBER)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), pid, pid, int(NUMBER)) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def listens(pid: int) -> bool:
    """Return whether the process catches the signal, which would end it otherwise, and its main thread does
    not block it. See proc(5): SigCgt, SigBlk."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            words = dict(line.split(":", 1) for line in file if line.startswith(("SigCgt:", "SigBlk:")))
    except OSError:
        return False
    caught, blocked = (int(words.get(name, "0"), 16) >> (NUMBER - 1) & 1 for name in ("SigCgt", "SigBlk"))
    return bool(caught and not blocked)
