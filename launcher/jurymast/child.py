"""A module of ours in a process of its own, which reads orders and writes answers as lines. If it hangs or
crashes, this process is not affected."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress

from jurymast.interpreter import run_module
from jurymast.programs import at_once

LINE_BYTES_MAX = 2 << 20
REST_LIMIT_S = 1.0


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
            *at_once(run_module(module, *arguments)), limit=LINE_BYTES_MAX,
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
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
        gone = await self.gone(limit_s)
        # RuntimeError: somebody else reads it. A process in a session of its own may hold the pipe open.
        with suppress(asyncio.TimeoutError, RuntimeError, OSError):
            await asyncio.wait_for(self._read_rest(), REST_LIMIT_S)
        return gone

    async def _read_rest(self) -> None:
        """Read what nobody wants: asyncio closes a pipe only at its end, and reads none that is full."""
        while await self._stdout.read(LINE_BYTES_MAX):
            pass
