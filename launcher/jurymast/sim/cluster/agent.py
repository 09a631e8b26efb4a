"""A simulated node with its agent: the real `agent.agent.Agent`, and its world: a simulated torchrun host,
keeper, ranks and storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from jurymast import background
from jurymast.agent.agent import Agent
from jurymast.agent.driver import Driver
from jurymast.agent.io import Phases
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.checkpoints.writes import GIVEN_UP_S
from jurymast.core.judges.stacks import COLLECTIVE
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.evidence import Entered, RankPlace, SparedRank
from jurymast.core.state.findings import Finding
from jurymast.core.state.host_messages import Apart, FromHosts
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import CadenceReport, RanksSeen, WritePhase
from jurymast.keeper.keeper import Loan
from jurymast.sim.cluster.health import SimNodeHealth
from jurymast.sim.cluster.keeper import SimKeeper
from jurymast.sim.cluster.loop import SimLoop, SimPeer, SimShell
from jurymast.sim.cluster.rejoining import has_twin
from jurymast.sim.cluster.training import Page, SimGroup, SimMember, follower
from jurymast.sim.cluster.world import BEGINNING, Process, SimConnection, Steps, Token, WritePlace
from jurymast.storage.orders import Answer, DamagedImage, Done, StorageFailed

if TYPE_CHECKING:
    from jurymast.sim.cluster.cluster import Cluster

WARM_S, START_S, STOP_S = (0.3, 2.0), (0.02, 0.3), (0.02, 0.3)
TORN_SHARE = 0.1  # of ranks, those whose update is cut short, or that die before they record what is theirs
SUPERVISOR_START_S = (0.2, 0.7)
STRAYS_S, STACKS_S, LOOK_S, GONE_LOOK_S, IMPORT_S = (0.0, 0.05), 0.3, 0.05, 0.05, 0.5
# Between two tries to connect; what a refusal takes.
DIAL_S, REFUSE_S = 0.1, 0.002
COPY_S, PROGRESS_S, CANCEL_S, WRITTEN_BYTES = (0.05, 0.4), 5.0, 0.005, 100


class SimSite:
    """A node. `clock_s`: how wrong its clock is."""

    def __init__(self, cluster: Cluster, name: str, clock_s: float, room: int) -> None:
        self.cluster, self.name, self.clock_s, self.room = cluster, name, clock_s, room
        self.up = True
        self.stopped_until = 0.0
        self.processes: list[Process] = []
        self.agent: SimAgent | None = None
        self.agents = self.boots = 0  # how many so far
        self.refill = 0  # the number of the small job that has it; 0: the run's own
        self.ill = ""  # how: see `sim.cluster.health`
        self.findings: list[Finding] = []

    @property
    def wall(self) -> float:
        return BEGINNING + self.cluster.world.now + self.clock_s

    def process(self) -> Process:
        process = Process()
        process.until = self.stopped_until
        self.processes = [one for one in self.processes if one.alive]
        self.processes.append(process)
        return process

    def freeze(self, seconds: float) -> None:
        self.stopped_until = max(self.stopped_until, self.cluster.world.now + seconds)
        for process in self.processes:
            process.stop_until(self.stopped_until)

    def die(self) -> None:
        """Lose everything on the node, without a word to anybody."""
        self.up = False
        for process in self.processes:
            process.alive = False
        if self.agent is not None:
            self.agent.gone(loud=False)

    def boot(self) -> None:
        self.up, self.stopped_until = True, 0.0
        self.boots += 1
        self.mended()
        self.start_agent()

    def mended(self) -> None:
        self.ill, self.findings = "", []

    def start_agent(self) -> None:
        """Start an agent if there is none, the job has this node, and the job continues."""
        here = self.cluster.allocated and self.cluster.sites.get(self.name) is self
        here = here and bool(self.cluster.has_step or self.refill)
        if self.up and here and self.name not in self.cluster.without and self.agent is None:
            self.agents += 1
            self.agent = SimAgent(self.cluster, self)

    @property
    def usable(self) -> bool:
        return self.up and self.stopped_until <= self.cluster.world.now

    def end_job(self) -> None:
        for process in self.processes:
            process.alive = False
        if self.agent is not None:
            self.agent.gone(loud=False)
        self.agents = 0


class SimHost:
    """A torchrun host as in `worker.elastic`: one attempt at a time, each after a message that it waits.
    `said` gets its messages, `ended` its exit code."""

    def __init__(
        self, agent: SimAgent, said: Callable[[FromHosts], None], ended: Callable[[int, str], None]
    ) -> None:
        self.agent, self.site, self.world = agent, agent.site, agent.world
        self._said, self._ended = said, ended
        self.process = agent.site.process()
        self.port = 0
        self.attempt = 0  # that runs
        self.stop_up_to = 0
        self.member: SimMember | None = None
        self.group: SimGroup | None = None
        self.pids: tuple[int, ...] = ()
        self.spared: tuple[SparedRank, ...] = ()  # while it waits
        self._spares = True
        self.live: Token | None = None  # the state of the ranks that are spared, if it is that after a step
        self.alive: frozenset[int] = frozenset()  # the local numbers of these ranks
        self.own: Token | None = None  # of what state it has all that is the ranks' own
        self.kept: Token | None = None  # of what state these have what is the own of those a node before
        self.world.after(self.world.between(*WARM_S), self.process, self._wait)

    def _wait(self) -> None:
        self.attempt, self.port = 0, self.agent.cluster.new_port()
        self.say(msg.Ready(store_port=self.port, spared=self.spared))

    def say(self, message: FromHosts) -> None:
        self.world.after(0.0005, self.agent.process, self._tell, message)

    def _tell(self, message: FromHosts) -> None:
        if self.agent.host is self:  # no message may follow its end
            self.agent.loop.call(self._said, message)

    def tell(self, order: msg.Launch | msg.Stop | Apart) -> None:
        match order:
            case msg.Launch():
                self.world.go(self.process, self.start(order))
            case msg.Stop():
                self._spares = order.spare
                self.stop(order.attempt, order.grace_s)

    def start(self, order: msg.Launch) -> Steps[None]:
        cluster, world = self.agent.cluster, self.world
        yield world.now + world.between(*START_S)
        if order.attempt <= self.stop_up_to:
            self.say(msg.Ready(store_port=self.port, spared=self.spared))
            return
        self.attempt, self._spares = order.attempt, True
        cluster.oracle.sparing.starts(self, order)
        if not order.spare:
            self.forget()
        lives = {rank.local: rank.pid for rank in self.spared}
        self.pids = pids = tuple(
            lives.get(local) or cluster.new_port() for local in range(cluster.ranks_per_node)
        )
        self.spared = ()
        page = self.agent.ranks.page
        member = SimMember(self.agent, self, order, page, follower(cluster, page), world.now)
        member.lives = bool(lives)
        group = cluster.group(order)
        self.member, self.group = member, group
        self.say(msg.Started(attempt=order.attempt, pids=pids))
        yield world.now + world.between(0.02, 0.2)
        if not member.gone:
            group.join(order.rank, member)

    def stop(self, attempt: int, grace_s: float = 0.0) -> None:
        self.stop_up_to = max(self.stop_up_to, attempt)
        if self.attempt and self.attempt <= self.stop_up_to:
            hung = self.member is not None and self.member.hung
            grace_s = grace_s or self.agent.cluster.plan.settings.stop_grace_s
            seconds = grace_s if hung else self.world.between(*STOP_S)
            self.world.after(seconds, self.process, self._stopped, self.attempt)

    def _stopped(self, attempt: int) -> None:
        if self.attempt == attempt:
            self._spare()
            self._leave(loud=False)
            self._wait()

    def forget(self) -> None:
        """None of its ranks is spared."""
        self.spared, self.alive = (), frozenset()
        self.live = self.own = self.kept = None

    def _spare(self, dead: int = -1) -> None:
        """The ranks leave their step and wait, if they can; the one with this number is `dead`."""
        group, member, chance = self.group, self.member, self.world.chance
        trains = group is not None and group.phase == "training"
        able = self.agent.cluster.wanted.lives and self._spares and member is not None and not member.hung
        if group is None or member is None or not able or not (trains and group.beats or member.lives):
            self.forget()
            return
        # Those that were started anew have nothing before they train.
        self.alive = (frozenset(range(len(self.pids))) if trains else self.alive) - {dead}
        if trains:
            self.live = self.own = self.kept = Token(group.step, group.history)
            if chance.random() < TORN_SHARE:
                self.live = None
            if dead >= 0 and chance.random() < TORN_SHARE:
                self.own = None
            if chance.random() < TORN_SHARE:
                self.kept = None
        whole = self.live is not None and has_twin(self.agent.cluster.wanted.spread, group.world)
        step = self.live.step if whole and self.live is not None else -1
        self.spared = tuple(
            SparedRank(local, pid, step) for local, pid in enumerate(self.pids) if local != dead
        )

    def _leave(self, *, loud: bool) -> None:
        if self.group is not None and self.member is not None:
            self.group.leave(self.member, loud=loud)
        self.attempt = 0

    def fail(self, group: SimGroup, code: int, why: str) -> None:
        """A rank of the group fails, and the others on the node with it."""
        if self.group is not group or not self.attempt or self.member is None or self.member.gone:
            return
        attempt, place = self.attempt, self.member.order.rank
        self.agent.cluster.oracle.codes.add(code)
        self._spare(dead=0)
        self._leave(loud=True)
        error = "RuntimeError" if why else ""
        rank = place * self.agent.cluster.ranks_per_node
        failed = msg.Failed(attempt=attempt, rank=rank, exit_code=code, error=error, message=why)
        self.say(failed)
        self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def finish(self, group: SimGroup) -> None:
        """All ranks of the node end successfully."""
        if self.group is not group or not self.attempt or self.member is None or self.member.gone:
            return
        attempt, self.attempt, self.member.gone = self.attempt, 0, True
        self.member.left = True
        self.forget()
        self.say(msg.Finished(attempt=attempt))
        self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def all_ended(self, group: SimGroup) -> None:
        """All tasks of the node have ended, each for itself, some of them with an error."""
        if self.group is group and self.attempt and self.member is not None:
            self.attempt, self.member.gone = 0, True
            self.forget()
            self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def die(self, *, loud: bool) -> None:
        self.process.alive = False
        self._leave(loud=loud)

    def kill(self) -> None:
        if self.process.alive:
            self.die(loud=True)
            self.world.after(0.01, self.agent.process, self._over)

    def _over(self) -> None:
        if self.agent.host is self:
            self.agent.host = None
            self.agent.loop.call(self._ended, -9, "")

    async def end(self) -> None:
        self.die(loud=True)
        self.agent.host = None


class SimNodeRanks:
    """See `agent.io.RankAccess`. `page`: what the ranks of the newest attempt see."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent, self._world = agent, agent.world
        self.page = Page()
        self._asked: within.Cadence | None = None

    def attempt_begins(self) -> None:
        self.page, self._asked = Page(), None

    def report(self, pids: tuple[int, ...]) -> RanksSeen:
        host, record, asked, cadence = self._agent.host, self.page.record, self._asked, None
        if asked is not None:
            cadence = CadenceReport(record.number, record.decided, asked.steps, asked.seconds)
        if not pids or host is None or host.group is None or host.member is None:
            return RanksSeen([], cadence)
        return RanksSeen(host.group.reports(host.member), cadence, host.group.times(host.member))

    def wants_cadence(self, event: within.Cadence) -> None:
        self._asked = event

    def set_cadence(self, order: msg.CadenceSet) -> None:
        self.page.record.take(order.schedule, order.decided)

    def variables(self, order: msg.Launch) -> dict[str, str]:
        return {}

    async def take_stacks(self, pids: tuple[int, ...]) -> None:
        """Those that hang have not entered the collective in which the others wait."""
        await asyncio.sleep(STACKS_S)
        host = self._agent.host
        if host is None or host.member is None or host.group is None or not host.attempt:
            return
        count, step, waits = self._agent.cluster.ranks_per_node, host.group.step, not host.member.hung
        ranks = tuple(range(host.member.order.rank * count, (host.member.order.rank + 1) * count))
        flights = tuple(Entered(rank, "0", step + waits, "all_reduce", waits) for rank in ranks)
        kinds, places = (COLLECTIVE,) * count, ("",) * count
        stacks = msg.Stacks(
            attempt=host.attempt, ranks=ranks, kinds=kinds, places=places, folder="", flights=flights
        )
        self._agent.say(stacks)

    async def look(self, number: int, pids: tuple[int, ...]) -> None:
        await asyncio.sleep(LOOK_S)
        host = self._agent.host
        if host is None or host.member is None or not host.attempt:
            return
        count, place = self._agent.cluster.ranks_per_node, host.member.order.rank
        stuck = host.group is not None and host.group.stuck(host.member)
        mark = "all_reduce" if stuck else str(self._world.now)
        stands = {place * count + local: RankPlace(COLLECTIVE, mark) for local in range(count)}
        self._agent.say(msg.Looked(attempt=host.attempt, number=number, stands=stands))

    def evidence(self, code: int, failed: msg.Failed | None = None) -> dict[str, Any]:
        return {}

    def kill(self, pids: tuple[int, ...]) -> None:
        """Those of an attempt end with their host."""
        host = self._agent.host
        if host is not None and any(rank.pid in pids for rank in host.spared):
            host.forget()

    async def gone(self, pids: tuple[int, ...], limit_s: float) -> None:
        until = self._world.now + limit_s
        while self._run() and self._world.now < until:
            await asyncio.sleep(GONE_LOOK_S)

    def _run(self) -> bool:
        return self._agent.host is not None and self._agent.host.attempt > 0

    async def end(self, pids: tuple[int, ...], grace_s: float) -> None:
        if self._run():
            await asyncio.sleep(self._world.between(*STOP_S))

    async def end_strays(self, spared: tuple[int, ...]) -> bool:
        await asyncio.sleep(self._world.between(*STRAYS_S))
        return True


