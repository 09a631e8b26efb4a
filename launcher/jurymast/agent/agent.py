"""The agent: one a node, light, outlives the ranks. It starts and stops them at the supervisor's word,
reports what happens to them, and keeps them running while no supervisor is there."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import random
import secrets
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import asdict

from jurymast.agent.around import Around
from jurymast.agent.evidence import Evidence
from jurymast.agent.host_process import HostProcess, end_ranks, kill_ranks
from jurymast.agent.keeping import Keeping, own_domain
from jurymast.agent.probing import Probing
from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.agent.stacks import Stacks
from jurymast.agent.succession import Succession
from jurymast.agent.testing import Testing
from jurymast.agent.verdict import leave_verdict
from jurymast.cluster.allocation import Allocation
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.heartbeat import patience_s
from jurymast.core.messages import RankReport, beat_of
from jurymast.core.settings import RunPlan
from jurymast.errors import AuthenticationError, ProtocolError, never
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.strangers import Strangers

RECONNECT_S = 0.1
CONNECT_LIMIT_S = 1.5
FIND_LIMIT_S = 2.0
# All nodes of a run that lose their supervisor look for the next in the run directory, so often together.
FINDS_A_SECOND = 10_000.0
# A host that has not stopped its ranks by then is stuck itself.
STOP_MARGIN_S = 2.5
HOST_RESTARTS_MAX = 5
# Ranks go on without a supervisor; once they have ended and still none is there, the agent leaves too. One
# without ranks (a spare) may be all that a supervisor has which comes back when storage does.
ALONE_LIMIT_S = 60.0
IDLE_ALONE_LIMIT_S = 1800.0
# After a SIGTERM Slurm waits 30 s (KillWait), unless the partition's GraceTime says otherwise.
TERMINATED_LIMIT_S = 25.0
# Probes wait for the torchrun host; one that does not get warm may have its reason in what they would find.
PROBE_ANYWAY_S = 60.0
UNSAID_MAX = 1000
KEPT = (msg.Failed, msg.RankEvent, msg.Unrestorable)
TEMPORARY_PREFIX = "jurymast-agent-"


class Agent:
    """State of one node. `attempt` is the newest one ordered here, `ranks_state` what its ranks do:
    warming (no host yet), waiting (the host is ready), running or finished."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, hint: tuple[str, int] | None
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._node = node
        self._hint = hint
        self._secret = directory.secret()
        self._incarnation = secrets.token_hex(8)
        allocation = Allocation.load(directory)
        self._allocation = allocation.key
        self._memory = RankMemory(plan.ranks_per_node)
        self._watch = RankWatch(self._memory, plan.settings.heartbeat_s)
        self._evidence = Evidence()
        self._keeping = Keeping(directory, plan, node, self._say)
        self._probing = Probing(directory, plan, node, self._say)
        self._around = Around(plan.settings.workaround, self._probing.findings, self._say)
        self._temporary, self._lock = own_temporary_directory()
        self._stacks = Stacks(directory, plan, self._temporary, self._say)
        self._host: HostProcess | None = None
        self._host_starts = 0
        self._restart: asyncio.Future[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._channel: Channel[msg.Order] | None = None
        self._address = ""
        # After a power loss there is no other sign of a supervisor's end than its silence: no reset comes.
        self._patience_s = patience_s(plan.settings.heartbeat_s, plan.nodes)
        self._alone_since = 0.0
        self._unsaid: list[msg.ToSupervisor] = []
        self._last: endpoint.Endpoint | None = None
        self._find_every_s = plan.nodes / FINDS_A_SECOND
        self._find_at = 0.0
        self.attempt = 0
        self._stopping = 0
        self._terminating = False
        self.ranks_state: msg.RanksState = "warming"
        self._store_port = 0
        self._pids: list[int] = []
        self._cold = False  # the script cannot use what was loaded ahead of it
        self._succession = Succession(directory, plan, node, allocation.nodes)
        self._testing = Testing(plan, _visible_gpus(), self._environment, self._say)
        self._strangers = Strangers(_note)
        self._over = asyncio.Event()
        self._urgent = asyncio.Event()

    async def run(self) -> None:
        """Until the supervisor says that the run is over, or a SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        loop.add_reader(self._memory.events_fd, self._pass_events_on)
        await self._keeping.start()
        loop.call_later(PROBE_ANYWAY_S, self._probing.start)
        if self._hint is not None:  # torch's import takes longer than finding the supervisor
            self._address = local_address(*self._hint)
            if self._address:
                await self._start_host()
        serve = asyncio.gather(self._serve(), self._succession.watch(lambda: self._channel is not None))
        over = asyncio.ensure_future(self._over.wait())
        try:
            either: list[asyncio.Future[Any]] = [over, serve]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            serve.cancel()
            ended = await asyncio.gather(serve, return_exceptions=True)
            await self._end_host()
            await self._testing.end()
            await self._probing.close()
            await self._keeping.close()
            await self._succession.wait()
            shutil.rmtree(self._temporary, ignore_errors=True)
            os.close(self._lock)
        if isinstance(ended[0], Exception):  # broken, not cancelled: the supervisor sees the node go
            raise ended[0]

    # The supervisor's side.

    def _alone_limit_s(self) -> float:
        if self.ranks_state in ("starting", "running"):
            return math.inf
        return ALONE_LIMIT_S if self.ranks_state == "finished" else IDLE_ALONE_LIMIT_S

    async def _serve(self) -> None:
        while not self._over.is_set():
            connection = await self._connect()
            if connection is None:
                self._alone_since = self._alone_since or time.monotonic()
                if time.monotonic() > self._alone_since + self._alone_limit_s():
                    self._over.set()  # nobody will ever say so
                await asyncio.sleep(RECONNECT_S)
                continue
            self._alone_since = 0.0
            self._channel = connection
            self._address = connection.local_address
            self._probing.new_supervisor()
            connection.send(self._hello())
            for message in self._unsaid:
                connection.send(message)
            self._unsaid.clear()
            if self._host is None:
                await self._start_host()
            beats = asyncio.ensure_future(self._beat(connection))
            try:
                while True:
                    order = await asyncio.wait_for(connection.receive(), self._patience_s)
                    self._obey(order, connection.peer_address)
            except asyncio.TimeoutError:
                connection.send(msg.HangsUp())  # one that was only late must not take this for an end
                self._channel = None
            except (ConnectionError, AuthenticationError, ProtocolError, OSError):
                self._channel = None
            finally:
                beats.cancel()
                connection.close()
                self._strangers.left(connection.peer_address)
                self._find_at = time.monotonic() + self._find_every_s * random.random()

    async def _connect(self) -> Channel[msg.Order] | None:
        """Where the last supervisor was, and where the newest is by the run directory. Both at once: storage
        may need longer for its answer than a supervisor that lives waits for its agent."""
        last = self._last
        return await channel.first_of([self._reach(last), self._reach_newest(last)])

    async def _reach_newest(self, last: endpoint.Endpoint | None) -> Channel[msg.Order] | None:
        now = time.monotonic()
        if now < self._find_at:
            return None
        self._find_at = now + self._find_every_s
        try:
            look = asyncio.to_thread(endpoint.find, self._directory.epochs)
            found = await asyncio.wait_for(look, FIND_LIMIT_S) or last
        except (OSError, asyncio.TimeoutError):  # shared storage in trouble is no reason to end the ranks
            return None
        self._last = found
        return None if found == last else await self._reach(found)

    async def _reach(self, place: endpoint.Endpoint | None) -> Channel[msg.Order] | None:
        targets: list[tuple[str, int]] = []
        if place is not None and place.allocation == self._allocation:
            targets = [(host, place.port) for host in place.hosts]
        elif self._hint is not None:
            targets = [self._hint]
        return await channel.connect_any(targets, self._secret, msg.read_order, CONNECT_LIMIT_S)

    def _terminated(self) -> None:
        """Slurm ends the job or takes the node. The supervisor finds out which; until it says "leave" this
        node's memory may be needed for the last checkpoint."""
        self._tell(msg.Terminated())
        self._terminating = True
        if self._channel is None:
            self._over.set()
        asyncio.get_running_loop().call_later(TERMINATED_LIMIT_S, self._over.set)

    def _hello(self) -> msg.Hello:
        return msg.Hello(
            node=self._node, allocation=self._allocation, address=self._address,
            incarnation=self._incarnation, pid=os.getpid(), boot_id=_boot_id(), gpus=_visible_gpus(),
            attempt=self.attempt, ranks=self.ranks_state, store_port=self._store_port,
            pids=tuple(self._pids), data_port=self._keeping.data_port, copies=self._keeping.inventory(),
            room=self._keeping.room(), domain=own_domain(), health=self._probing.known(),
        )  # fmt: skip

    async def _beat(self, connection: Channel[msg.Order]) -> None:
        """Heartbeats, at once when something urgent happened, else every `heartbeat_s`."""
        while True:
            ranks = self._watch.look(self._pids) if self.ranks_state == "running" else []
            self._keeping.look()
            cadence = self._memory.cadence()
            connection.send(beat_of(self.attempt, ranks, cadence, self._watch.times() if ranks else None))
            self._urgent.clear()
            try:
                await asyncio.wait_for(self._urgent.wait(), self._beat_period(ranks))
            except asyncio.TimeoutError:
                continue

    def _beat_now(self) -> None:
        """How far the ranks are, ahead of a word of their end."""
        if self._channel is not None:
            self._channel.send(beat_of(self.attempt, self._watch.look(self._pids)))

    def _beat_period(self, ranks: list[RankReport]) -> float:
        # Until the first step the ranks' progress is worth a closer look: it ends an incident.
        young = bool(ranks) and min(rank.beats for rank in ranks) < 3
        return min(0.1, self._plan.settings.heartbeat_s) if young else self._plan.settings.heartbeat_s

    def _tell(self, message: msg.ToSupervisor) -> None:
        """Say it now, but for what the end of the job explains."""
        unasked = isinstance(message, msg.Stopped) and self._stopping < self.attempt
        if self._terminating and (isinstance(message, msg.Failed) or unasked):
            return  # Slurm ends the ranks, and that is no failure
        self._say(message)

    def _say(self, message: msg.ToSupervisor) -> None:
        """To the next supervisor if none is there, unless the hello tells it as well."""
        if self._channel is not None:
            self._channel.send(message)
        elif isinstance(message, KEPT) and len(self._unsaid) < UNSAID_MAX:
            self._unsaid.append(message)

    def _obey(self, order: msg.Order, sender: str) -> None:
        match order:
            case msg.Launch():
                self._launch(order)
            case msg.Stop():
                self._stop(order.attempt, stacks=order.stacks)
            case msg.Look():
                if order.attempt == self.attempt and self.ranks_state == "running":
                    self._looking = asyncio.ensure_future(self._stacks.look(order.number, self._pids))
            case msg.GoOn():
                self._probing.clock(order.time)
                self._patience_s = order.patience_s
            case msg.Dismiss():
                self._stop(self.attempt)
            case msg.Cadence():
                if order.attempt == self.attempt:
                    self._memory.order(order)
                    self._urgent.set()  # the supervisor waits for a heartbeat that shows it
            case msg.LeaveVerdict():
                leaving = leave_verdict(order, self._plan, self._node, self._say)
                self._verdict = asyncio.ensure_future(leaving)
            case msg.TestAlone() | msg.TestPair() | msg.TestOver():
                self._testing.obey(order, beside_ranks=self.ranks_state not in ("warming", "waiting"))
            case msg.Leave():
                self._keeping.run_is_over = order.over
                self._over.set()
            case msg.Strange():
                self._strangers.heard(sender, order)
            case _:
                self._keeping.obey(order)

    def _launch(self, order: msg.Launch) -> None:
        if order.attempt <= self.attempt or self._host is None:
            return
        self.attempt = order.attempt
        self._cold = self._cold or order.cold
        self.ranks_state = "starting"
        self._memory.clear()
        self._evidence.attempt_begins()
        self._keeping.launch(order)
        environment = {**self._around.environment(self.attempt), **self._stacks.launch(order)}
        launch = within.Launch(
            attempt=order.attempt, rank=order.rank, world=order.world, master_address=order.master_address,
            master_port=order.master_port, mtbf_s=order.mtbf_s, cold=self._cold, saved=order.saved,
            environment=environment,
        )  # fmt: skip
        if self._testing.idle:
            self._host.tell(launch)
        else:
            self._starting = asyncio.ensure_future(self._launch_after_tests(self._host, launch))

    async def _launch_after_tests(self, host: HostProcess, launch: within.Launch) -> None:
        """What the test processes hold of the devices is the ranks' now."""
        await self._testing.end()
        host.tell(launch)
        if self._stopping >= launch.attempt:
            host.tell(within.Stop(attempt=self._stopping))

    def _stop(self, attempt: int, *, stacks: bool = False) -> None:
        """Stop the ranks of `attempt`, if wanted after a look at their `stacks`; answers when they are gone,
        however long ago that was."""
        if self.ranks_state in ("waiting", "finished"):
            self._tell(msg.Stopped(attempt=attempt, store_port=self._store_port))
            if not self._store_port:  # the host is on its way back into the rendezvous: that will be news
                self.ranks_state = "warming"
            return
        if self.ranks_state == "warming":
            self._tell(msg.Stopped(attempt=attempt, store_port=0))
            return
        if attempt < self.attempt or self._stopping >= attempt or self._host is None:
            return
        self._stopping = attempt
        if stacks and attempt == self.attempt and self.ranks_state == "running":
            self._looking = asyncio.ensure_future(self._look_and_stop(attempt, self._host))
        else:
            self._stop_host(attempt, self._host)

    async def _look_and_stop(self, attempt: int, host: HostProcess) -> None:
        await self._stacks.take(self._pids)
        self._stop_host(attempt, host)

    def _stop_host(self, attempt: int, host: HostProcess) -> None:
        host.tell(within.Stop(attempt=attempt))
        limit_s = self._plan.settings.stop_grace_s + STOP_MARGIN_S
        asyncio.get_running_loop().call_later(limit_s, self._stop_by_force, attempt, host)

    def _stop_by_force(self, attempt: int, host: HostProcess) -> None:
        if self._host is host and self.attempt == attempt and self.ranks_state in ("starting", "running"):
            kill_ranks(self._pids)
            host.kill()

    # The torchrun host's side.

    async def _start_host(self) -> None:
        self._host_starts += 1
        self.ranks_state = "warming"
        plan = {
            "run": self._plan.run, "nodes": self._plan.nodes, "ranks": self._plan.ranks_per_node,
            "script": self._plan.script, "arguments": self._plan.arguments, "module": self._plan.module,
            "directory": self._plan.working_directory, "run_directory": str(self._directory.root),
            "temporary": str(self._temporary), "grace_s": self._plan.settings.stop_grace_s,
            "warm": self._plan.settings.warm_start,
        }  # fmt: skip
        self._host = await HostProcess.start(plan, self._environment(), self._host_said, self._host_ended)
        if self.attempt == 0:
            self._testing.warm_up()

    def _environment(self) -> dict[str, str]:
        settings = self._plan.settings
        values = {
            **self._keeping.environment(),
            "JURYMAST_PAGE": self._memory.page_path,
            "JURYMAST_EVENTS": self._memory.events_path,
            "JURYMAST_RUN": self._plan.run,
            "JURYMAST_RUN_DIR": str(self._directory.root),
            "JURYMAST_NODE": self._node,
            "JURYMAST_KEEP": str(settings.keep),
            "JURYMAST_USER_TMPDIR": os.environ.get("TMPDIR", ""),
            "TMPDIR": str(self._temporary),
        }
        values.update(cadence_environment(self._plan))
        if self._plan.ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
            values["OMP_NUM_THREADS"] = "1"  # as torchrun does
        interface = interface_of(self._address)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            # gloo resolves the host's name, which need not be the address that the other nodes reach.
            values["GLOO_SOCKET_IFNAME"] = interface
        return values

    def _host_said(self, message: within.FromHosts) -> None:
        match message:
            case within.Waiting():
                self._host_waits(message.store_port)
            case within.Started():
                self.ranks_state, self._pids = "running", list(message.pids)
                self._host_starts = 1
                self._tell(msg.Started(attempt=message.attempt, pids=message.pids))
                self._urgent.set()
            case within.Failed():
                self._beat_now()
                log = self._directory.rank_log(message.attempt, message.rank)
                look_at = None if message.error else log  # an exception has its own words
                self._tell(msg.Failed(**asdict(message), **self._evidence.look(message.exit_code, look_at)))
            case within.Finished():
                self._beat_now()
                self.ranks_state, self._pids, self._store_port = "finished", [], 0
                self._tell(msg.Finished(attempt=message.attempt))
            case msg.Strange():
                self._strangers.heard("the torchrun host", message)
            case _:
                never(message)

    def _host_waits(self, store_port: int) -> None:
        self._store_port = store_port
        self._probing.start()  # the host is warm: nothing that takes time is left to do here
        if self.ranks_state == "finished":
            return
        if self._pids:  # how far they came, exactly
            self._beat_now()
        before = self.ranks_state
        self.ranks_state, self._pids = "waiting", []
        if before == "warming":
            self._tell(msg.Ready(store_port=store_port))
        else:
            self._tell(msg.Stopped(attempt=self.attempt, store_port=store_port))

    def _host_ended(self, code: int) -> None:
        """The host died under its ranks, or while it waited: its ranks die with it; start another."""
        self._host = None
        if self._over.is_set():
            return
        had_ranks = self.ranks_state in ("starting", "running")
        kill_ranks(self._pids)
        if had_ranks and self._stopping < self.attempt:
            self._tell(
                msg.Failed(
                    attempt=self.attempt, rank=-1, exit_code=code or 1, error="TorchrunHostDied",
                    message=f"the node's torchrun host ended (code {code}) and took its ranks along",
                    **self._evidence.look(code),
                )
            )  # fmt: skip
        if self._host_starts > HOST_RESTARTS_MAX:
            self._tell(msg.Leaving(why=f"the torchrun host died {self._host_starts} times"))
            self._over.set()
            return
        if self.ranks_state != "warming":  # a host that waited is as little there as one with ranks
            self._tell(msg.Stopped(attempt=self.attempt, store_port=0))
        self._pids = []
        self._restart = asyncio.ensure_future(self._start_host())

    async def _end_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await end_ranks(self._pids, self._plan.settings.stop_grace_s)
            await host.end()

    def _pass_events_on(self) -> None:
        for event in self._memory.read_events():
            match event:
                case within.Saved() | within.Restored() | within.ColdStart() | within.Skipped():
                    self._cold = self._cold or isinstance(event, within.ColdStart)
                    self._tell(msg.RankEvent(attempt=self.attempt, event=event))
                case within.Checkpoints() | within.Foreseen() | within.Image():
                    self._keeping.heard(event)
                case within.Cadence():
                    self._memory.heard(event)
                case msg.Strange():
                    self._strangers.heard("a rank", event)
                case _:
                    never(event)


def own_temporary_directory() -> tuple[Path, int]:
    """A new directory for this agent, with the descriptor of the lock that says it lives; those that agents
    which were killed left behind are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or not an agent's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its agent lives
        finally:
            os.close(lock)
    own = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
    lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return own, lock


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`; "" when there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def cadence_environment(plan: RunPlan) -> dict[str, str]:
    """Tells the ranks' Checkpointer when to save if the policy says it; else the attempt's MTBF does."""
    settings, values = plan.settings, {}
    if settings.cadence_steps is not None:
        values["JURYMAST_CADENCE_STEPS"] = str(settings.cadence_steps)
    if settings.cadence_s is not None:
        values["JURYMAST_CADENCE_S"] = str(settings.cadence_s)
    return values


def interface_of(address: str) -> str:
    """Name of the network interface that has `address`, or ""."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return ""


def _note(sender: str, text: str) -> None:
    print(f"{sender}: {text}", flush=True)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([part for part in visible.split(",") if part.strip()])


async def serve(directory: RunDirectory, node: str, hint: tuple[str, int] | None) -> None:
    """Run this node's agent. Raises RunDirectoryError."""
    started = time.monotonic()
    plan = directory.plan()
    agent = Agent(directory, plan, node, hint)
    await agent.run()
    print(f"agent on {node}: done after {time.monotonic() - started:.1f} s", flush=True)
