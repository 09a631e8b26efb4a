"""The real world of an agent: its node's processes, files, memory and signals. It also makes the node's
temporary directory and the environment of its ranks.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from jurymast import background, programs
from jurymast.agent.agent import Agent
from jurymast.agent.driver import Driver
from jurymast.agent.health import NodeTestRunner, Probing, driver_here, leave_verdict
from jurymast.agent.ranks import (
    Evidence,
    HostProcess,
    NetworkWorkaround,
    RankMemory,
    RankWatch,
    end_ranks,
    gone,
    signal_ranks,
    tell_ranks,
    unloadable,
)
from jurymast.agent.stacks import StackTaker
from jurymast.agent.storage_processes import NodeStorage, local_root, own_domain, remove_left_behind
from jurymast.checkpoint.batch import BATCH_VARIABLE, RANKS_VARIABLE
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.refill import keep_variables
from jurymast.cluster.sbatch import visible_gpus
from jurymast.cluster.signals import WARNINGS
from jurymast.cluster.verdicts import boot_id
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.judges import slurm_variables
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.host_messages import FromHosts
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import compressed
from jurymast.errors import RunDirectoryError
from jurymast.foreign import check_private, temporary_place
from jurymast.interpreter import run_module
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import PAGE_VARIABLE
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.processes import TASKS_ALONE_VARIABLE, adopt_orphans, catches, end_strays, leave_no_core
from jurymast.reading import to_begin
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.addresses import ADDRESS_VARIABLE, interface_of, is_up, plain
from jurymast.wire.channel import Channel
from jurymast.wire.protocol import Access

TEMPORARY_PREFIX = "jurymast-agent-"


def own_temporary_directory() -> tuple[Path, int]:
    """Create a directory for this agent. Return it with the descriptor of the lock that shows that the agent
    lives."""
    while True:
        own = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=temporary_place()))
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return own, lock
        os.close(lock)  # another agent that is just starting took it for an abandoned one and removed it


def remove_abandoned() -> None:
    """Remove temporary directories of this user's killed agents. Best effort: it may take long, and what
    cannot be removed stays."""
    for path in Path(temporary_place()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            check_private(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or not an agent's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not in Python, whose recursion limit deeply nested directories exceed.
            programs.run(["rm", "-rf", "--", str(path)], stdin=DEVNULL, stderr=DEVNULL)
        except OSError:
            pass  # its agent is alive
        finally:
            os.close(lock)


def host_plan(
    plan: RunPlan, run_directory: Path, temporary: Path, core_bytes: int
) -> dict[str, object]:  # fmt: skip
    """Return the torchrun host's plan: see `worker.elastic.serve`."""
    return {
        "run": plan.run, "nodes": plan.nodes, "ranks": plan.ranks_per_node,
        "script": plan.script, "arguments": plan.arguments, "module": plan.module,
        "directory": plan.working_directory, "run_directory": str(run_directory),
        "temporary": str(temporary), "grace_s": plan.settings.stop_grace_s,
        "warm": plan.settings.warm_start, "slurm": plan.cluster == "slurm", "tasks": plan.tasks,
        "guessed": plan.guessed, "program": plan.program, "shares": asdict(plan.shares),
        "stderr_apart": plan.stderr_apart, "inputs": plan.inputs, "prologs": plan.prologs,
        "epilogs": plan.epilogs, "core_bytes": core_bytes,
    }  # fmt: skip


# What processes of one run tell each other. From another run, in variables that somebody has saved or passed
# on, it would lead ranks to that run's logs and memory, or away from checkpoints of their own.
OF_RANKS = re.compile(
    r"JURYMAST_(ATTEMPT|BATCH|EVENTS|HOST_FD|KEEPER|LOCAL_RANK|LOG|PAGE|RANKS|SAVED_STEP|STACKS|STARTUP|"
    r"STDERR|STDIN|UNREADABLE|USER_TMPDIR|WORLD_SIZE)$"
)


