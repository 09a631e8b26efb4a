"""A simulated node with its agent: the real `AgentMachine`, and a simulated torchrun host, keeper and
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.judges.silence import beat_every_s
from jurymast.core.judges.stacks import COLLECTIVE
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.evidence import Stand
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import CadenceReport, Endpoint, RankReport, Times, beat_of
from jurymast.sim.cluster.keeper import SimKeeper
from jurymast.sim.cluster.training import Page, SimGroup, SimMember, follower
from jurymast.sim.cluster.world import BEGINNING, Process, SimConnection, SimWrite, Steps

if TYPE_CHECKING:
    from jurymast.sim.cluster.cluster import Cluster

CONNECT_LIMIT_S = 1.5
FIND_LIMIT_S = 2.0
WARM_S, START_S, STOP_S = (0.3, 2.0), (0.02, 0.3), (0.02, 0.3)
SUPERVISOR_START_S = (0.2, 0.7)


class SimSite:
    """A node. `clock_s`: how wrong its clock is."""

    def __init__(self, cluster: Cluster, name: str, clock_s: float, room: int) -> None:
        self.cluster, self.name, self.clock_s, self.room = cluster, name, clock_s, room
        self.up = True
        self.stopped_until = 0.0
        self.processes: list[Process] = []
        self.agent: SimAgent | None = None
        self.agents = 0  # number started so far

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
        self.start_agent()

    def start_agent(self) -> None:
        """Start an agent if there is none, the job has this node, and the job continues."""
        here = self.cluster.allocated and self.cluster.sites.get(self.name) is self
        if self.up and here and self.agent is None:
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
    """A torchrun host as in `worker.elastic`: one attempt at a time, each after a message that it waits."""

    def __init__(self, agent: SimAgent) -> None:
        self.agent, self.site, self.world = agent, agent.site, agent.world
        self.process = agent.site.process()
        self.port = 0
        self.attempt = 0  # that runs
        self.stop_up_to = 0
        self.member: SimMember | None = None
        self.group: SimGroup | None = None
        self.world.after(self.world.between(*WARM_S), self.process, self._wait)

    def _wait(self) -> None:
        self.attempt, self.port = 0, self.agent.cluster.new_port()
        self.agent.host_said(msg.Ready(store_port=self.port))

    def start(self, order: msg.Launch) -> Steps[None]:
        cluster, world = self.agent.cluster, self.world
        yield world.now + world.between(*START_S)
        if order.attempt <= self.stop_up_to:
            self.agent.host_said(msg.Ready(store_port=self.port))
            return
        self.attempt = order.attempt
        pids = tuple(cluster.new_port() for _ in range(cluster.ranks_per_node))
        page = self.agent.page = Page()
        member = SimMember(self.agent, self, order, page, follower(cluster, page), world.now)
        group = cluster.group(order)
        self.member, self.group = member, group
        self.agent.host_said(msg.Started(attempt=order.attempt, pids=pids))
        yield world.now + world.between(0.02, 0.2)
        if not member.gone:
            group.join(order.rank, member)

    def stop(self, attempt: int) -> None:
        self.stop_up_to = max(self.stop_up_to, attempt)
        if self.attempt and self.attempt <= self.stop_up_to:
            hung = self.member is not None and self.member.hung
            seconds = self.agent.cluster.plan.settings.stop_grace_s if hung else self.world.between(*STOP_S)
            self.world.after(seconds, self.process, self._stopped, self.attempt)

    def _stopped(self, attempt: int) -> None:
        if self.attempt == attempt:
            self._leave(loud=False)
            self._wait()

    def _leave(self, *, loud: bool) -> None:
        if self.group is not None and self.member is not None:
            self.group.leave(self.member, loud=loud)
        self.attempt = 0

    def fail(self, group: SimGroup, code: int, why: str) -> None:
        """A rank of the group fails, and the others on the node with it."""
        if self.group is not group or not self.attempt or self.member is None or self.member.gone:
            return
        attempt, place = self.attempt, self.member.order.rank
        self._leave(loud=True)
        error = "RuntimeError" if why else ""
        rank = place * self.agent.cluster.ranks_per_node
        failed = msg.Failed(attempt=attempt, rank=rank, exit_code=code, error=error, message=why)
        self.agent.host_failed(failed)
        self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def finish(self, group: SimGroup) -> None:
        """All ranks of the node end successfully."""
        if self.group is not group or not self.attempt or self.member is None or self.member.gone:
            return
        attempt, self.attempt, self.member.gone = self.attempt, 0, True
        self.member.left = True
        self.agent.host_said(msg.Finished(attempt=attempt))
        self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def all_ended(self, group: SimGroup) -> None:
        """All tasks of the node have ended, each for itself, some of them with an error."""
        if self.group is group and self.attempt and self.member is not None:
            self.attempt, self.member.gone = 0, True
            self.world.after(self.world.between(0.02, 0.3), self.process, self._wait)

    def die(self, *, loud: bool) -> None:
        self.process.alive = False
        self._leave(loud=loud)


class SimAgent:
    """One agent process: a new incarnation."""

    def __init__(self, cluster: Cluster, site: SimSite) -> None:
        self.cluster, self.site, self.world = cluster, site, cluster.world
        self.process = site.process()
        self.incarnation = f"{site.name}-{cluster.new_port()}"
        self.data_port = cluster.new_port()
        self.clock_s = self.world.chance.uniform(0.0, 1e6)
        nodes = tuple(cluster.sites)
        hint = (cluster.batch_host, cluster.batch_port)
        key = cluster.allocation
        self.machine = AgentMachine(cluster.plan, site.name, key, nodes, hint, self.world.chance.random())
        self.keeper = SimKeeper(self, site.room)
        cluster.keepers[site.name, self.data_port] = self.keeper
        self.page = Page()
        self.host: SimHost | None = None
        self.connection: SimConnection | None = None
        self.met = False  # a supervisor, ever
        self._stands_by = self._ready = False  # a process that may become the next
        self._tries = self._beats = self._wakes = 0
        self._writes: dict[str, SimWrite] = {}  # by id
        self._carry_out(self.machine.start(self.now, reachable=True))

    @property
    def now(self) -> float:
        return self.world.now + self.clock_s

    def gone(self, *, loud: bool) -> None:
        """The process has ended. `loud`: its node lives and closes its connections."""
        self.process.alive = False
        self.site.agent = None if self.site.agent is self else self.site.agent
        self.cluster.keepers.pop((self.site.name, self.data_port), None)
        if self.host is not None:
            self.host.die(loud=loud)
        self.cluster.oracle.lost(self.keeper)
        if loud:
            self.cluster.network.ended(self)

    # ---- effects

    def _carry_out(self, effects: list[do.Effect]) -> None:
        if effects:
            self.machine.check()
        for effect in effects:
            if not self.process.alive:
                return
            self._one(effect)

    def _after(self, seconds: float, handle: Callable[[], list[do.Effect]]) -> None:
        """Let the machine handle something after a while."""
        self.world.after(seconds, self.process, lambda: self._carry_out(handle()))

    def _one(self, effect: do.Effect) -> None:
        match effect:
            case do.WakeAt():
                self._wakes += 1
                if effect.at < do.NEVER:
                    at = effect.at - self.clock_s
                    self.world.at(at, self.process, self._wake, self._wakes, effect.at)
            case do.Send():
                self._send(effect.message)
            case do.Beat():
                self._beat(effect)
            case do.Obey():
                self._obey(effect.order)
            case do.Connect():
                (host, port), *_ = effect.targets
                self.world.go(self.process, self._dial(host, port, self._tries))
            case do.FindSupervisor():
                self._find()
            case do.Greet():
                self._tries += 1
                self._greet()
            case do.HangUp():
                if self.connection is not None:
                    self.connection.close(self)
                self.connection = None
            case do.ReadPulse():
                disk, name = self.cluster.disk, self.site.name
                self.cluster.storage.do(name, self.process, lambda: disk.read_pulse(name), self._pulse)
            case do.StandBy():
                self._stands_by = True
                start_s = self.world.between(*SUPERVISOR_START_S)
                self.world.after(start_s, self.process, self._ready_to_succeed)
            case do.EndStandby():
                self._stands_by = self._ready = False
            case do.StartSupervisor():
                self.cluster.start_supervisor(self.site, self, effect.silent_s, warm=self._ready)
                self._stands_by = self._ready = False
            case do.Leave():
                self.gone(loud=True)
            case _:
                self._for_ranks(effect)

    def _for_ranks(self, effect: do.Effect) -> None:
        match effect:
            case do.StartHost():
                self.host = SimHost(self)
            case do.Prepare():
                self.keeper.launch(effect.order, self.cluster.ranks_per_node)
                seconds = self.world.between(0.0, 0.05)
                self._after(seconds, lambda: self.machine.prepared(effect.order.attempt, self.now))
            case do.StartRanks():
                if self.host is not None:
                    self.world.go(self.host.process, self.host.start(effect.order))
            case do.StopRanks():
                if self.host is not None:
                    self.host.stop(effect.attempt)
            case do.TakeStacks():
                self._after(0.3, lambda: self.machine.stacks_taken(effect.attempt, self.now))
            case do.LookAtRanks():
                self.world.after(0.05, self.process, self._looked, effect.number)
            case do.KillHost():
                self.kill_host()
            case _:
                pass

    def _ready_to_succeed(self) -> None:
        self._ready = self._stands_by

    def say(self, message: msg.ToSupervisor) -> None:
        self._carry_out(self.machine.say(message, self.now))

    def _send(self, message: Any) -> None:
        if self.connection is not None:
            self.connection.send(self, message)

    def _wake(self, number: int, at: float) -> None:
        if number == self._wakes:
            self._carry_out(self.machine.tick(max(at, self.now)))

    # ---- the supervisor

    def _dial(self, host: str, port: int, number: int) -> Steps[None]:
        """Try to reach a supervisor, unless the next try begins meanwhile."""
        world, cluster, network = self.world, self.cluster, self.cluster.network
        until = world.now + CONNECT_LIMIT_S
        while number == self._tries:
            joined = cluster.sites[host].up and network.joins(self.site.name, host)
            supervisor = cluster.ports.get((host, port))
            answers = supervisor is not None and supervisor.listens and supervisor.process.until <= world.now
            if joined and answers:
                yield world.now + network.delay_s()
                if number != self._tries or self.connection is not None:
                    return
                supervisor = cluster.ports.get((host, port))
                if supervisor is None or not supervisor.listens:
                    break
                self.connection, self.met = network.connect(self, supervisor), True
                self._carry_out(self.machine.connected(self.now))
                return
            if joined and supervisor is None and (host, port) != cluster.batch_place:
                yield world.now + 0.002
                break
            if world.now >= until:
                break
            yield world.now + 0.1
        if number == self._tries:
            self._carry_out(self.machine.unreached(self.now))

    def _find(self) -> None:
        number, answered = self._tries, [False]

        def found(seen: tuple[Endpoint | None, int] | OSError | None) -> None:
            if not answered[0] and number == self._tries:
                answered[0] = True
                place, attempt = seen if isinstance(seen, tuple) else (None, None)
                self._carry_out(self.machine.found(place, self.now, attempt=attempt))

        disk, name = self.cluster.disk, self.site.name
        self.cluster.storage.do(name, self.process, lambda: (disk.find(name), disk.attempt), found)
        self.world.after(FIND_LIMIT_S, self.process, found, None)

    def _pulse(self, value: str | OSError) -> None:
        known = None if isinstance(value, OSError) else value
        self._carry_out(self.machine.pulse(known, self.now))

    def terminated(self) -> None:
        self._carry_out(self.machine.terminated(self.now))

    def supervisor_ended(self) -> None:
        if self.process.alive:
            self._carry_out(self.machine.supervisor_ended(self.now))

    def hear(self, connection: SimConnection, message: Any) -> None:
        if connection is self.connection:
            self._carry_out(self.machine.heard(message, self.now))

    def closed(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self._carry_out(self.machine.lost(self.now))

    def _greet(self) -> None:
        ranks = self.machine.ranks
        self._send(
            msg.Hello(
                node=self.site.name, allocation=self.cluster.allocation, address=self.site.name,
                incarnation=self.incarnation, pid=1, boot_id="b", gpus=0, attempt=ranks.known,
                ranks=ranks.state, store_port=ranks.store_port, pids=ranks.pids,
                data_port=self.data_port, copies=self.keeper.machine.inventory(),
                ended=tuple(ranks.ended.values()), group_made=ranks.group_made,
            )
        )  # fmt: skip

    def _reports(self) -> list[RankReport]:
        host = self.host
        if host is None or host.group is None or host.member is None:
            return []
        return host.group.reports(host.member)

    def _times(self) -> list[Times] | None:
        host = self.host
        return host.group.times(host.member) if host and host.group and host.member else None

    def _beat(self, beat: do.Beat) -> None:
        ranks, times = (self._reports(), self._times()) if beat.pids else ([], None)
        settings, record = self.cluster.plan.settings, self.page.record
        cadence = CadenceReport(record.number, record.decided, settings.cadence_steps, None)
        self._send(beat_of(beat.attempt, ranks, cadence, times))
        self._beats += 1
        next_s = beat_every_s(settings.heartbeat_s, ranks, self.cluster.plan.active)
        self.world.after(next_s, self.process, self._beat_again, self._beats)

    def _beat_again(self, number: int) -> None:
        if number == self._beats and self.machine.link.connected:
            self._beat(self.machine.ranks.beat())

    def _obey(self, order: do.Obeyed) -> None:
        match order:
            case msg.CadenceSet():
                self.page.record.take(order.schedule, order.decided)
            case msg.Write():
                self._write(order)
            case msg.ContinueWrite():
                self._writes[order.id].go_on(order)
            case msg.CancelWrite():
                if order.id in self._writes:
                    self._writes[order.id].cancel()
                    self.world.after(0.005, self.process, self._write_ended, order.id)
            case msg.GoOn() | msg.LeaveVerdict():
                pass
            case _:
                self.keeper.obey(order)

    # ---- the host and its ranks

    def _looked(self, number: int) -> None:
        host = self.host
        if host is None or host.member is None or not host.attempt:
            return
        count, place = self.cluster.ranks_per_node, host.member.order.rank
        stuck = host.group is not None and host.group.stuck(host.member)
        mark = "all_reduce" if stuck else str(self.world.now)
        stands = {place * count + local: Stand(COLLECTIVE, mark) for local in range(count)}
        self.say(msg.Looked(attempt=host.attempt, number=number, stands=stands))

    def host_said(self, word: msg.Ready | msg.Started | msg.Finished) -> None:
        self._of_host(0.0005, lambda: self.machine.host_said(word, self.now))

    def host_failed(self, failed: msg.Failed) -> None:
        self._of_host(0.0005, lambda: self.machine.rank_failed(failed, {}, self.now))

    def kill_host(self) -> None:
        if self.host is not None and self.host.process.alive:
            self.host.die(loud=True)
            self._of_host(0.01, self._host_ended)

    def _host_ended(self) -> list[do.Effect]:
        self.host = None
        return self.machine.host_ended(-9, {}, self.now)

    def _of_host(self, seconds: float, handle: Callable[[], list[do.Effect]]) -> None:
        """As `_after`, unless another host has taken the place of this one by then."""
        host = self.host
        self._after(seconds, lambda: handle() if host is self.host else [])

    def rank_said(self, event: within.ForSupervisor) -> None:
        self._after(0.001, lambda: self.machine.rank_said(event, self.now))

    # ---- writes to storage

    def _write(self, order: msg.Write) -> None:
        key = StateId(order.step, order.attempt)
        lent = [image for rank in order.ranks if (image := self.keeper.lend(key, rank)) is not None]
        if len(lent) < len(order.ranks):
            for image in [image for image in self.keeper.held if image.key == key and image.corrupt]:
                self.keeper.doubt(image)  # the writer reads it
            self._written(order, "an image is no longer here")
            return

        def reached(phase: msg.WritePhase) -> None:
            self._carry_out(self.machine.write_reached(order.id, phase, self.now))

        def over(why: str) -> None:
            self._written(order, why)

        self._writes[order.id] = SimWrite(self, order, lent[0].token, reached, over)

    def _written(self, order: msg.Write, why: str) -> None:
        size = 0 if why else 100
        self.say(msg.Written(id=order.id, tier=order.tier, ok=not why, size_bytes=size, why=why))
        self._write_ended(order.id)

    def _write_ended(self, id: str) -> None:
        self._writes.pop(id, None)
        self._carry_out(self.machine.write_ended(id, self.now))
