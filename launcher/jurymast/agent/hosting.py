"""The torchrun host and its ranks: what `core.agent.ranks` wants done to them, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jurymast.agent import node as here
from jurymast.agent.driver import Driver
from jurymast.agent.evidence import Evidence
from jurymast.agent.host_process import HostProcess, end_ranks, kill_ranks
from jurymast.agent.keeping import Keeping
from jurymast.agent.node_tests import NodeTests
from jurymast.agent.probing import Probing
from jurymast.agent.ranks import RankMemory
from jurymast.agent.stacks import Stacks
from jurymast.agent.workaround import NetworkWorkaround
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent import effects as do
from jurymast.core.message import Strange
from jurymast.core.settings import RunPlan
from jurymast.errors import never
from jurymast.rundir import RunDirectory
from jurymast.wire.strangers import Strangers


class Hosting:
    """`environment` is what ranks of any attempt get."""

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
        self._stacks = Stacks(directory, plan, temporary, driver.say)
        self.node_tests = NodeTests(driver, environment)
        self._host: HostProcess | None = None

    async def close(self) -> None:
        """The ranks get a SIGTERM, and the rest at once what ends them."""
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
        """What the test processes hold of the devices is the ranks' now."""
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
                look_at = None if message.error else log  # an exception has its own words
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
