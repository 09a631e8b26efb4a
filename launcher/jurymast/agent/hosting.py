"""Runs the torchrun host and its ranks as `core.agent.ranks` decides, and receives their reports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jurymast.agent import node as here
from jurymast.agent.driver import Driver
from jurymast.agent.evidence import Evidence
from jurymast.agent.keeping import Keeping
from jurymast.agent.node_tests import NodeTestRunner
from jurymast.agent.probing import Probing
from jurymast.agent.ranks import RankMemory
from jurymast.agent.stacks import StackTaker
from jurymast.agent.workaround import NetworkWorkaround
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent import effects as do
from jurymast.core.message import Strange, encode
from jurymast.core.settings import RunPlan
from jurymast.errors import never
from jurymast.rundir import RunDirectory
from jurymast.wire.strangers import Strangers
from jurymast.worker import startup
from jurymast.worker.agent_pipe import FD_VARIABLE

LINE_BYTES_MAX = 4 * 1024 * 1024


class HostProcess:
    """One torchrun host. `on_message` gets its messages, `on_end` its exit code once it has ended."""

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


async def end_ranks(pids: list[int], grace_s: float) -> None:
    """Send SIGTERM, so that the user's handlers run, and SIGKILL to those still there after `grace_s`."""
    signal_ranks(pids, signal.SIGTERM)
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    while loop.time() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.01)
    kill_ranks(pids)


def kill_ranks(pids: list[int]) -> None:
    signal_ranks(pids, signal.SIGKILL)


def signal_ranks(pids: list[int], number: signal.Signals) -> None:
    """Signal the process groups of the ranks with these ids. The server reaps ranks as soon as they end, and
    then their ids may be reused; hence the check of the environment.
    """
    for pid in pids:
        try:
            if b"JURYMAST_" in Path(f"/proc/{pid}/environ").read_bytes():
                os.killpg(pid, number)
        except OSError:
            continue


class Hosting:
    """The host and the ranks of this node. `environment` is for the ranks of every attempt."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        temporary: Path,
        driver: Driver,
        memory: RankMemory,
        keeping: Keeping,
        probing: Probing,
        strangers: Strangers,
        environment: Callable[[], dict[str, str]],
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._driver = driver
        self._machine = driver.machine
        self._memory = memory
        self._keeping = keeping
        self._probing = probing
        self._strangers = strangers
        self._environment = environment
        self._temporary = temporary
        self._evidence = Evidence()
        self._workaround = NetworkWorkaround(plan.settings.workaround, probing.findings, driver.say)
        self._stacks = StackTaker(directory, plan, temporary, driver.say)
        self.node_tests = NodeTestRunner(driver, environment)
        self._host: HostProcess | None = None

    async def close(self) -> None:
        """End the ranks as `end_ranks` does, then the host and the node tests at once."""
        if self._host is not None:
            await end_ranks(list(self._machine.ranks.pids), self._plan.settings.stop_grace_s)
            await self._host.end()
        await self.node_tests.close()

    def carry_out(self, effect: do.ToRanks) -> None:
        match effect:
            case do.StartHost():
                self._driver.spawn(self._start_host())
            case do.Prepare():
                self._memory.clear()
                self._evidence.attempt_begins()
                self._keeping.launch(effect.order)
                self._driver.spawn(self._prepare(effect.order.attempt))
            case do.StartRanks():
                self._start_ranks(effect.order, cold=effect.cold)
            case do.StopRanks():
                self._tell(within.Stop(attempt=effect.attempt))
            case do.TakeStacks():
                self._driver.spawn(self._take_stacks(effect), vital=False)
            case do.LookAtRanks():
                looking = self._stacks.look(effect.number, self._memory.trains(effect.pids))
                self._driver.spawn(looking, vital=False)
            case do.KillRanks():
                kill_ranks(list(effect.pids))
            case do.KillHost():
                if self._host is not None:
                    self._host.kill()
            case do.StartProbes():
                self._probing.start()
            case _:
                never(effect)

    async def _start_host(self) -> None:
        plan = here.host_plan(self._plan, self._directory.root, self._temporary)
        self._host = await HostProcess.start(plan, self._environment(), self._host_said, self._host_ended)

    async def _prepare(self, attempt: int) -> None:
        """Wait until test processes have released the devices, which the ranks need now."""
        await self.node_tests.gone()
        self._driver.act(self._machine.prepared(attempt, self._driver.now))

    def _start_ranks(self, order: msg.Launch, *, cold: bool) -> None:
        environment = {**self._workaround.environment(order.attempt), **self._stacks.launch(order)}
        if self._plan.batch:
            environment |= dict.fromkeys(here.SLURM_LISTS, order.nodes)
        launch = within.Launch(
            attempt=order.attempt, rank=order.rank, world=order.world, master_address=order.master_address,
            master_port=order.master_port, mtbf_s=order.mtbf_s, cold=cold, saved=order.saved,
            environment=environment,
        )  # fmt: skip
        self._tell(launch)

    def _tell(self, order: within.ToHost) -> None:
        if self._host is not None:
            self._host.tell(order)

    async def _take_stacks(self, effect: do.TakeStacks) -> None:
        await self._stacks.take(self._memory.trains(effect.pids))
        self._driver.act(self._machine.stacks_taken(effect.attempt, self._driver.now))

    def _host_said(self, message: within.FromHosts) -> None:
        now = self._driver.now
        match message:
            case within.Failed():
                log = self._directory.rank_log(message.attempt, message.rank)
                look_at = None if message.error else log  # an exception has its own message
                evidence = self._evidence.look(message.exit_code, look_at)
                self._driver.act(self._machine.rank_failed(message, evidence, now))
            case Strange():
                self._strangers.heard("the torchrun host", message)
            case _:
                self._driver.act(self._machine.host_said(message, now))

    def _host_ended(self, code: int) -> None:
        self._host = None
        evidence = self._evidence.look(code)
        self._driver.act(self._machine.host_ended(code, evidence, self._driver.now))