class SimNodeStorage:
    """See `agent.io.StorageAccess`."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent, self._disk = agent, agent.cluster.disk

    def checkpoints_at(self, event: within.CheckpointsKept) -> None: ...
    def warm(self) -> None: ...
    async def close(self) -> None: ...
    async def forget_local(self) -> None: ...

    async def write(self, order: msg.Write, loans: list[Loan], phases: Phases) -> Answer:
        lead, key, ended = order.lead, StateId(order.step, order.attempt), asyncio.Event()
        last = WritePhase.SEAL if lead else WritePhase.WRITE
        turn = msg.ContinueWrite(id=order.id, phase=WritePhase.OPEN) if lead else await phases.turns.get()
        try:
            while not await self._do(order, key, turn, phases, loans, ended) and turn.phase is not last:
                phases.reached(turn.phase)
                turn = await phases.turns.get()
            return Done(bytes=WRITTEN_BYTES)
        except DamagedImage as error:
            self._give_up(order)
            return StorageFailed(why=str(error), damaged=error.rank)
        except OSError as error:
            self._give_up(order)
            if isinstance(error, FileNotFoundError) and not lead:
                await asyncio.sleep(GIVEN_UP_S)
            return Done(bytes=WRITTEN_BYTES) if lead and self._exists(key) else StorageFailed(why=str(error))
        except asyncio.CancelledError:
            self._give_up(order)
            await asyncio.sleep(CANCEL_S)
            raise
        finally:
            ended.set()

    async def _do(
        self, order: msg.Write, key: StateId, turn: msg.ContinueWrite, phases: Phases, loans: list[Loan],
        ended: asyncio.Event,
    ) -> bool:  # fmt: skip
        """Do what this phase is; returns whether the checkpoint was there before. A storage process that hung
        does nothing any more once the write has `ended`: it was killed."""
        name, storage = self._agent.site.name, self._agent.cluster.storage

        def work() -> bool | DamagedImage:
            if ended.is_set():
                raise OSError("it was cancelled")
            if not storage.sees_checkpoints(name):
                raise OSError(f"{name} does not see the storage")
            try:
                return self._work(order, key, turn, loans)
            except DamagedImage as error:
                return error

        if turn.phase is WritePhase.WRITE:
            await self._copy(phases)
        done = await self._agent.on_disk(work, writes=True)
        if isinstance(done, DamagedImage):
            raise done
        return done

    async def _copy(self, phases: Phases) -> None:
        """Copy the node's share, and tell of it now and then."""
        left_s = self._agent.cluster.wanted.copy_s or self._agent.world.between(*COPY_S)
        while left_s > PROGRESS_S:
            await asyncio.sleep(PROGRESS_S)
            left_s -= PROGRESS_S
            phases.advanced(1)
        await asyncio.sleep(left_s)

    def _give_up(self, order: msg.Write) -> None:
        if order.lead:
            self._disk.places.pop(order.id, None)

    def _place(self, order: msg.Write) -> WritePlace:
        if order.id not in self._disk.places:
            raise FileNotFoundError("the place is gone")
        return self._disk.places[order.id]

    def _exists(self, key: StateId) -> bool:
        return any(other.step == key.step for other in self._disk.shared)

    def _work(self, order: msg.Write, key: StateId, turn: msg.ContinueWrite, loans: list[Loan]) -> bool:
        void, places = self._disk.is_void(key), self._disk.places
        match turn.phase:
            case WritePhase.OPEN:
                if void:
                    raise OSError("it was rolled back")
                if self._exists(key):
                    return True
                places.clear()
                places[order.id] = WritePlace()
            case WritePhase.ANNOUNCE:
                self._place(order).announced[order.ranks[0]] = order.ranks
            case WritePhase.SHARE_OUT:
                place = self._place(order)
                announced = sorted(rank for part in turn.parts for rank in place.announced[part])
                assert announced == [*range(order.world)], f"the images of {announced} are announced"
                place.shared_out = True
            case WritePhase.WRITE:
                assert self._place(order).shared_out, "written before it was known what"
                self._place(order).token = [self._agent.keeper.read(loan) for loan in loans][0]
                self._place(order).written.add(order.ranks[0])
            case _:
                place = self._place(order)
                assert place.written == place.announced.keys(), "a part is missing"
                if void:
                    raise OSError("it was rolled back meanwhile")
                del places[order.id]
                assert place.token is not None
                self._disk.publish(key, place.token)
        return False


