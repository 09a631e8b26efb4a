"""The simulated cluster: its nodes, and the effects of the faults of a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.settings import Budget, RunPlan, Settings
from jurymast.core.supervision import batch
from jurymast.core.supervision.ahead import Reservation
from jurymast.core.supervision.batch import SUPERSEDED
from jurymast.core.supervision.machine import STILL_RUNNING
from jurymast.sim.cluster import caught, health
from jurymast.sim.cluster.agent import SUPERVISOR_START_S, SimAgent, SimSite, SimStandby
from jurymast.sim.cluster.keeper import SimKeeper
from jurymast.sim.cluster.members import IDLE_S, TeamPool
from jurymast.sim.cluster.oracle import ATTEMPTS_WITHOUT_STEP, STANDSTILL_S, Oracle, Violation
from jurymast.sim.cluster.plans import AFTER_S, Fault, Plan, how_caught, smaller
from jurymast.sim.cluster.refill import HOLD_S, OtherNodes
from jurymast.sim.cluster.supervisor import SimSupervisor
from jurymast.sim.cluster.tasks import SimTasks
from jurymast.sim.cluster.training import SimGroup
from jurymast.sim.cluster.world import BEGINNING, RunDisk, SimNetwork, Storage, Token, World

BATCH_LOOK_S = 0.5
TESTS_S = 6.0
RAISED = 3  # the exit code
LOOK_S = 1.0
JUMP_S = 400.0
FLAP_S = 0.2, 3.0
# After a SIGTERM, and from a requeue to the job's next life.
KILL_WAIT_S, QUEUE_S = 30.0, (1.0, 3.0)
WATCHED_LIVES = 3
TERM_SAVES_S = 8.0
STEP_ENDS_S = 0.0, 0.3


@dataclass(frozen=True)
class Result:
    """The result of a plan. `rule`: the broken rule, or "", and `how` it was broken; `lives`: of the job, one
    more than its requeues."""

    plan: Plan
    rule: str
    how: str
    seconds: float  # simulated time
    events: int
    steps: int
    restores: tuple[str, ...]
    state: str  # the run's, as people see it
    lives: int

    @property
    def broken(self) -> str:
        return f"{self.rule}: {self.how}" if self.rule else ""


class Cluster:
    """`restarts`: how often the job was requeued; between its lives nothing is `allocated`. `ending`: why
    Slurm ends it, or ""."""

    def __init__(self, wanted: Plan) -> None:
        self.wanted = wanted
        self.world = World(wanted.seed)
        chance = self.world.chance
        self.ranks_per_node = wanted.ranks
        kinds = {fault.kind for fault in wanted.faults}
        settings = Settings(
            cadence_steps=wanted.cadence_steps, max_loss_s=4.0, join_limit_s=30.0, start_limit_s=20.0,
            preflight_s=TESTS_S * wanted.tests, shared_every_s=chance.choice((None, 10.0)),
            application=Budget(count=1 if "raises" in kinds else None),
            infrastructure=Budget(count=2 if "raises" in kinds else None),
            attempts_without_step=ATTEMPTS_WITHOUT_STEP, refill=wanted.pool is not None, hold_s=HOLD_S,
            renews=wanted.renews, nodes_min=wanted.least,
            pool_directory="/pool", pool_nodes=wanted.members, pool_idle_s=IDLE_S,
        )  # fmt: skip
        self.plan = RunPlan(
            run="r", name="r", directory="/run", cluster="slurm", active=wanted.active,
            spares=wanted.spares, ranks_per_node=wanted.ranks, script="x", settings=settings,
            tasks=wanted.tasks, guessed=wanted.tasks,
            kill_on_bad_exit=wanted.kill_on_bad_exit,
            submitted_at=BEGINNING if wanted.seed % 3 else 0.0,  # of an old run less is journalled
        )  # fmt: skip
        self.network = SimNetwork(self.world)
        self.storage = Storage(self.world)
        self.disk = RunDisk(self.storage, self.plan)
        self.oracle = Oracle(self)
        self.draining: dict[str, str] = {}  # nodes that an administrator drains, and why
        self.reserved: dict[str, Reservation] = {}  # those that somebody makes, by name
        self.others = OtherNodes(self, wanted.pool or 0)
        self.without = set[str]()  # nodes that Slurm has again
        self.team = TeamPool(self, wanted.members)
        self.step_s = chance.uniform(0.1, 0.4)
        self.allocated, self.ending, self.restarts = True, "", 0
        self.has_step = True  # that of the agents
        self.accounts = wanted.seed % 2 == 0  # whether Slurm keeps some
        self.ended_as = ""  # the life before, as they say
        self._until = wanted.seconds
        self._port, self._nodes = 1000, 0
        self.ports: dict[tuple[str, int], SimSupervisor] = {}
        self._supervisors: list[SimSupervisor] = []  # also those that have ended: see `SimLoop`
        self.agents: list[SimAgent] = []  # likewise
        self.keepers: dict[tuple[str, int], SimKeeper] = {}
        self.tokens: dict[bytes, Token] = {}  # by the bytes that stand for one in an image
        self.groups: dict[tuple[int, str, int], SimGroup] = {}
        self.sites = dict(self._new_site() for _ in range(wanted.nodes))
        self._start_job()
        self._waiting: list[Fault] = []  # for a phase
        self.stalled_until = -math.inf  # a supervisor's process
        self.slurm_silent_until = self._kill_at = self._breaks_until = 0.0
        self._breaks_at, self._turns = 0, itertools.count()  # the step, and how the ranks end there
        self._half_told: tuple[type[msg.ToAgent], int] | None = None  # dies after so many orders of this kind
        uneven = [fault.node % 2 for fault in wanted.faults if fault.kind == "uneven"]
        self.slow_place = uneven[0] * (wanted.active - 1) if uneven else None
        self.timed = wanted.seed % 4 == 0 or not kinds.isdisjoint(("uneven", health.SLOW))
        self.meeting: dict[str, tuple[health.SimNodeHealth, int]] = {}  # who waits for the other of a pair
        for fault in wanted.faults:
            if fault.kind == "fails tests":
                how = health.TESTS[(fault.node + fault.other) % len(health.TESTS)]
                site = [*self.sites.values()][fault.node]
                self.oracle.calm.struck(fault, site.name)
                self.oracle.health.falls_ill(site, how)
        for fault in wanted.faults:
            self.world.at(fault.at, None, self._waiting.append if fault.when else self._strike, fault)
        self.world.after(LOOK_S, None, self._look)

    @property
    def allocation(self) -> str:
        return f"7.{self.restarts}"

    def run(self) -> None:
        """Run the plan. Raises Violation."""
        try:
            while self.world.now < self._until and not self.world.over:
                self.world.run(self._until)
            if not self.world.over:
                self.oracle.at_the_end()
        finally:
            self.world.close()
            for agent in self.agents:
                agent.keeper.ended()

    def _new_site(self) -> tuple[str, SimSite]:
        self._nodes += 1
        name = f"n{self._nodes}"
        return name, SimSite(self, name, self.world.chance.uniform(-2.0, 2.0), self.wanted.room)

    def add_site(self, refill: int) -> SimSite:
        """Start small job `refill` on another node."""
        site = self.new_site()
        self.take_in(site, refill)
        self.world.after(self.world.between(0.1, 1.5), None, site.start_agent)
        return site

    def new_site(self) -> SimSite:
        """Another node, which the run does not have yet."""
        return self._new_site()[1]

    def take_in(self, site: SimSite, refill: int) -> None:
        """The node is the run's, by small job `refill`."""
        self.sites[site.name], site.refill = site, refill

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def _look(self) -> None:
        self.oracle.look()
        self.world.after(LOOK_S, None, self._look)

    # ---- what happens in it

    def _start_job(self) -> None:
        self.began_at, self.has_step = BEGINNING + self.world.now, True
        self.batch_host, self.batch_port = next(iter(self.sites)), self.new_port()
        self.batch_place = self.batch_host, self.batch_port
        self.batch, self.batch_process = batch.Batch(), self.sites[self.batch_host].process()
        self._of_batch(self.batch.begin(self.world.now))
        for site in self.sites.values():
            self.world.after(self.world.between(0.1, 1.5), None, site.start_agent)

    def start_supervisor(
        self, site: SimSite, takeover: SimStandby | None, start_s: float, silent_s: float = 0.0
    ) -> None:
        """Start a supervisor, whose process begins after `start_s`. `silent_s`: for how long nobody has heard
        the previous one."""
        if site.up and self.allocated:
            supervisor = SimSupervisor(self, site, takeover, silent_s)
            self._supervisors.append(supervisor)
            self.world.after(start_s, supervisor.process, supervisor.begin)

    def supervisor_ended(self, supervisor: SimSupervisor) -> None:
        """A supervisor has ended without ending the job."""
        if supervisor.takeover is not None:
            self.world.after(0.05, supervisor.takeover.agent.process, supervisor.takeover.over)
        elif supervisor.allocation == self.allocation:
            code = SUPERSEDED if supervisor.superseded else 1
            self._of_batch(self.batch.on_supervisor_ended(code, None, self.world.now))

    def _of_batch(self, effects: list[batch.Effect]) -> None:
        """Carry out those effects of the batch process that matter here: Slurm ends the job, and agents start
        late."""
        for effect in effects:
            if isinstance(effect, batch.StartSupervisor):
                start_s = self.world.between(*SUPERVISOR_START_S)
                self.start_supervisor(self.sites[self.batch_host], None, start_s)
        if not self.batch.supervised and not self.batch.over:
            self.world.after(BATCH_LOOK_S, self.batch_process, self._look_of_batch, self.allocation)

    def _look_of_batch(self, allocation: str) -> None:
        if allocation == self.allocation and self.allocated:
            self._of_batch(self.batch.on_time(None, self.world.now, agents=self.has_step))

    def job_over(self, supervisor: SimSupervisor) -> None:
        self.oracle.ends(supervisor)
        self._end_job(again=supervisor.machine.departure.requeues, without=supervisor.state.excluded)

    def _end_job(self, *, again: bool, without: Collection[str] = ()) -> None:
        """Slurm kills the whole job. `again`: and starts it once more, on other nodes for those that are
        excluded or gone."""
        self.others.end_all()
        for site in self.sites.values():
            site.end_job()
        for supervisor in self.ports.values():
            supervisor.listens = False
        self.ports.clear()
        self.ended_as = self.ending if self.accounts else ""
        self.allocated, self.ending = False, ""
        if again:
            if self.restarts < WATCHED_LIVES:
                self._until = max(self._until, self.world.now + AFTER_S)
            self.world.after(self.world.between(*QUEUE_S), None, self._requeued, without)
        else:
            self.world.over = True

    def _requeued(self, without: Collection[str]) -> None:
        fit = {name for name, site in self.sites.items() if site.usable and name not in without}
        kept = [*self.sites.items()][: self.wanted.nodes]
        self.sites = dict((name, site) if name in fit else self._new_site() for name, site in kept)
        self.allocated, self.restarts = True, self.restarts + 1
        self.oracle.allocated()
        self._start_job()

    def group(self, order: msg.Launch) -> SimGroup:
        name = (order.attempt, order.master_address, order.master_port)
        if name not in self.groups:
            self.groups[name] = (
                SimTasks(self, order, name) if self.wanted.tasks else SimGroup(self, order, name)
            )
        return self.groups[name]

    @property
    def tasks(self) -> list[SimTasks]:
        return [group for group in self.groups.values() if isinstance(group, SimTasks)]

    # ---- faults

    def in_phase(self, phase: str) -> None:
        for fault in [fault for fault in self._waiting if fault.when == phase]:
            self._waiting.remove(fault)
            after_s = self.world.between(0.0, 0.5)
            self._until = max(self._until, self.world.now + after_s + fault.seconds + AFTER_S)
            self.world.after(after_s, None, self._strike, fault)

    def why_ending(self) -> str:
        """Return why the job ends, as Slurm says, if it does."""
        return "unknown" if self.world.now < self.slurm_silent_until else self.ending or STILL_RUNNING

    @property
    def kill_in_s(self) -> float | None:
        """When Slurm kills the job, as it says, in seconds from now."""
        return self._kill_at - self.world.now if self.ending else None

    @property
    def ends_in_s(self) -> float | None:
        """When Slurm ends the job for its time limit, as it says, in seconds from now."""
        if self.world.now < self.slurm_silent_until:
            return None
        if self.wanted.renews and self.restarts:
            return math.inf
        limits = [one.at for one in self.wanted.faults if one.kind == "timeout" and not one.when]
        return min((at - self.world.now for at in limits if at >= self.world.now), default=math.inf)

    def _strike(self, fault: Fault) -> None:
        site, other = [*self.sites.values()][fault.node], [*self.sites.values()][fault.other]
        now, until = self.world.now, self.world.now + fault.seconds
        touch = self.oracle.touch
        self.oracle.calm.struck(fault, site.name, other.name)
        match fault.kind:
            case "power":
                touch(site.name, until if fault.seconds else 1e9)
                self._power(site, fault.seconds)
            case "agent":
                touch(site.name, until if fault.seconds else 1e9)
                if site.agent is not None:
                    site.agent.gone(loud=True)
                if fault.seconds:
                    self.world.after(fault.seconds, None, site.start_agent)
            case "freeze":
                touch(site.name, until)
                site.freeze(fault.seconds)
            case "isolate":
                self._isolate(site, until)
            case "flaps":
                self._flap(site, until)
            case "agent stops":
                touch(site.name, until)
                if site.agent is not None:
                    site.agent.process.stop_until(until)
            case "long journal":
                self.disk.reading_s = max(fault.seconds, self.disk.reading_s)
            case "slurm silent":
                self.slurm_silent_until = max(until, self.slurm_silent_until)
            case "cut":
                touch(self.oracle.pair(site.name, other.name), until)
                self.network.cut(site.name, other.name, until)
            case "snap" | "half":
                touch(site.name, now)
                if site.agent is not None and site.agent.peer is not None:
                    site.agent.peer.connection.snap(half=fault.kind == "half")
            case "clock":
                site.clock_s += self.world.chance.uniform(-JUMP_S, JUMP_S)
            case "half told":
                told = 1 + fault.other % max(1, self.wanted.active - 1)
                self._half_told = (msg.Stop if fault.node % 2 else msg.Launch), told
                self._ask(msg.Ask(what="restart", by="you"))
            case "admin drains" | "reserved":
                self._administer(fault.kind, site, other, until)
            case "drained" | "restart" | "save" | "given up":
                self._request(fault.kind, site)
            case "supervisor" | "stall" | "warning" | "signal" | "rollback":
                self._strike_supervisor(fault)
            case "timeout" if self.wanted.renews and self.restarts:
                pass  # it was the limit of an earlier life of the job
            case "preempted" | "cancelled" | "timeout" | "grace":
                self._terminate("preempted" if fault.kind == "grace" else fault.kind, fault.seconds)
            case "killed":
                self._kill_at_once()
            case "step ends":
                self._end_step()
            case "signal all":
                self._signal_all()
            case "caught":
                self._catch(how_caught(fault), fault.seconds)
            case "rank" | "raises" | "hang" | "stopped" | "host" | "corrupt":
                self._strike_ranks(fault, site)
            case "breaks":
                self._breaks_until = max(until, self._breaks_until)
            case health.LOST | health.DOUBTFUL | health.SLOW | "stray finding" | "uneven" | "fails tests":
                self._strike_health(fault, site)
            case _:
                self._strike_storage(fault, site)

    def _strike_health(self, fault: Fault, site: SimSite) -> None:
        """The others are there from the beginning."""
        if fault.kind == "stray finding":
            health.tell(site, health.STRAY[fault.other % len(health.STRAY)])
        elif fault.kind not in ("uneven", "fails tests"):
            self.oracle.health.falls_ill(site, fault.kind)

    def _request(self, kind: str, site: SimSite) -> None:
        """Somebody asks the supervisor for something."""
        if kind == "drained":
            self.oracle.touch(site.name, 1e9)
        what = {"drained": "drain", "given up": "cancel"}.get(kind, kind)
        self._ask(msg.Ask(what=what, by="you", node=site.name if kind == "drained" else ""))

    def _administer(self, kind: str, site: SimSite, other: SimSite, until: float) -> None:
        if kind == "reserved":
            self._reserve([site.name] if site is not other else [*self.sites], until)
        else:
            self._drain(site, until)

    def _drain(self, site: SimSite, until: float) -> None:
        """An administrator drains the node in Slurm, for a while."""
        self.oracle.touch(site.name, 1e9)
        self.draining[site.name] = "maintenance"
        self.world.at(until, None, self.draining.pop, site.name, None)

    def _reserve(self, nodes: list[str], starts_at: float) -> None:
        """Somebody reserves nodes from then on: Slurm lets a job that has them go on."""
        now, name = self.world.now, f"r{len(self.reserved) + 1}"
        self.reserved[name] = made = Reservation(name, tuple(nodes), starts_at, maintenance=True)
        self.world.at(starts_at, None, self.oracle.begins, made, starts_at - now)

    def reservations(self, nodes: Collection[str]) -> list[Reservation]:
        return [
            replace(one, nodes=mine)
            for one in self.reserved.values()
            if (mine := tuple(name for name in one.nodes if name in nodes))
        ]

    def _isolate(self, site: SimSite, until: float) -> None:
        self.oracle.touch(site.name, until)
        for name in self.sites:
            if name != site.name:
                self.oracle.touch(self.oracle.pair(name, site.name), until)
                self.network.cut(name, site.name, until)

    def _flap(self, site: SimSite, until: float) -> None:
        if self.world.now < until:
            down_until = min(until, self.world.now + self.world.between(*FLAP_S))
            self._isolate(site, down_until)
            self.world.at(down_until + self.world.between(*FLAP_S), None, self._flap, site, until)

    def _ask(self, ask: msg.Ask) -> None:
        supervisor = self.oracle.supervisor
        if supervisor is not None and supervisor.process.alive:
            self.world.after(0.0, supervisor.process, self._asked, supervisor, ask)

    def _asked(self, supervisor: SimSupervisor, ask: msg.Ask) -> None:
        self.oracle.given_up |= ask.what == "cancel"
        supervisor.ask(ask)

    def _power(self, site: SimSite, seconds: float) -> None:
        if not site.up:
            return
        ended = [one for one in self.ports.values() if one.site is site]
        site.die()
        for supervisor in ended:
            del self.ports[site.name, supervisor.port]
            supervisor.listens = False
        if seconds:
            self.world.after(max(5.0, seconds), None, site.boot)

    def _terminate(self, why: str, grace_s: float = 0.0) -> None:
        if not self.allocated or self.ending:
            return
        self.ending, self._kill_at = why, self.world.now + grace_s + KILL_WAIT_S
        self.oracle.ordered()
        self._signal_all()
        self._until = max(self._until, self._kill_at + AFTER_S)
        if grace_s:
            self.world.after(grace_s, None, self._hurry, self.allocation)
        self.world.at(self._kill_at, None, self._kill, self.allocation)

    def _kill_at_once(self) -> None:
        """Preempt the job without a signal, or a word to anybody: all its processes die."""
        if self.allocated and not self.ending:
            self.ending = "preempted"
            self._end_job(again=True)

    def _end_step(self) -> None:
        """Slurm kills all agents and what they have started, and says so to the batch process."""
        if not (self.allocated and self.has_step):
            return
        self.has_step = False
        self.oracle.step_ends()
        for site in self.sites.values():
            if site.agent is not None and not site.refill:
                self.oracle.touch(site.name, 1e9)
                self.world.after(self.world.between(*STEP_ENDS_S), None, partial(site.agent.gone, loud=True))
        for supervisor in self.ports.values():
            if supervisor.takeover is not None and not supervisor.site.refill:
                self.world.after(self.world.between(*STEP_ENDS_S), None, supervisor.end)
        self._until = max(self._until, self.world.now + STANDSTILL_S + AFTER_S)
        self.world.after(BATCH_LOOK_S, self.batch_process, self._tell_step_end, self.allocation)

    def _tell_step_end(self, allocation: str) -> None:
        """The batch process tells the supervisor, unless Slurm ends the job as well, until it is accepted."""
        if allocation != self.allocation or not self.allocated:
            return
        why, supervisor = self.why_ending(), self.oracle.supervisor
        if why not in (STILL_RUNNING, "unknown"):
            return
        if why == STILL_RUNNING and supervisor is not None and supervisor.process.alive:
            self.world.after(0.0, supervisor.process, self._ask_step_end, supervisor)
        self.world.after(BATCH_LOOK_S, self.batch_process, self._tell_step_end, allocation)

    def _ask_step_end(self, supervisor: SimSupervisor) -> None:
        supervisor.ask(msg.Ask(what=ev.STEP_ENDED, by="you"))

    def _hurry(self, allocation: str) -> None:
        if allocation == self.allocation and self.allocated:
            self._signal_all()

    def _signal_all(self) -> None:
        for supervisor in self.ports.values():
            self.world.after(0.0, supervisor.process, supervisor.signalled, True)
        for site in self.sites.values():
            if site.agent is not None:
                self.world.after(self.world.between(0.0, 0.2), site.agent.process, site.agent.terminated)
        if self.wanted.at_term:
            self._catch(self.wanted.at_term, TERM_SAVES_S, told=False)

    def _catch(self, how: str, seconds: float, *, told: bool = True) -> None:
        """All ranks get a signal that they catch, but for those of tasks."""
        for group in [*self.groups.values()] if not self.wanted.tasks else []:
            caught.catch(group, how, seconds, told=told)

    def _kill(self, allocation: str) -> None:
        if allocation == self.allocation and self.allocated:
            self.oracle.killed()
            self._end_job(again=self.ending == "preempted")

    def dies_before(self, order: msg.ToAgent) -> bool:
        """Whether the supervisor dies before it sends this order: see "half told"."""
        kind, left = self._half_told or (msg.Leave, 0)
        if self._half_told is None or not isinstance(order, kind):
            return False
        self._half_told = (kind, left - 1) if left else None
        if not left:  # what is missing shows later
            self._until = max(self._until, self.world.now + STANDSTILL_S + AFTER_S)
        return not left

    def _roll_back(self, supervisor: SimSupervisor) -> None:
        """Roll back to the second newest checkpoint, if there is one: on storage first, then by asking the
        supervisor. One that has taken over by then has seen it on storage."""
        steps = sorted(step for step, _ in self.disk.shared)
        if len(steps) > 1 and supervisor.listens:
            back = self.disk.roll_back(steps[-2])
            self.oracle.rolled_back(back)
            self.world.after(0.0, supervisor.process, self._ask_to_go_back, supervisor, back)

    def _ask_to_go_back(self, supervisor: SimSupervisor, back: Rollback) -> None:
        if supervisor.ask(msg.Ask(what="rollback", by="you", step=back.step)):
            self.oracle.ordered_back(back)

    def _strike_supervisor(self, fault: Fault) -> None:
        supervisor = self.oracle.supervisor
        if supervisor is None or not supervisor.process.alive:
            return
        match fault.kind:
            case "supervisor":
                supervisor.end()
            case "stall":
                self.stalled_until = self.world.now + fault.seconds
                supervisor.process.stop_until(self.stalled_until)
                supervisor.thread.stop_until(self.stalled_until)
            case "rollback":
                self._roll_back(supervisor)
            case signal:
                self.world.after(0.0, supervisor.process, supervisor.signalled, signal == "signal")

    def _strike_ranks(self, fault: Fault, site: SimSite) -> None:
        agent = site.agent
        host = agent.host if agent is not None else None
        if agent is None or host is None:
            return
        match fault.kind:
            case "rank":
                if host.group is not None and host.member is not None:
                    host.group.kill(host.member)
            case "raises":
                if host.group is not None and host.group.phase == "training" and not self.wanted.tasks:
                    host.fail(host.group, RAISED, "it raises")
            case "hang" | "stopped":
                if host.member is not None and host.group is not None and host.group.phase == "training":
                    host.member.hung = True
                    host.member.stopped_at = self.world.now if fault.kind == "stopped" else 0.0
            case "host":
                host.kill()
                self.oracle.codes.add(-9)  # its ranks end with it
            case _:
                if agent.keeper.held:
                    self.world.chance.choice(agent.keeper.held).flip()

    def breaks(self, group: SimGroup) -> bool:
        """Break the ranks of this group if they are about to do the step that they never get beyond."""
        if self.world.now >= self._breaks_until:
            return False
        self._breaks_at = self._breaks_at or group.step + 1
        if group.step + 1 < self._breaks_at:
            return False
        member, turn = group.members[0], next(self._turns) % 4
        if turn % 2 and group.beats:
            member.hung = True
        else:
            member.host.fail(group, *((-9, "") if turn in (0, 3) else (1, "it breaks")))
        return True

    def _strike_storage(self, fault: Fault, site: SimSite) -> None:
        until, faults = self.world.now + fault.seconds, self.storage.faults
        if fault.kind in ("storage hangs", "storage full", "storage slow"):
            self.oracle.storage_touched = max(self.oracle.storage_touched, until)
            faults[fault.kind, ""] = max(faults.get((fault.kind, ""), 0.0), until)
            return
        if fault.kind not in ("stale handles", "storage hangs here", "old view", "unmounted"):
            raise ValueError(f"there is no fault {fault.kind!r}")
        self.oracle.touch(site.name, until)
        self.oracle.unwritable_until = max(self.oracle.unwritable_until, until)
        faults[fault.kind, site.name] = until
        if fault.kind == "old view":
            self.storage.old_s[site.name] = self.world.chance.uniform(2.0, 40.0)


def run(plan: Plan) -> Result:
    """Return the result of a plan. An error of a machine is a broken rule as well."""
    rule = how = ""
    cluster = Cluster(plan)
    try:
        cluster.run()
    except Violation as error:
        rule, how = error.args
    except Exception as error:
        rule = "0: a machine failed"
        how = f"{type(error).__name__}: {error} (at {cluster.world.now:.3f} s)"
    oracle = cluster.oracle
    state = oracle.supervisor.state.public_state if oracle.supervisor is not None else ""
    restores = tuple(oracle.restores_from)
    return Result(
        plan, rule, how, cluster.world.now, cluster.world.events, oracle.steps, restores, state,
        cluster.restarts + 1,
    )  # fmt: skip


def smallest(result: Result) -> Result:
    """Return the result of the shortest plan that breaks the same rule, by leaving out faults."""
    for plan in smaller(result.plan):
        tried = run(plan)
        if tried.rule == result.rule:
            return smallest(tried)
    return result
