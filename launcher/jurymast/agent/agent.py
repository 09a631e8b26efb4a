"""The agent: one a node, light, outlives the ranks. What it decides is `core.agent`; here sockets, processes
and timers become events, and effects are carried out."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from jurymast.agent import node as here
from jurymast.agent.around import Around
from jurymast.agent.connecting import Connecting
from jurymast.agent.evidence import Evidence
from jurymast.agent.host_process import HostProcess, end_ranks, kill_ranks
from jurymast.agent.keeping import Keeping, own_domain
from jurymast.agent.probing import Probing
from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.agent.stacks import Stacks
from jurymast.agent.testing import Testing
from jurymast.agent.verdict import leave_verdict
from jurymast.cluster.allocation import Allocation
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.heartbeat import beat_every_s
from jurymast.core.message import Strange
from jurymast.core.messages import beat_of
from jurymast.core.settings import RunPlan
from jurymast.errors import never
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint
from jurymast.wire.strangers import Strangers


class Agent:
    """One node. Every event goes to the machine, and what it returns to `_do`."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, hint: tuple[str, int] | None
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._node = node
        self._hint = hint
        self._incarnation = secrets.token_hex(8)
        allocation = Allocation.load(directory)
        self._allocation = allocation.key
        self._machine = AgentMachine(plan, node, allocation.key, allocation.nodes, hint, random.random())
        self._memory = RankMemory(plan.ranks_per_node)
        self._watch = RankWatch(self._memory, plan.settings.heartbeat_s)
        self._evidence = Evidence()
        self._keeping = Keeping(directory, plan, node, self._say, self._write_ended)
        self._probing = Probing(directory, plan, node, self._say)
        self._around = Around(plan.settings.workaround, self._probing.findings, self._say)
        self._temporary, self._lock = here.own_temporary_directory()
        self._stacks = Stacks(directory, plan, self._temporary, self._say)
        self._testing = Testing(plan, here.visible_gpus(), self._environment, self._say)
        self._strangers = Strangers(_note)
        self._connecting = Connecting(directory, self._machine, self._do, self._spawn, self._strangers)
        self._host: HostProcess | None = None
        self._supervisor: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until the supervisor says that the run is over, or a SIGTERM. Raises what broke it: the supervisor
        sees the node go."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._do(self._machine.terminated(_now())))
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        loop.add_reader(self._memory.events_fd, self._ranks_said)
        await self._keeping.start()
        if self._hint is not None:
            self._connecting.address = here.local_address(*self._hint)
        self._do(self._machine.start(_now(), reachable=bool(self._connecting.address)))
        try:
            await self._over.wait()
        finally:
            await self._end()
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        self._over.set()
        for timer in (self._timer, self._beat_timer):
            if timer is not None:
                timer.cancel()
        self._connecting.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._host is not None:
            await end_ranks(list(self._machine.ranks.pids), self._plan.settings.stop_grace_s)
            await self._host.end()
        await self._testing.end()
        await self._probing.close()
        await self._keeping.close()
        if self._supervisor is not None:  # it ends the job after its last agent has left
            await self._supervisor.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.close(self._lock)

    # Effects.

    def _do(self, effects: list[do.Effect]) -> None:
        """In their order. What one of them brings about at once is only ever something to say."""
        if self._over.is_set():
            return
        for effect in effects:
            match effect:
                case do.WakeAt():
                    self._wake_at(effect.at)
                case do.Say():
                    self._connecting.send(effect.message)
                case do.Beat():
                    self._beat(effect)
                case do.Obey():
                    self._obey(effect.order)
                case do.Leave():
                    self._keeping.run_is_over = effect.over
                    self._over.set()
                case do.Connect():
                    self._connecting.connect(effect.targets)
                case do.Find():
                    self._connecting.find()
                case do.Greet():
                    self._greet()
                case do.HangUp():
                    self._connecting.hang_up()
                case do.ReadPulse():
                    self._spawn(self._read_pulse())
                case do.StartSupervisor():
                    self._spawn(self._supervise())
                case _:
                    self._do_to_ranks(effect)

    def _do_to_ranks(self, effect: do.ToRanks | do.ForCheckpoints) -> None:
        match effect:
            case do.StartHost():
                self._spawn(self._start_host())
            case do.Prepare():
                self._memory.clear()
                self._evidence.attempt_begins()
                self._keeping.launch(effect.order)
                self._spawn(self._prepare(effect.order.attempt))
            case do.StartRanks():
                self._start_ranks(effect.order, cold=effect.cold)
            case do.StopRanks():
                self._tell_host(within.Stop(attempt=effect.attempt))
            case do.TakeStacks():
                self._spawn(self._take_stacks(effect))
            case do.LookAtRanks():
                self._spawn(self._stacks.look(effect.number, list(effect.pids)))
            case do.KillRanks():
                kill_ranks(list(effect.pids))
            case do.KillHost():
                if self._host is not None:
                    self._host.kill()
            case do.StartProbes():
                self._probing.start()
            case do.EndTests():
                self._testing.end_soon()
            case do.StartWrite():
                self._keeping.write(effect.order)
            case do.CancelWrite():
                self._keeping.cancel_write(effect.id)
            case do.WarmWriter():
                self._keeping.warm()
            case do.SayForeseen():
                image, own = effect.image_bytes, effect.own_bytes
                self._say(msg.Foreseen(image_bytes=image, own_bytes=own, room=self._keeping.room()))
            case _:
                never(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """An agent that half works is worse than one whose node is given up."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._over.set()

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(at - _now(), self._wake, at) if at < do.NEVER else None

    def _wake(self, at: float) -> None:
        self._do(self._machine.tick(max(at, _now())))

    # The supervisor's side.

    def _greet(self) -> None:
        self._connecting.give_up_tries()
        self._probing.new_supervisor()
        ranks = self._machine.ranks
        hello = msg.Hello(
            node=self._node, allocation=self._allocation, address=self._connecting.address,
            incarnation=self._incarnation, pid=os.getpid(), boot_id=here.boot_id(), gpus=here.visible_gpus(),
            attempt=ranks.attempt, ranks=ranks.state, store_port=ranks.store_port, pids=ranks.pids,
            data_port=self._keeping.data_port, copies=self._keeping.inventory(),
            room=self._keeping.room(), domain=own_domain(), health=self._probing.known(),
        )  # fmt: skip
        self._connecting.send(hello)

    def _beat(self, beat: do.Beat) -> None:
        """Now, and again after a while."""
        self._keeping.look()
        ranks = self._watch.look(list(beat.pids)) if beat.pids else []
        cadence = self._memory.cadence()
        times = self._watch.times() if ranks else None
        self._connecting.send(beat_of(beat.attempt, ranks, cadence, times))
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        next_s = beat_every_s(self._plan.settings.heartbeat_s, ranks)
        self._beat_timer = asyncio.get_running_loop().call_later(next_s, self._beat_again)

    def _beat_again(self) -> None:
        if self._machine.link.connected:
            self._beat(self._machine.ranks.beat())

    def _say(self, message: msg.ToSupervisor) -> None:
        self._do(self._machine.say(message, _now()))

    def _obey(self, order: do.Obeyed) -> None:
        match order:
            case msg.GoOn():
                self._probing.clock(order.time)
            case msg.Cadence():
                self._memory.order(order)
            case msg.LeaveVerdict():
                self._spawn(leave_verdict(order, self._plan, self._node, self._say))
            case msg.TestAlone() | msg.TestPair():
                self._testing.obey(order)
            case _:
                self._keeping.obey(order)

    async def _read_pulse(self) -> None:
        try:
            pulse: str | None = await asyncio.to_thread(endpoint.read_pulse, self._directory.epochs)
        except OSError:
            pulse = None
        self._do(self._machine.pulse(pulse, _now()))

    async def _supervise(self) -> None:
        print(f"{self._node}: no supervisor answers, starting one here", flush=True)
        self._supervisor = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jurymast.supervisor", str(self._directory.root), "--takeover", self._node,
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await self._supervisor.wait()
        self._do(self._machine.supervisor_ended(_now()))

    # The torchrun host's side.

    async def _start_host(self) -> None:
        plan = here.host_plan(self._plan, self._directory.root, self._temporary)
        self._host = await HostProcess.start(plan, self._environment(), self._host_said, self._host_ended)
        if self._machine.ranks.attempt == 0:
            self._testing.warm_up()

    def _environment(self) -> dict[str, str]:
        return {
            **self._keeping.environment(),
            "JURYMAST_PAGE": self._memory.page_path,
            "JURYMAST_EVENTS": self._memory.events_path,
            **here.rank_environment(
                self._plan, self._directory.root, self._node, self._temporary, self._connecting.address
            ),
        }

    async def _prepare(self, attempt: int) -> None:
        """What the test processes hold of the devices is the ranks' now."""
        await self._testing.end()
        self._do(self._machine.prepared(attempt, _now()))

    def _start_ranks(self, order: msg.Launch, *, cold: bool) -> None:
        environment = {**self._around.environment(order.attempt), **self._stacks.launch(order)}
        launch = within.Launch(
            attempt=order.attempt, rank=order.rank, world=order.world, master_address=order.master_address,
            master_port=order.master_port, mtbf_s=order.mtbf_s, cold=cold, saved=order.saved,
            environment=environment,
        )  # fmt: skip
        self._tell_host(launch)

    def _tell_host(self, order: within.ToHost) -> None:
        if self._host is not None:
            self._host.tell(order)

    async def _take_stacks(self, effect: do.TakeStacks) -> None:
        await self._stacks.take(list(effect.pids))
        self._do(self._machine.stacks_taken(effect.attempt, _now()))

    def _host_said(self, message: within.FromHosts) -> None:
        match message:
            case within.Failed():
                log = self._directory.rank_log(message.attempt, message.rank)
                look_at = None if message.error else log  # an exception has its own words
                evidence = self._evidence.look(message.exit_code, look_at)
                self._do(self._machine.rank_failed(message, evidence, _now()))
            case Strange():
                self._strangers.heard("the torchrun host", message)
            case _:
                self._do(self._machine.host_said(message, _now()))

    def _host_ended(self, code: int) -> None:
        self._host = None
        self._do(self._machine.host_ended(code, self._evidence.look(code), _now()))

    def _ranks_said(self) -> None:
        for event in self._memory.read_events():
            match event:
                case within.Cadence():
                    self._memory.heard(event)
                case within.Image():
                    self._keeping.image_published(event)
                case Strange():
                    self._strangers.heard("a rank", event)
                case _:
                    if isinstance(event, within.Checkpoints):
                        self._keeping.checkpoints_at(event)
                    self._do(self._machine.rank_said(event, _now()))

    def _write_ended(self, id: str) -> None:
        self._do(self._machine.write_ended(id, _now()))


def _now() -> float:
    return time.monotonic()


def _note(sender: str, text: str) -> None:
    print(f"{sender}: {text}", flush=True)


async def serve(directory: RunDirectory, node: str, hint: tuple[str, int] | None) -> None:
    """Run this node's agent. Raises RunDirectoryError."""
    started = time.monotonic()
    plan = directory.plan()
    agent = Agent(directory, plan, node, hint)
    await agent.run()
    print(f"agent on {node}: done after {time.monotonic() - started:.1f} s", flush=True)
