"""The agent: a small process, one per node, that outlives the ranks. `core.agent` decides; this module turns
what happens on the node into events, and carries out effects. It also makes the node's temporary directory
and the environment of its ranks.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from msgspec.structs import replace

from jurymast import programs
from jurymast.agent.health import NodeTestRunner, Probing, driver_here, leave_verdict
from jurymast.agent.keeping import Keeping, own_domain
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
from jurymast.agent.supervision import Connecting, Driver, Succeeding
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.sbatch import visible_gpus
from jurymast.cluster.signals import WARNINGS
from jurymast.cluster.verdicts import boot_id
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.agent.ranks import STOP_MARGIN_S
from jurymast.core.judges import slurm_variables
from jurymast.core.judges.silence import beat_every_s
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.host_messages import Apart, FromHosts
from jurymast.core.state.message import Strangers
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import compressed
from jurymast.errors import never
from jurymast.foreign import check_private, temporary_place
from jurymast.processes import TASKS_ALONE_VARIABLE, adopt_orphans, catches, end_strays, leave_no_core
from jurymast.rundir import RunDirectory
from jurymast.wire.addresses import ADDRESS_VARIABLE, interface_of, plain

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
        "stderr_apart": plan.stderr_apart, "inputs": plan.inputs, "core_bytes": core_bytes,
    }  # fmt: skip


# What processes of one run tell each other. From another run, in variables that somebody has saved or passed
# on, it would lead ranks to that run's logs and memory, or away from checkpoints of their own.
OF_RANKS = re.compile(
    r"JURYMAST_(ATTEMPT|EVENTS|HOST_FD|KEEPER|LOCAL_RANK|LOG|PAGE|SAVED_STEP|STACKS|STARTUP|STDERR|STDIN|"
    r"UNREADABLE|USER_TMPDIR|WORLD_SIZE)$"
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


log = logging.getLogger("jurymast.agent")

# A launcher's exit code if the run continues elsewhere or later, so that commands after it do not run.
INTERRUPTED = 128 + signal.SIGTERM


class Agent:
    """Runs one node: its parts, and the machine that decides for it."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        node: str,
        hint: tuple[str, int] | None,
        oom_kills: int = 0,
    ) -> None:
        """`oom_kills`: how many kills for want of memory ended the agent before this one; 0 for the first."""
        self._oom_kills = oom_kills
        self._directory = directory
        self._plan = plan
        self._node = node
        self._hint = hint
        self._incarnation = secrets.token_hex(8)
        allocation = Allocation.load(directory)
        self._allocation = allocation.key
        self._users = users_variables(plan, allocation.nodes, os.environ)
        self._machine = AgentMachine(
            plan, node, allocation.key, allocation.nodes, hint, random.random(),
            gpus=visible_gpus(os.environ), driver=driver_here(),
        )  # fmt: skip
        self._driver = Driver(self._machine, self._carry_out)
        self._temporary, self._lock = own_temporary_directory()
        self._core_bytes = leave_no_core()
        self._strangers = Strangers(_note)
        self._memory = RankMemory(plan.ranks_per_node)
        self._watch = RankWatch(self._memory, plan.settings.heartbeat_s, plan.program)
        self._evidence = Evidence()
        self._keeping = Keeping(
            directory,
            plan,
            node,
            self._driver.say,
            self._write_reached,
            self._write_ended,
            self._evidence.count_kills,
        )
        self._probing = Probing(directory, plan, node, self._driver.say)
        self._connecting = Connecting(directory, self._driver, self._strangers)
        self._workaround = NetworkWorkaround(
            plan.settings.workaround, self._probing.findings, self._driver.say
        )
        self._stacks = StackTaker(directory, plan, self._temporary, self._driver.say)
        self._node_tests = NodeTestRunner(self._driver, self._environment)
        self._host: HostProcess | None = None
        self._host_was_ready = False
        self._sweeping: asyncio.Task[None] | None = None
        self._succeeding = Succeeding(directory, node, self._driver)
        self._beat_timer: asyncio.TimerHandle | None = None
        self.exit_code = INTERRUPTED

    async def run(self) -> None:
        """Run until the supervisor says that the run is over, or until a SIGTERM. Raises the error that broke
        the agent; the supervisor then sees the node leave."""
        driver, loop = self._driver, asyncio.get_running_loop()
        adopt_orphans()
        loop.add_signal_handler(signal.SIGTERM, lambda: driver.act(self._machine.terminated(driver.now)))
        for number in (*WARNINGS, signal.SIGINT):  # from --signal, or the script
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_reader(self._memory.events_fd, self._ranks_said)
        threading.Thread(target=remove_abandoned, name="remove-abandoned", daemon=True).start()
        await self._keeping.keeper.start()
        if self._hint is not None:
            self._connecting.address = local_address(*self._hint)
        driver.act(self._machine.start(driver.now, reachable=bool(self._connecting.address)))
        try:
            await driver.over.wait()
        finally:
            if self._beat_timer is not None:
                self._beat_timer.cancel()
            self._connecting.hang_up()
            await driver.close()
            if self._host is not None:
                await end_ranks(self._machine.ranks.pids, self._plan.settings.stop_grace_s)
                await self._host.end()
            await self._end_strays()
            await self._node_tests.close()
            await self._probing.close()
            await self._keeping.close()
            await self._succeeding.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
            os.close(self._lock)
        if driver.failure is not None:
            raise driver.failure

    def _carry_out(self, effect: do.Effect) -> None:
        match effect:
            case do.Send():
                self._connecting.send(effect.message)
            case do.Beat():
                self._beat(effect)
            case do.Obey():
                self._obey(effect.order)
            case do.Connect():
                self._connecting.connect(effect.targets)
            case do.FindSupervisor():
                self._connecting.find()
            case do.Greet():
                self._greet()
            case do.HangUp():
                self._connecting.hang_up()
            case do.ReadPulse() | do.StandBy() | do.EndStandby() | do.StartSupervisor():
                self._succeeding.carry_out(effect)
            case do.WarmWriter():
                self._keeping.warm()
            case do.SayForeseen(image, own):
                foreseen = msg.Foreseen(image_bytes=image, own_bytes=own, room=self._keeping.keeper.room())
                self._driver.say(foreseen)
            case do.Leave():
                self._keeping.run_is_over = effect.over
                self.exit_code = effect.exit_code if effect.over else INTERRUPTED
                self._driver.spawn(self._leave(effect.grace_s))
            case do.StartTests() | do.TestDevices() | do.TestTogether() | do.EndTests():
                self._node_tests.carry_out(effect)
            case do.WakeAt():
                pass  # the driver handles these
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
                self._tell(msg.Stop(attempt=effect.attempt))
            case do.PartRanks():
                self._tell(Apart(attempt=effect.attempt))
            case do.TakeStacks():
                self._driver.spawn(self._take_stacks(effect), vital=False)
            case do.LookAtRanks():
                looking = self._stacks.look(effect.number, self._memory.trains(effect.pids))
                self._driver.spawn(looking, vital=False)
            case do.KillRanks():
                signal_ranks(effect.pids, signal.SIGKILL)
            case do.KillHost():
                if self._host is not None:
                    self._host.kill()
            case do.StartProbes():
                self._probing.start()
            case _:
                never(effect)

    def _obey(self, order: do.Obeyed) -> None:
        match order:
            case msg.GoOn():
                self._probing.clock(order.time)
            case msg.CadenceSet():
                self._memory.order(order)
            case msg.Write():
                self._keeping.write(order)
            case msg.ContinueWrite():
                self._keeping.continue_write(order)
            case msg.CancelWrite():
                self._keeping.cancel_write(order.id)
            case msg.LeaveVerdict():
                leaving = leave_verdict(order, self._plan, self._node, self._driver.say)
                self._driver.spawn(leaving, vital=False)
            case _:
                self._keeping.keeper.obey(order)

    # To the supervisor.

    def _greet(self) -> None:
        self._connecting.give_up_tries()
        self._probing.new_supervisor()
        ranks = self._machine.ranks
        try:
            self._keeping.keeper.listen_at(self._connecting.address)
        except OSError as error:
            _note(self._node, f"no other node can fetch images from {self._connecting.address}: {error}")
        hello = msg.Hello(
            node=self._node, allocation=self._allocation, address=self._connecting.address,
            incarnation=self._incarnation, pid=os.getpid(), boot_id=boot_id(),
            gpus=visible_gpus(os.environ), attempt=ranks.known, ranks=ranks.state,
            store_port=ranks.store_port, pids=ranks.pids, data_port=self._keeping.keeper.port,
            copies=self._keeping.keeper.inventory(), room=self._keeping.keeper.room(), domain=own_domain(),
            health=self._probing.known(), oom_kills=self._oom_kills,
            ended=tuple(ranks.ended.values()), group_made=ranks.group_made,
        )  # fmt: skip
        self._connecting.send(hello)

    def _beat(self, beat: do.Beat) -> None:
        """Send a heartbeat now, and set the timer for the next one."""
        self._evidence.count_kills()
        self._keeping.keeper.look()
        ranks = self._watch.look(list(beat.pids)) if beat.pids else []
        cadence = self._memory.cadence()
        times = self._watch.times() if ranks else None
        self._connecting.send(msg.beat_of(beat.attempt, ranks, cadence, times))
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        next_s = beat_every_s(self._plan.settings.heartbeat_s, ranks, self._plan.active)
        self._beat_timer = asyncio.get_running_loop().call_later(next_s, self._beat_again)

    def _beat_again(self) -> None:
        if self._machine.link.connected:
            self._beat(self._machine.ranks.beat())

    # The ranks and their host.

    async def _start_host(self) -> None:
        self._host_was_ready = False
        plan = host_plan(self._plan, self._directory.root, self._temporary, self._core_bytes)
        self._host = await HostProcess.start(
            plan, {**self._users, **self._environment()}, self._host_said, self._host_ended, self._driver.fail
        )

    async def _leave(self, grace_s: float) -> None:
        """End the ranks, and then this agent. Until then it sends heartbeats, and the supervisor waits."""
        ranks = self._machine.ranks
        if ranks.pids:
            self._tell(msg.Stop(attempt=ranks.attempt, grace_s=grace_s))
            await gone(ranks.pids, max(grace_s, self._plan.settings.stop_grace_s) + STOP_MARGIN_S)
        self._driver.over.set()

    async def _prepare(self, attempt: int) -> None:
        """Wait until test processes, and what earlier ranks left behind, have released the devices, which the
        ranks need now."""
        await self._node_tests.gone()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        self._driver.act(self._machine.prepared(attempt, self._driver.now))

    def _sweep(self) -> None:
        """End what ranks have left behind. None runs now, and none starts before that is done."""
        self._sweeping = self._driver.spawn(self._end_strays(self._sweeping), vital=False)

    async def _end_strays(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not await asyncio.to_thread(end_strays):
            log.warning("a process that a rank left behind does not end, although it was killed")

    def _start_ranks(self, order: msg.Launch, *, cold: bool) -> None:
        environment = {**self._workaround.environment(order.attempt), **self._stacks.launch(order)}
        self._tell(replace(order, cold=cold, restore=None, environment=environment))

    def _tell(self, order: msg.Launch | msg.Stop | Apart) -> None:
        if self._host is not None:
            self._host.tell(order)

    async def _take_stacks(self, effect: do.TakeStacks) -> None:
        await self._stacks.take(self._memory.trains(effect.pids))
        self._driver.act(self._machine.stacks_taken(effect.attempt, self._driver.now))

    def _host_said(self, message: FromHosts) -> None:
        now = self._driver.now
        match message:
            case msg.Failed():
                log_file = self._directory.last_words(message.attempt, message.rank)
                look_at = None if message.error else log_file  # an exception has its own message
                evidence = self._evidence.look(message.exit_code, look_at)
                self._driver.act(self._machine.rank_failed(message, evidence, now))
            case msg.Strange():
                self._strangers.heard("the torchrun host", message)
            case _:
                if isinstance(message, msg.Ready):
                    self._host_was_ready = True
                    self._sweep()
                self._driver.act(self._machine.host_said(message, now))

    def _host_ended(self, code: int) -> None:
        self._host = None
        evidence = self._evidence.look(code)
        self._sweep()
        if self._host_was_ready:
            self._driver.act(self._machine.host_ended(code, evidence, self._driver.now))
        else:
            self._driver.spawn(self._explain_end(code, evidence))

    async def _explain_end(self, code: int, evidence: dict[str, Any]) -> None:
        why = await unloadable({**self._users, **self._environment()}, self._plan.working_directory)
        self._driver.act(self._machine.host_ended(code, evidence, self._driver.now, why))

    def _environment(self) -> dict[str, str]:
        return {
            **self._keeping.environment(),
            **self._memory.environment(),
            **rank_environment(
                self._plan, self._directory.root, self._node, self._temporary, self._connecting.address
            ),
        }

    def _ranks_said(self) -> None:
        for event in self._memory.read_events():
            match event:
                case within.Cadence():
                    self._memory.heard(event)
                case within.Image():
                    self._keeping.keeper.image_published(event.local_rank, event.slot, event.stall_s)
                case msg.Strange():
                    self._strangers.heard("a rank", event)
                case _:
                    if isinstance(event, within.CheckpointsKept):
                        self._keeping.checkpoints_at(event)
                    self._driver.act(self._machine.rank_said(event, self._driver.now))

    def _signalled(self, number: signal.Signals) -> None:
        """Tell of a signal that is for the ranks, and pass it on if Slurm has not sent it to them as well."""
        pids = self._machine.ranks.pids
        train = self._memory.trains(pids)
        if any(catches(pid, number) for pid in {*pids, *train}):
            self._driver.act(self._machine.rank_said(within.Warned(), self._driver.now))
        if TASKS_ALONE_VARIABLE in os.environ:
            tell_ranks(pids, train, number)

    def _write_reached(self, id: str, phase: msg.WritePhase) -> None:
        self._driver.act(self._machine.write_reached(id, phase, self._driver.now))

    def _write_ended(self, id: str) -> None:
        self._driver.act(self._machine.write_ended(id, self._driver.now))


def _note(sender: str, text: str) -> None:
    log.warning("%s: %s", sender, text)


async def serve(directory: RunDirectory, node: str, hint: tuple[str, int] | None, oom_kills: int = 0) -> int:
    """Run this node's agent, and return the run's exit code. `oom_kills`: see `Agent`. Raises
    RunDirectoryError."""
    started = time.monotonic()
    plan = directory.own_plan()
    agent = Agent(directory, plan, node, hint, oom_kills)
    await agent.run()
    log.info("done after %.1f s", time.monotonic() - started)
    return agent.exit_code