def users_variables(plan: RunPlan, nodes: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the `variables` of this agent as its ranks may see them: a plain run's job has spare nodes, and
    its srun options of ours. A batch script's are as its front end has left them."""
    variables = {name: value for name, value in variables.items() if not OF_RANKS.match(name)}
    if plan.batch or plan.cluster != "slurm":
        return dict(variables)
    hosts = compressed(nodes[: plan.active])
    values = slurm_variables.of_active_nodes(variables, len(nodes), plan.active, hosts)
    ours = [name for name in values if slurm_variables.BINDING.match(name) or name == "SLURM_OPEN_MODE"]
    return {name: value for name, value in values.items() if name not in ours}


def rank_environment(
    plan: RunPlan, run_directory: Path, node: str, temporary: Path, address: str
) -> dict[str, str]:
    """Return variables for the ranks of this node, which other nodes reach at `address`."""
    settings = plan.settings
    values = {
        "JURYMAST_RUN": plan.run,
        "JURYMAST_RUN_DIR": str(run_directory),
        "JURYMAST_NODE": node,
        ADDRESS_VARIABLE: address,
        "JURYMAST_KEEP": str(settings.keep),
        "JURYMAST_USER_TMPDIR": os.environ.get("TMPDIR", ""),
        "TMPDIR": str(temporary),
    }
    if plan.nodes_min:
        values[BATCH_VARIABLE] = settings.batch
        values[RANKS_VARIABLE] = str(plan.active * plan.ranks_per_node)
    # The Checkpointer's cadence, if the policy gives one; otherwise it follows from the attempt's MTBF.
    if settings.cadence_steps is not None:
        values["JURYMAST_CADENCE_STEPS"] = str(settings.cadence_steps)
    if settings.cadence_s is not None:
        values["JURYMAST_CADENCE_S"] = str(settings.cadence_s)
    if plan.ranks_per_node > 1 and not plan.tasks and "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = "1"  # as torchrun does
    interface = interface_of(address)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo resolves the host's name, which may not lead to the address that other nodes reach.
        values["GLOO_SOCKET_IFNAME"] = interface
    return values


def local_address(host: str, port: int) -> str:
    """Return this machine's address on the way to `host`, or "" if there is none. Sends nothing."""
    try:
        ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, number, _, place in ways:
        try:
            with socket.socket(family, kind, number) as probe:
                probe.connect(place)
                return plain(str(probe.getsockname()[0]))
        except OSError:
            continue
    return ""


def read_run_directory(directory: RunDirectory) -> tuple[msg.Endpoint | None, int | None]:
    """See `agent.io.AgentIo.find`."""
    place = attempt = None
    with suppress(OSError):
        place = endpoint.find(directory.epochs)
    with suppress(OSError, RunDirectoryError):
        attempt = directory.newest_attempt()
    return place, attempt


class StandbyProcess:
    """See `agent.io.Standby`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        self._process, self._input = process, process.stdin

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def begin(self, start: do.StartSupervisor) -> None:
        self._input.write(f"{start.after} {time.monotonic() - start.silent_s:.3f}\n".encode())
        await self._input.drain()

    async def wait(self) -> None:
        await self._process.wait()

    async def dismiss(self) -> None:
        self._input.close()
        await self._process.wait()


class NodeRanks(RankMemory):
    """See `agent.io.RankAccess`. `said` gets what the ranks say."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        temporary: Path,
        probing: Probing,
        driver: Driver,
        said: Callable[[within.FromRanks], None],
    ) -> None:
        super().__init__(plan.ranks_per_node)
        self._directory, self._driver, self._said = directory, driver, said
        self._watch = RankWatch(self, plan.settings.heartbeat_s, plan.program)
        self.oom_evidence = Evidence()
        self._workaround = NetworkWorkaround(plan.settings.workaround, probing.findings, driver.say)
        self._stacks = StackTaker(directory, plan, temporary, driver.say)

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self.events_fd, self.read)
        for number in (*WARNINGS, signal.SIGINT):  # from --signal, or the script
            loop.add_signal_handler(number, self._signalled, number)

    def read(self) -> None:
        """Pass on what the ranks have said."""
        for event in self.read_events():
            self._said(event)

    def _signalled(self, number: signal.Signals) -> None:
        """Tell of a signal that is for the ranks, and pass it on if Slurm has not sent it to them as well."""
        pids = self._driver.machine.ranks.pids
        train = self.trains(pids)
        if any(catches(pid, number) for pid in {*pids, *train}):
            self._said(within.Warned())
        if TASKS_ALONE_VARIABLE in os.environ:
            tell_ranks(pids, train, number)

    def attempt_begins(self) -> None:
        self.clear()
        self.oom_evidence.attempt_begins()

    def report(self, pids: tuple[int, ...]) -> msg.RanksSeen:
        self.oom_evidence.count_kills()
        ranks = self._watch.look(list(pids)) if pids else []
        if not ranks:
            return msg.RanksSeen([], self.cadence())
        return msg.RanksSeen(ranks, self.cadence(), self._watch.times(), self._watch.trained())

    def variables(self, order: msg.Launch) -> dict[str, str]:
        return {**self._workaround.environment(order.attempt), **self._stacks.launch(order)}

    async def take_stacks(self, pids: tuple[int, ...]) -> None:
        await self._stacks.take(self.trains(pids))

    async def look(self, number: int, pids: tuple[int, ...]) -> None:
        await self._stacks.look(number, self.trains(pids))

    def evidence(self, code: int, failed: msg.Failed | None = None) -> dict[str, Any]:
        log_file = None
        if failed is not None and not failed.error:  # an exception has its own message
            log_file = partial(self._directory.last_words, failed.attempt, failed.rank)
        return self.oom_evidence.look(code, log_file)

    def kill(self, pids: tuple[int, ...]) -> None:
        signal_ranks(pids, signal.SIGKILL)

    async def gone(self, pids: tuple[int, ...], limit_s: float) -> None:
        await gone(pids, limit_s)

    async def end(self, pids: tuple[int, ...], grace_s: float) -> None:
        await end_ranks(pids, grace_s)

    async def end_strays(self, spared: tuple[int, ...]) -> bool:
        return await asyncio.to_thread(end_strays, spared=spared, again=True)


