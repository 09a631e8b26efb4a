"""The torchrun host, with the server of its ranks, as a child of the agent: start it, talk to it, and end it
when it does not listen."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jurymast.core import within
from jurymast.core.message import encode
from jurymast.worker import startup
from jurymast.worker.agent_pipe import FD_VARIABLE

LINE_BYTES_MAX = 4 * 1024 * 1024


class HostProcess:
    """One torchrun host. `on_message` gets what it says, `on_end` its exit code when it is gone."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        writer: asyncio.StreamWriter,
        on_message: Callable[[within.FromHosts], None],
        on_end: Callable[[int], None],
        reader: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self._writer = writer
        self._tasks = [
            asyncio.ensure_future(self._read(reader, on_message)),
            asyncio.ensure_future(self._wait(on_end)),
        ]

    @classmethod
    async def start(
        cls,
        plan: dict[str, Any],
        environment: dict[str, str],
        on_message: Callable[[within.FromHosts], None],
        on_end: Callable[[int], None],
    ) -> HostProcess:
        """`plan` goes by the environment: it holds no secret. Output joins the agent's own.

        The command line is that of the ranks, which are to be this interpreter's forks."""
        ours, theirs = socket.socketpair()
        with theirs:
            values = {**os.environ, **environment, FD_VARIABLE: str(theirs.fileno())}
            # Nothing of a program's command line is Python's: the server never comes to what it would run.
            module = ["-c", ""] if plan["program"] else ["-m"] if plan["module"] else []
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", *module, plan["script"], *plan["arguments"],
                env=startup.variables({"server": plan}, values),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, cwd=plan["directory"],
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        return cls(process, writer, on_message, on_end, reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: within.ToHost) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(order) + b"\n")

    async def _read(
        self, reader: asyncio.StreamReader, on_message: Callable[[within.FromHosts], None]
    ) -> None:
        try:
            while line := await reader.readline():
                on_message(within.read_host(line))
        except (ConnectionError, ValueError):  # ValueError: a line without an end
            pass

    async def _wait(self, on_end: Callable[[int], None]) -> None:
        code = await self._process.wait()
        # Everything it said before it ended counts first.
        await asyncio.wait([self._tasks[0]], timeout=1.0)
        self._tasks[0].cancel()  # nothing it says comes after its end
        on_end(code)

    def kill(self) -> None:
        try:
            self._process.send_signal(signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def end(self) -> None:
        """Kill it: its ranks are gone or told so, it keeps nothing, and unloading torch takes a second."""
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()


async def end_ranks(pids: list[int], grace_s: float) -> None:
    """SIGTERM, so that the user's handlers run, and SIGKILL for those still there after `grace_s`."""
    signal_ranks(pids, signal.SIGTERM)
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    while loop.time() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.01)
    kill_ranks(pids)


def kill_ranks(pids: list[int]) -> None:
    signal_ranks(pids, signal.SIGKILL)


def signal_ranks(pids: list[int], number: signal.Signals) -> None:
    """Signal the ranks, with what each has started, by their ids. They are children of the server, so their
    ids cannot have been given to others while it has not reaped them; it reaps them at once, hence the check.
    """
    for pid in pids:
        try:
            if b"JURYMAST_" in Path(f"/proc/{pid}/environ").read_bytes():
                os.killpg(pid, number)
        except OSError:
            continue
