"""The torchrun host's process, the end of ranks, and what is known on their node.

When a rank fails, this module collects the node's evidence: out-of-memory kills, a full /dev/shm, the end of
the rank's log. The supervisor itself sees only an exit code. At each launch it adds the variables that make
ranks work around failing network devices.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.core import messages as msg
from jurymast.core.nodes import devices
from jurymast.core.nodes.devices import work_around
from jurymast.core.nodes.findings import NETWORK, Finding, Verdict
from jurymast.health.readings import memory_cgroups, oom_kills, where_kills_count
from jurymast.worker import startup
from jurymast.worker.agent_pipe import FD_VARIABLE

SHM = "/dev/shm"
# Logs are on shared storage, which may hang; the failure must be reported anyway.
LOG_LIMIT_S = 0.2
LOG_BYTES = 16_000
LOG_LINES = 3
LOG_CHARACTERS = 600
# A rank that dies of these (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV) may have logged why. Other signals come
# from other processes, and the end of the rank's log does not explain them.
CRASHES = frozenset({-4, -6, -7, -8, -11})
# Where a crash's own report begins: Python's fault handler, C++, NCCL's watchdog, assertions.
_TELLING = re.compile(
    r"fatal python error|terminate called|what\(\):|watchdog|assert|\berror\b", re.IGNORECASE
)


class Evidence:
    """Collects evidence. `kills_file` has the counter `oom_kill` of the agent's cgroup; None if there is
    none."""

    def __init__(self, kills_file: Path | None = None) -> None:
        self._kills_file = kills_file or where_kills_count(memory_cgroups())[1]
        self._before: int | None = None
        self.attempt_begins()

    def attempt_begins(self) -> None:
        """Ignore the kills so far, which are not of this attempt."""
        self._before = oom_kills(self._kills_file)

    def look(self, exit_code: int, log: Path | None = None) -> dict[str, Any]:
        """Return fields for the report of a failure with this exit code (negative for a signal)."""
        kills = oom_kills(self._kills_file)
        if kills is not None:
            kills = max(0, kills - (self._before or 0))
        found: dict[str, Any] = {"oom_kills": kills, "shm_used": round(used_share(SHM), 4)}
        if log is not None and exit_code != 0:
            found["log"] = end_of(log) if exit_code in CRASHES else last_line(log) if exit_code > 0 else ""
        return found


def used_share(path: str) -> float:
    """Return the used share of the file system at `path`, 0..1; 0.0 if it is unknown."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0.0
    return 1.0 - status.f_bavail / status.f_blocks if status.f_blocks else 0.0


def end_of(log: Path) -> str:
    """Return the end of a log, its lines joined with " | ": from the last line that reports an error, or
    else the last few lines. "" if there are none, or if storage does not answer."""
    lines = _last_lines(log)
    telling = [place for place, line in enumerate(lines) if _TELLING.search(line)]
    start = telling[-1] if telling else -LOG_LINES
    return " | ".join(lines[start:][:LOG_LINES])[:LOG_CHARACTERS]


def last_line(log: Path) -> str:
    """Return the last line of a log, where a program that ends with an exit code often says why."""
    return "".join(_last_lines(log)[-1:])[:LOG_CHARACTERS]


def _last_lines(log: Path) -> list[str]:
    """Return the last lines that are not empty; [] if storage does not answer."""
    read: list[str] = []

    def look() -> None:
        try:
            with foreign.reading(log) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                read.append(file.read(LOG_BYTES).decode(errors="replace"))
        except OSError:
            return

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(LOG_LIMIT_S)
    return [line.strip() for line in "".join(read).splitlines() if line.strip()]


WORKED_AROUND = "worked-around"