class NodeIo:
    """See `agent.io.AgentIo`. `hint`: a supervisor's address; `oom_kills`: how many kills for want of memory
    ended the agent before this one, 0 for the first; `refill`: see `messages.Hello`."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        node: str,
        allocation: Allocation,
        hint: tuple[str, int] | None,
        oom_kills: int,
        refill: int,
        driver: Driver,
        said: Callable[[within.FromRanks], None],
    ) -> None:
        self._directory, self.plan, self._node, self._hint, self._driver = directory, plan, node, hint, driver
        self.hello = msg.Hello(
            node=node, allocation=allocation.key, address="", incarnation=secrets.token_hex(8),
            pid=os.getpid(), boot_id=boot_id(), gpus=visible_gpus(os.environ), attempt=0, ranks="warming",
            store_port=0, pids=(), data_port=0, domain=own_domain(), oom_kills=oom_kills,
            refill=refill,
        )  # fmt: skip
        self.address = ""
        self._secret = directory.secret()
        self._users = users_variables(plan, allocation.nodes, os.environ)
        self._temporary, self._lock = own_temporary_directory()
        self._core_bytes = leave_no_core()
        place = plan.settings.local_path
        self._local = local = local_root(place, plan.run) if place else None
        access = Access(self._secret, encrypt=plan.settings.encrypt)
        self.keeper = Keeper(RealKeeperIo(access, node, plan.ranks_per_node), driver.say, local_root=local)
        self.probing = Probing(directory, plan, node, driver.say)
        self.ranks = NodeRanks(directory, plan, self._temporary, self.probing, driver, said)
        kills = self.ranks.oom_evidence.count_kills
        self.storage = NodeStorage(directory, plan, self.keeper, local, kills)
        self.tests = NodeTestRunner(driver, self._environment)

    def _tidy(self) -> None:
        remove_abandoned()
        if self._local is not None:
            remove_left_behind(self._local, self._directory.root.parent)

    async def begin(self) -> None:
        adopt_orphans()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._driver.terminated)
        self.ranks.listen()
        threading.Thread(target=self._tidy, name="remove-abandoned", daemon=True).start()
        await self.keeper.start()
        if self._hint is not None:
            self.address = local_address(*self._hint)

    async def close(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.close(self._lock)

    # The supervisor.

    async def connect(
        self, targets: tuple[tuple[str, int], ...], limit_s: float
    ) -> Channel[msg.Order] | None:
        return await channel.connect_any(targets, self._secret, msg.read_order, limit_s)

    def connected(self, channel: Channel[msg.Order]) -> None:
        if not is_up(self.address):  # others know this address: it is kept as long as it works
            self.address = channel.local_address

    async def find(self) -> tuple[msg.Endpoint | None, int | None]:
        with suppress(RuntimeError):  # no thread can be started, as where ranks have used up all there may be
            return await asyncio.to_thread(read_run_directory, self._directory)
        return None, None

    async def read_pulse(self) -> str | None:
        try:
            return await asyncio.to_thread(endpoint.read_pulse, self._directory.epochs)
        except (OSError, RuntimeError):
            return None

    async def stand_by(self) -> StandbyProcess:
        standby = run_module("jurymast.supervisor.standby", str(self._directory.root), self._node)
        command = programs.at_once(standby)
        return StandbyProcess(await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE))

    async def leave_verdict(self, order: msg.LeaveVerdict) -> None:
        await leave_verdict(order, self.plan, self._node, self._driver.say)

    # The torchrun host.

    async def start_host(
        self, said: Callable[[FromHosts], None], ended: Callable[[int, str], None], failed: background.Failed
    ) -> HostProcess:
        plan = host_plan(self.plan, self._directory.root, self._temporary, self._core_bytes)
        return await HostProcess.start(plan, {**self._users, **self._environment()}, said, ended, failed)

    async def unloadable(self) -> str:
        return await unloadable({**self._users, **self._environment()}, self.plan.working_directory)

    def _environment(self) -> dict[str, str]:
        return {
            # None, if the policy wants no checkpoints in memory.
            **({PAGE_VARIABLE: self.keeper.io.page_path} if self.plan.settings.memory else {}),
            **self.ranks.environment(),
            **rank_environment(self.plan, self._directory.root, self._node, self._temporary, self.address),
        }


def node_agent(
    directory: RunDirectory,
    plan: RunPlan,
    node: str,
    hint: tuple[str, int] | None,
    oom_kills: int = 0,
    refill: int = 0,
) -> Agent:
    """Return this node's agent: see `NodeIo`. Raises RunDirectoryError."""
    allocation = Allocation.load(directory)
    if plan.may_refill and node == allocation.nodes[0]:
        keep_variables(directory, plan, os.environ)
    machine = AgentMachine(
        plan, node, allocation.key, allocation.nodes, hint, random.random(),
        gpus=visible_gpus(os.environ), driver=driver_here(),
    )  # fmt: skip
    return Agent(machine, partial(NodeIo, directory, plan, node, allocation, hint, oom_kills, refill))


log = logging.getLogger("jurymast.agent")


async def serve(
    directory: RunDirectory,
    node: str,
    hint: tuple[str, int] | None,
    oom_kills: int = 0,
    *,
    refill: int = 0,
) -> int:
    """Run this node's agent, and return the run's exit code: see `NodeIo`. Raises RunDirectoryError."""
    started = time.monotonic()
    plan = to_begin(directory.own_plan)
    to_begin(partial(Allocation.load, directory))
    to_begin(directory.secret)
    agent = node_agent(directory, plan, node, hint, oom_kills, refill)
    await agent.run()
    log.info("done after %.1f s", time.monotonic() - started)
    return agent.exit_code