class SimStandby:
    """A process that may become the next supervisor."""

    def __init__(self, agent: SimAgent) -> None:
        self.agent, self.ended = agent, False
        self._ready_at = agent.world.now + agent.world.between(*SUPERVISOR_START_S)
        self._end = asyncio.Event()

    async def begin(self, start: do.StartSupervisor) -> None:
        agent, start_s = self.agent, max(0.0, self._ready_at - self.agent.world.now)
        agent.cluster.oracle.told.takes_over(agent)
        agent.cluster.start_supervisor(agent.site, self, start_s, start.silent_s)

    def over(self) -> None:
        self.ended = True
        self.agent.loop.call(self._end.set)

    async def wait(self) -> None:
        await self._end.wait()

    async def dismiss(self) -> None:
        self.ended = True


class _WatchedDriver(Driver):
    """Checks the machine, and lets no error of the shell pass."""

    def act(self, effects: list[do.Effect]) -> None:
        if effects:
            self.machine.check()
        super().act(effects)

    def spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = True) -> asyncio.Task[None]:
        return super().spawn(work)

    def fail(self, error: BaseException) -> None:
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.failed(error)


class _WatchedAgent(Agent):
    driver_class = _WatchedDriver


class SimAgent(SimShell):
    """One agent process: a new incarnation."""

    def __init__(self, cluster: Cluster, site: SimSite) -> None:
        super().__init__(cluster, site, cluster.world.chance.uniform(0.0, 1e6))
        self.plan, self.address = cluster.plan, site.name
        nodes, key = tuple(cluster.sites), cluster.allocation
        self.hello = msg.Hello(
            node=site.name, allocation=key, address="", incarnation=f"{site.name}-{cluster.new_port()}",
            pid=1, boot_id=f"boot {site.boots}", gpus=0, attempt=0, ranks="warming", store_port=0, pids=(),
            data_port=0, refill=site.refill,
        )  # fmt: skip
        hint, share = (cluster.batch_host, cluster.batch_port), self.world.chance.random()
        self.machine = AgentMachine(cluster.plan, site.name, key, nodes, hint, share)
        self.keeper, self.storage, self.ranks = (
            SimKeeper(self, site.room),
            SimNodeStorage(self),
            SimNodeRanks(self),
        )
        self.tests = self.probing = SimNodeHealth(self)
        self.host: SimHost | None = None
        self.peer: SimPeer[msg.Order] | None = None
        self.met = False  # a supervisor, ever
        self._driver: Driver
        self._rank_said: Callable[[within.FromRanks], None]
        cluster.agents.append(self)
        self.loop.run(_WatchedAgent(self.machine, self._io).run(), self._over)

    def _io(self, driver: Driver, rank_said: Callable[[within.FromRanks], None]) -> SimAgent:
        self._driver, self._rank_said = driver, rank_said
        return self

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    def _over(self, task: asyncio.Task[None]) -> None:
        task.result()
        self.gone(loud=True)

    def gone(self, *, loud: bool) -> None:
        """The process has ended. `loud`: its node lives and closes its connections."""
        self.process.alive = self.thread.alive = False
        self.site.agent = None if self.site.agent is self else self.site.agent
        self.keeper.ended()
        if self.host is not None:
            self.host.die(loud=loud)
        if loud:
            self.cluster.network.ended(self)

    async def begin(self) -> None:
        await self.keeper.start()

    async def close(self) -> None: ...

    # ---- what comes to it

    def terminated(self) -> None:
        self.loop.call(self._driver.terminated)

    def say(self, message: msg.ToSupervisor) -> None:
        self.loop.call(self._driver.say, message)

    def rank_said(self, event: within.FromRanks) -> None:
        self.world.after(0.001, self.process, self.loop.call, self._rank_said, event)

    def hear(self, connection: SimConnection, message: Any) -> None:
        if self.peer is not None and self.peer.connection is connection:
            self.loop.call(self.peer.heard, message)

    def closed(self, connection: SimConnection) -> None:
        if self.peer is not None and self.peer.connection is connection:
            self.loop.call(self.peer.lost)

    def found(self, finding: Finding) -> None:
        self.say(msg.HealthFound(finding=finding, clock=self.site.wall))

    def happens(self, event: Callable[..., list[do.Effect]], *said: Any) -> None:
        """Something that this node was asked for is done: an event of its machine."""
        self.loop.call(lambda: self._driver.act(event(*said, self._driver.now)))

    # ---- the supervisor

    async def connect(
        self, targets: tuple[tuple[str, int], ...], limit_s: float
    ) -> SimPeer[msg.Order] | None:
        cluster, network, (host, port) = self.cluster, self.cluster.network, targets[0]
        until = self.world.now + limit_s
        while self.world.now < until:
            joined = cluster.sites[host].up and network.joins(self.site.name, host)
            supervisor = cluster.ports.get((host, port))
            answers = supervisor is not None and supervisor.process.until <= self.world.now
            if joined and supervisor is not None and supervisor.listens and answers:
                await asyncio.sleep(network.delay_s())
                supervisor = cluster.ports.get((host, port))
                if supervisor is None or not supervisor.listens:
                    return None
                return SimPeer(self, network.connect(self, supervisor))
            if joined and supervisor is None and (host, port) != cluster.batch_place:
                await asyncio.sleep(REFUSE_S)
                return None
            await asyncio.sleep(DIAL_S)
        return None

    def connected(self, channel: SimPeer[msg.Order]) -> None:
        self.peer, self.met = channel, True

    async def find(self) -> tuple[msg.Endpoint | None, int | None]:
        disk, name = self.cluster.disk, self.site.name
        try:
            return await self.on_disk(lambda: (disk.find(name), disk.attempt))
        except OSError:
            return None, None

    async def read_pulse(self) -> str | None:
        disk, name = self.cluster.disk, self.site.name
        try:
            return await self.on_disk(lambda: disk.read_pulse(name))
        except OSError:
            return None

    async def stand_by(self) -> SimStandby:
        return SimStandby(self)

    async def leave_verdict(self, order: msg.LeaveVerdict) -> None: ...

    # ---- the host

    async def start_host(
        self, said: Callable[[FromHosts], None], ended: Callable[[int, str], None], failed: background.Failed
    ) -> SimHost:
        self.host = SimHost(self, said, ended)
        return self.host

    async def unloadable(self) -> str:
        await asyncio.sleep(IMPORT_S)
        return ""