class NetworkWorkaround:
    """Makes ranks avoid failing network devices. `findings` returns what holds on this node now. `tell`
    reports to the supervisor which devices were left out, as findings of the agent, which cause no action and
    end with the first attempt that uses the device again."""

    def __init__(
        self,
        enabled: bool,
        findings: Callable[[], Sequence[Finding]],
        tell: Callable[[msg.HealthFound], None],
    ) -> None:
        self._enabled = enabled
        self._findings = findings
        self._tell = tell
        self._out: set[str] = set()

    def environment(self, attempt: int) -> dict[str, str]:
        """Return variables for the ranks of `attempt` on this node."""
        if not self._enabled:
            return {}
        users = {name: os.environ.get(name, "") for name in devices.VARIABLES}
        around = work_around(self._findings(), rdma_ports(), interfaces(), users)
        for device in self._out - set(around.devices):
            self._say(device, Verdict.OK, f"the ranks of attempt {attempt} use {device} again")
        values = ", ".join(f"{name}={value}" for name, value in around.environment.items())
        for device in around.devices:
            told = f"the ranks of attempt {attempt} do not use {device} ({values}): {around.reason}"
            self._say(device, Verdict.UNKNOWN, told)
        self._out = set(around.devices)
        return around.environment

    def _say(self, device: str, verdict: Verdict, message: str) -> None:
        found = Finding(
            probe="agent", code=WORKED_AROUND, verdict=verdict, kind=NETWORK, device=device, message=message,
            at=time.time(),
        )  # fmt: skip
        self._tell(msg.HealthFound(finding=found))


def rdma_ports(sys: Path = Path("/sys")) -> list[str]:
    """List every port of every RDMA device here ("mlx5_0:1"). Only names are read: no driver is asked."""
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


def interfaces(sys: Path = Path("/sys")) -> list[str]:
    """List the names of this machine's network interfaces."""
    return sorted(interface.name for interface in (sys / "class/net").glob("*"))


LINE_BYTES_MAX = 4 * 1024 * 1024


class HostProcess:
    """One torchrun host. `on_message` gets its messages, `on_end` its exit code once it has ended."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        writer: asyncio.StreamWriter,
        on_message: Callable[[msg.FromHosts], None],
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
        on_message: Callable[[msg.FromHosts], None],
        on_end: Callable[[int], None],
    ) -> HostProcess:
        """Start a host. `plan`, which has no secret, is passed in the environment. Output joins the agent's.

        The command line is that of the ranks, which are forked from this interpreter."""
        ours, theirs = socket.socketpair()
        with theirs:
            values = {**os.environ, **environment, FD_VARIABLE: str(theirs.fileno())}
            # A program's command line is not for Python: `-c ""` is a stand-in that the server never runs.
            module = ["-c", ""] if plan["program"] else ["-m"] if plan["module"] else []
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", *module, plan["script"], *plan["arguments"],
                env=startup.variables({"server": plan}, values),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, cwd=plan["directory"],
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        return cls(process, writer, on_message, on_end, reader)

    def tell(self, order: msg.Launch | msg.Stop) -> None:
        if not self._writer.is_closing():
            self._writer.write(msg.encode(order) + b"\n")

    async def _read(self, reader: asyncio.StreamReader, on_message: Callable[[msg.FromHosts], None]) -> None:
        try:
            while line := await reader.readline():
                on_message(msg.read_host(line))
        except (ConnectionError, ValueError):  # ValueError: a line without an end
            pass

    async def _wait(self, on_end: Callable[[int], None]) -> None:
        code = await self._process.wait()
        # Its messages from before its end are handled first.
        await asyncio.wait([self._tasks[0]], timeout=1.0)
        self._tasks[0].cancel()  # no message may follow its end
        on_end(code)

    def kill(self) -> None:
        try:
            self._process.send_signal(signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def end(self) -> None:
        """Kill the host, because unloading torch would take a second. Its ranks have ended or were signalled,
        and it has nothing to save."""
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()


async def end_ranks(pids: Sequence[int], grace_s: float) -> None:
    """Send SIGTERM, so that the user's handlers run, and SIGKILL to those still there after `grace_s`."""
    signal_ranks(pids, signal.SIGTERM)
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    while loop.time() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.01)
    signal_ranks(pids, signal.SIGKILL)


def signal_ranks(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal the process groups of the ranks with these ids. The server reaps ranks as soon as they end, and
    then their ids may be reused; hence the check of the environment.
    """
    for pid in pids:
        try:
            if b"JURYMAST_" in Path(f"/proc/{pid}/environ").read_bytes():
                os.killpg(pid, number)
        except OSError:
            continue
