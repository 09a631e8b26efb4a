"""The agent: a small process, one per node, that outlives the ranks. `core.agent` decides; this module turns
what happens on the node into events, and carries out effects.

What it needs of the world comes from `agent.io`, so that the simulator runs this very code.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from msgspec.structs import replace

from jurymast.agent.driver import Driver
from jurymast.agent.io import Host, MakeIo
from jurymast.agent.keeping import Keeping
from jurymast.agent.supervision import Connecting, SuccessionDriver
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.agent.ranks import STOP_MARGIN_S
from jurymast.core.judges.silence import beat_every_s
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.host_messages import Apart, FromHosts
from jurymast.core.state.message import Strangers
from jurymast.errors import never

log = logging.getLogger("jurymast.agent")

# A launcher's exit code if the run continues elsewhere or later, so that commands after it do not run.
INTERRUPTED = 128 + signal.SIGTERM


class Agent:
    """Runs one node: its parts, and the machine that decides for it."""

    driver_class: type[Driver] = Driver

    def __init__(self, machine: AgentMachine, make_io: MakeIo) -> None:
        self.machine = machine
        self._driver = self.driver_class(machine, self._carry_out)
        self._strangers = Strangers(_note)
        self._io = make_io(self._driver, self.rank_said)
        self._grace_s = self._io.plan.settings.stop_grace_s
        self._keeping = Keeping(
            self._io.keeper, self._io.storage, self._driver.say, self._write_reached, self._write_ended
        )
        self._connecting = Connecting(self._io, self._driver, self._strangers)
        self._succession = SuccessionDriver(self._io, self._driver)
        self._host: Host | None = None
        self._host_was_ready = False
        self._sweeping: asyncio.Task[None] | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._run_is_over = False  # if true, nobody restores from this node's disk any more
        self._awaited = False  # the supervisor waits until this agent has left
        self.exit_code = INTERRUPTED

    async def run(self) -> None:
        """Run until the supervisor says that the run is over, or until a SIGTERM. Raises the error that broke
        the agent; the supervisor then sees the node leave."""
        driver, io = self._driver, self._io
        await io.begin()
        driver.act(self.machine.start(driver.now, reachable=bool(io.address)))
        await driver.over.wait()
        if not self._awaited:
            self._hang_up()
        await driver.close()
        if self._host is not None:
            await io.ranks.end(self.machine.ranks.pids, self._grace_s)
            await self._host.end()
        await self._end_strays()
        await io.tests.close()
        await io.probing.close()
        await self._keeping.close()
        await io.storage.close()
        await io.keeper.close()
        if self._run_is_over:
            await io.storage.forget_local()
        # Without agents the job of a run that is over ends, and that of one that is requeued is: Slurm kills
        # what is left of it, and takes seconds for that. A supervisor on this node waits for that, too.
        self._hang_up()
        await self._succession.close()
        await io.close()
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
                self._succession.carry_out(effect)
            case do.WarmWriter():
                self._io.storage.warm()
            case do.SayForeseen(image, own):
                room = self._io.keeper.room()
                self._driver.say(msg.Foreseen(image_bytes=image, own_bytes=own, room=room))
            case do.Leave():
                self._run_is_over, self._awaited = effect.over, effect.ordered
                self.exit_code = effect.exit_code if effect.over else INTERRUPTED
                self._driver.spawn(self._leave(effect.grace_s))
            case do.StartTests() | do.TestDevices() | do.TestTogether() | do.EndTests():
                self._io.tests.carry_out(effect)
            case do.WakeAt():
                pass  # the driver handles these
            case do.StartHost():
                self._driver.spawn(self._start_host())
            case do.Prepare():
                self._prepare(effect.order)
            case do.StartRanks():
                environment = self._io.ranks.variables(effect.order)
                self._tell(replace(effect.order, cold=effect.cold, restore=None, environment=environment))
            case do.StopRanks():
                stop = msg.Stop(attempt=effect.attempt, grace_s=effect.grace_s, spare=effect.spare)
                self._tell(stop)
            case do.PartRanks():
                self._tell(Apart(attempt=effect.attempt))
            case do.TakeStacks():
                self._driver.spawn(self._take_stacks(effect), vital=False)
            case do.LookAtRanks():
                self._driver.spawn(self._io.ranks.look(effect.number, effect.pids), vital=False)
            case do.KillRanks():
                self._io.ranks.kill(effect.pids)
            case do.KillHost():
                if self._host is not None:
                    self._host.kill()
            case do.StartProbes():
                self._io.probing.start()
            case _:
                never(effect)

    def _obey(self, order: do.Obeyed) -> None:
        match order:
            case msg.GoOn():
                self._io.probing.clock(order.time)
            case msg.CadenceSet():
                self._io.ranks.set_cadence(order)
            case msg.Write():
                self._keeping.write(order)
            case msg.ContinueWrite():
                self._keeping.continue_write(order)
            case msg.CancelWrite():
                self._keeping.cancel_write(order.id)
            case msg.LeaveVerdict():
                self._driver.spawn(self._io.leave_verdict(order), vital=False)
            case _:
                self._io.keeper.obey(order)

    # To the supervisor.

    def _greet(self) -> None:
        self._connecting.give_up_tries()
        io, ranks = self._io, self.machine.ranks
        io.probing.new_supervisor()
        try:
            io.keeper.listen_at(io.address)
        except OSError as error:
            _note(io.hello.node, f"no other node can fetch images from {io.address}: {error}")
        hello = replace(
            io.hello, address=io.address, attempt=ranks.known, ranks=ranks.state, store_port=ranks.store_port,
            pids=ranks.pids, data_port=io.keeper.port, copies=io.keeper.inventory(), room=io.keeper.room(),
            health=io.probing.known(), clock=io.probing.wall(),
            ended=tuple(ranks.ended.values()), group_made=ranks.group_made, spared=ranks.spared,
        )  # fmt: skip
        self._connecting.send(hello)

    def _beat(self, beat: do.Beat) -> None:
        """Send a heartbeat now, and set the timer for the next one."""
        ranks: list[msg.RankReport] = []
        if self._driver.over.is_set():  # all that it could tell of is being closed
            self._connecting.send(msg.beat_of(beat.attempt, ranks))
        else:
            self._io.keeper.look()
            seen = self._io.ranks.report(beat.pids)
            ranks = seen.ranks
            self._connecting.send(msg.beat_of(beat.attempt, *seen, joules=self._io.probing.joules))
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        plan = self._io.plan
        next_s = beat_every_s(plan.settings.heartbeat_s, ranks, plan.active)
        self._beat_timer = asyncio.get_running_loop().call_later(next_s, self._beat_again)

    def _hang_up(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._connecting.hang_up()

    def _beat_again(self) -> None:
        if self.machine.link.connected:
            self._beat(self.machine.ranks.beat())

    # The ranks and their host.

    async def _start_host(self) -> None:
        self._host_was_ready = False
        self._host = await self._io.start_host(self._host_said, self._host_ended, self._driver.fail)

    async def _leave(self, grace_s: float) -> None:
        """End the ranks, and then this agent. Until then it sends heartbeats, and the supervisor waits."""
        ranks = self.machine.ranks
        if ranks.pids:
            stop = msg.Stop(attempt=ranks.attempt, grace_s=grace_s, job_ends=grace_s > 0.0, spare=False)
            self._tell(stop)
            await self._io.ranks.gone(ranks.pids, max(grace_s, self._grace_s) + STOP_MARGIN_S)
        self._driver.over.set()

    def _prepare(self, order: msg.Launch) -> None:
        self._io.ranks.attempt_begins()
        count = self._io.plan.ranks_per_node
        first = order.rank * count
        self._io.keeper.launch(
            order.attempt, list(range(first, first + count)), order.world * count, order.restore
        )
        self._driver.spawn(self._devices_released(order.attempt))

    async def _devices_released(self, attempt: int) -> None:
        """Wait until test processes, and what earlier ranks left behind, have released the devices, which the
        ranks need now."""
        await self._io.tests.gone()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        self._driver.act(self.machine.on_node_prepared(attempt, self._driver.now))

    def _sweep(self, spared: tuple[int, ...] = ()) -> None:
        """End what ranks have left behind. None runs now but those that are `spared`, and none starts before
        that is done."""
        self._sweeping = self._driver.spawn(self._end_strays(self._sweeping, spared), vital=False)

    async def _end_strays(
        self, before: asyncio.Task[None] | None = None, spared: tuple[int, ...] = ()
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if not await self._io.ranks.end_strays(spared):
            log.warning("a process that a rank left behind does not end, although it was killed")

    def _tell(self, order: msg.Launch | msg.Stop | Apart) -> None:
        if self._host is not None:
            self._host.tell(order)

    async def _take_stacks(self, effect: do.TakeStacks) -> None:
        await self._io.ranks.take_stacks(effect.pids)
        self._driver.act(self.machine.on_stacks_taken(effect.attempt, self._driver.now))

    def _host_said(self, message: FromHosts) -> None:
        now = self._driver.now
        match message:
            case msg.Failed():
                evidence = self._io.ranks.evidence(message.exit_code, message)
                self._driver.act(self.machine.on_rank_failed(message, evidence, now))
            case msg.Unreadable():
                self._strangers.heard("the torchrun host", message)
            case _:
                if isinstance(message, msg.Ready):
                    self._host_was_ready = True
                    self._sweep(tuple(rank.pid for rank in message.spared))
                self._driver.act(self.machine.on_host_message(message, now))

    def _host_ended(self, code: int, said: str) -> None:
        self._host = None
        evidence = {**self._io.ranks.evidence(code), "log": said}
        self._sweep()
        if self._host_was_ready:
            self._driver.act(self.machine.on_host_ended(code, evidence, self._driver.now))
        else:
            self._driver.spawn(self._explain_end(code, evidence))

    async def _explain_end(self, code: int, evidence: dict[str, Any]) -> None:
        why = await self._io.unloadable()
        self._driver.act(self.machine.on_host_ended(code, evidence, self._driver.now, why))

    def rank_said(self, event: within.FromRanks) -> None:
        match event:
            case within.Cadence():
                self._io.ranks.wants_cadence(event)
            case within.Image():
                self._io.keeper.image_published(event.local_rank, event.slot, event.stall_s)
            case msg.Unreadable():
                self._strangers.heard("a rank", event)
            case _:
                if isinstance(event, within.CheckpointsKept):
                    self._io.storage.checkpoints_at(event)
                self._driver.act(self.machine.on_rank_event(event, self._driver.now))

    def _write_reached(self, id: str, phase: msg.WritePhase) -> None:
        self._driver.act(self.machine.on_write_reached(id, phase, self._driver.now))

    def _write_ended(self, id: str) -> None:
        self._driver.act(self.machine.on_write_ended(id, self._driver.now))


def _note(sender: str, text: str) -> None:
    log.warning("%s: %s", sender, text)
