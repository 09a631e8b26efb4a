"""A module of ours in a process of its own, which takes orders and answers in lines. What hangs or crashes
there leaves this process as it is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

LINE_BYTES_MAX = 1 << 20


class Child:
    """`killed`: we did it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.killed = False

    @classmethod
    async def start(cls, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Child:
        """`environment` is added to this process's own. Raises OSError."""
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
        """Its exit code, minus a signal's number; None while it is there."""
        return self._process.returncode

    def tell(self, line: bytes) -> None:
        """One that has ended hears nothing."""
        if not self._stdin.is_closing():
            self._stdin.write(line + b"\n")

    async def told(self) -> None:
        """Wait until what it was told is on its way. Raises ConnectionError when it has ended."""
        await self._stdin.drain()

    async def hear(self) -> bytes:
        """Its next line; b"" after its last. Raises OSError, and ValueError for a line without an end."""
        return await self._stdout.readline()

    async def gone(self, limit_s: float) -> bool:
        """Wait for its end. One that has said its last is to be killed only after that: asyncio would lose
        how it ended."""
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def kill(self, limit_s: float) -> bool:
        """False when it is still there: while storage or a driver holds it, not even this ends it."""
        self.killed = True
        self._stdin.close()
        if self.code is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
        return await self.gone(limit_s)
