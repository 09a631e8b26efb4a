"""The agent: a small process, one per node, that outlives the ranks. `core.agent` decides; this module turns
what happens on the node into events, and carries out effects."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import shutil
import signal
import threading
import time

from jurymast.agent import node as here
from jurymast.agent.driver import Driver
from jurymast.agent.hosting import Hosting
from jurymast.agent.keeping import Keeping, own_domain
from jurymast.agent.node_tests import driver_here
from jurymast.agent.probing import Probing, leave_verdict
from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.agent.supervision import Connecting, Succeeding
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.sbatch_options import visible_gpus
from jurymast.cluster.verdicts import boot_id
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.message import Strange
from jurymast.core.messages import beat_of
from jurymast.core.nodes.heartbeat import beat_every_s
from jurymast.core.settings import RunPlan
from jurymast.rundir import RunDirectory
from jurymast.wire.channel import Strangers

log = logging.getLogger("jurymast.agent")

# A launcher's exit code if the run continues elsewhere or later, so that commands after it do not run.
INTERRUPTED = 128 + signal.SIGTERM


class Agent:
    """Runs one node: its parts, and the machine that decides for it."""

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
        self._machine = AgentMachine(
            plan, node, allocation.key, allocation.nodes, hint, random.random(),
            gpus=visible_gpus(os.environ), driver=driver_here(),
        )  # fmt: skip
        self._driver = Driver(self._machine, self._carry_out)
        self._temporary, self._lock = here.own_temporary_directory()
        self._strangers = Strangers(_note)
        self._memory = RankMemory(plan.ranks_per_node)
        self._watch = RankWatch(self._memory, plan.settings.heartbeat_s, plan.program)
        self._keeping = Keeping(directory, plan, node, self._driver.say, self._write_ended)
        self._probing = Probing(directory, plan, node, self._driver.say)
        self._connecting = Connecting(directory, self._driver, self._strangers)
        self._hosting = Hosting(
            directory, plan, self._temporary, self._driver, self._memory, self._keeping, self._probing,
            self._strangers, self._environment,
        )  # fmt: skip
        self._succeeding = Succeeding(directory, node, self._driver)
        self._beat_timer: asyncio.TimerHandle | None = None
        self.exit_code = INTERRUPTED

    async def run(self) -> None:
        """Run until the supervisor says that the run is over, or until a SIGTERM. Raises the error that broke
        the agent; the supervisor then sees the node leave."""
        driver, loop = self._driver, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: driver.act(self._machine.terminated(driver.now)))
        for warning in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):  # from --signal
            loop.add_signal_handler(warning, lambda: None)
        loop.add_reader(self._memory.events_fd, self._ranks_said)
        threading.Thread(target=here.remove_abandoned, name="remove-abandoned", daemon=True).start()
        await self._keeping.keeper.start()
        if self._hint is not None:
            self._connecting.address = here.local_address(*self._hint)
        driver.act(self._machine.start(driver.now, reachable=bool(self._connecting.address)))
        try:
            await driver.over.wait()
        finally:
            if self._beat_timer is not None:
                self._beat_timer.cancel()
            self._connecting.hang_up()
            await driver.close()
            await self._hosting.close()
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
                self._driver.over.set()
            case do.StartTests() | do.TestDevices() | do.TestTogether() | do.EndTests():
                self._hosting.node_tests.carry_out(effect)
            case do.WakeAt():
                pass  # the driver handles these
            case _:
                self._hosting.carry_out(effect)

    def _obey(self, order: do.Obeyed) -> None:
        match order:
            case msg.GoOn():
                self._probing.clock(order.time)
            case msg.CadenceSet():
                self._memory.order(order)
            case msg.Write():
                self._keeping.write(order)
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
            gpus=visible_gpus(os.environ), attempt=ranks.attempt, ranks=ranks.state,
            store_port=ranks.store_port, pids=ranks.pids, data_port=self._keeping.keeper.port,
            copies=self._keeping.keeper.inventory(), room=self._keeping.keeper.room(), domain=own_domain(),
            health=self._probing.known(),
        )  # fmt: skip
        self._connecting.send(hello)

    def _beat(self, beat: do.Beat) -> None:
        """Send a heartbeat now, and set the timer for the next one."""
        self._keeping.keeper.look()
        ranks = self._watch.look(list(beat.pids)) if beat.pids else []
        cadence = self._memory.cadence()
        times = self._watch.times() if ranks else None
        self._connecting.send(beat_of(beat.attempt, ranks, cadence, times))
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        next_s = beat_every_s(self._plan.settings.heartbeat_s, ranks, self._plan.active)
        self._beat_timer = asyncio.get_running_loop().call_later(next_s, self._beat_again)

    def _beat_again(self) -> None:
        if self._machine.link.connected:
            self._beat(self._machine.ranks.beat())

    # From and for the ranks.

    def _environment(self) -> dict[str, str]:
        return {
            **self._keeping.environment(),
            **self._memory.environment(),
            **here.rank_environment(
                self._plan, self._directory.root, self._node, self._temporary, self._connecting.address
            ),
        }

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
                    if isinstance(event, within.CheckpointsKept):
                        self._keeping.checkpoints_at(event)
                    self._driver.act(self._machine.rank_said(event, self._driver.now))

    def _write_ended(self, id: str) -> None:
        self._driver.act(self._machine.write_ended(id, self._driver.now))


def _note(sender: str, text: str) -> None:
    log.warning("%s: %s", sender, text)


async def serve(directory: RunDirectory, node: str, hint: tuple[str, int] | None) -> int:
    """Run this node's agent, and return the run's exit code. Raises RunDirectoryError."""
    started = time.monotonic()
    plan = directory.plan()
    agent = Agent(directory, plan, node, hint)
    await agent.run()
    log.info("done after %.1f s", time.monotonic() - started)
    return agent.exit_code
