"""Helper processes: they end together with the process that started them. `Child` runs a module of ours,
which reads orders and writes answers as lines; if it hangs or crashes, this process is not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
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


def log_as(name: str) -> None:
    """Send this process's log to its standard output, the job's log, with the time and `name`."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format=f"%(asctime)s {name}: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )  # fmt: skip


# Not in the user's directory: Python looks for modules in the directory in which it starts, and a queue.py
# there must not replace Python's own.
_AWAY = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def run_module(python: str, module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules, whatever directory the user is in."""
    return [python, "-c", _AWAY, module, *arguments]


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` shows for this process; 15 characters at most."""
    with contextlib.suppress(OSError):  # only people look at the name
        Path("/proc/self/comm").write_text(name, encoding="utf-8")


LINE_BYTES_MAX = 1 << 20


class Child:
    """A running child process. `killed`: whether we killed it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.killed = False

    @classmethod
    async def start(cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start a Python module. `environment` is added to this process's own. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, limit=LINE_BYTES_MAX,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal; None while the process exists."""
        return self._process.returncode

    def tell(self, line: bytes) -> None:
        """Send a line; does nothing if the process has ended."""
        if not self._stdin.is_closing():
            self._stdin.write(line + b"\n")

    async def told(self) -> None:
        """Wait until everything sent is on its way. Raises ConnectionError if the process has ended."""
        await self._stdin.drain()

    async def hear(self) -> bytes:
        """Return the next line; b"" after the last. Raises OSError, and ValueError for a line that is too
        long."""
        return await self._stdout.readline()

    async def gone(self, limit_s: float) -> bool:
        """Wait for the process to end. Call this before `kill` on a process that has closed its output:
        otherwise asyncio would lose its exit code."""
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def kill(self, limit_s: float) -> bool:
        """Kill the process; False if it still exists: as long as storage or a driver blocks it, even SIGKILL
        does not end it."""
        self.killed = True
        self._stdin.close()
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return await self.gone(limit_s)
