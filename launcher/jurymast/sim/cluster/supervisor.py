"""The simulated process of a supervisor: the real `supervisor.supervise`, and its world: files, connections,
Slurm and signals, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from jurymast import background
from jurymast.cluster.control import Ending
from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.run import ends
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Instruction
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import Phase, RunState
from jurymast.core.supervision.ahead import Reservation
from jurymast.core.supervision.machine import Supervision
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import ClusterUnavailableError, RunDirectoryError
from jurymast.journal import FLUSH_LIMIT_S, TRY_EVERY_S
from jurymast.sim.cluster.loop import SimPeer, SimShell
from jurymast.sim.cluster.members import SimPoolAccess
from jurymast.sim.cluster.world import Item, SimConnection, Steps
from jurymast.supervisor.claiming import Taking
from jurymast.supervisor.io import Accept, Io, Journal
from jurymast.supervisor.supervisor import Hold, Supervisor, supervise

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite, SimStandby
    from jurymast.sim.cluster.cluster import Cluster

T = TypeVar("T")

GATHER_S = 0.01
# What Slurm takes for an answer, and to release a node.
ANSWER_S, RELEASE_S = 0.2, 1.0


class SimJournal:
    """The journal, written in a thread: lines that were not on the disk when the process died are lost."""

    def __init__(self, supervisor: SimSupervisor, items: list[Item]) -> None:
        self._supervisor, self._items = supervisor, items
        self._unwritten: list[Item] = []
        self.appended = self.written = 0
        self._writing = False
        self.error: OSError | None = None
        self._waits = 0
        self._flushed: Callable[[], None] | None = None

    def event(self, event: ev.Event) -> None:
        self._add(event)

    def decision(self, t: float, instruction: Instruction) -> None:
        self._add((t, instruction))

    def _add(self, item: Item) -> None:
        self.appended += 1
        self._unwritten.append(item)
        if not self._writing:
            self._writing = True
            self._supervisor.world.go(self._supervisor.thread, self._write())

    def close(self) -> None: ...

    def flush(self, then: Callable[[], None]) -> bool:
        """Return whether everything is on the disk. Otherwise the process stands still until it is, or that
        took too long, and then goes on with `then`."""
        if not self._unwritten:
            return True
        self._flushed = then
        world, process = self._supervisor.world, self._supervisor.process
        self._waits += 1
        world.at(world.now + FLUSH_LIMIT_S, process, self._enough, self._waits, first=True)
        process.stop_until(world.now + FLUSH_LIMIT_S)
        return False

    def _enough(self, number: int) -> None:
        if number == self._waits and self._flushed is not None:
            then, self._flushed = self._flushed, None
            self._supervisor.loop.call(then)

    def _write(self) -> Steps[None]:
        supervisor, world = self._supervisor, self._supervisor.world
        yield world.now + GATHER_S
        while self._unwritten:
            batch = list(self._unwritten)
            write, storage = partial(self._items.extend, batch), supervisor.cluster.storage
            self.error = yield from storage.work(supervisor.site.name, write, writes=not supervisor.has_room)
            if self.error is None:
                del self._unwritten[: len(batch)]
                self.written += len(batch)
            if self.error is not None or not self._unwritten:
                self._tried()
            if self.error is not None:
                yield world.now + TRY_EVERY_S
        self._writing = False

    def _tried(self) -> None:
        """Nobody waits for the disk any longer."""
        if self._flushed is not None:
            self._supervisor.unblock()
            world = self._supervisor.world
            world.at(world.now, self._supervisor.process, self._enough, self._waits, first=True)


class _Operator:
    """Somebody who asks, and reads the `answer`."""

    def __init__(self, answered: Callable[[msgspec.Struct], None]) -> None:
        self._answered = answered

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self._answered(message)


class SimFiles:
    """The run directory, as the node of a supervisor sees it."""

    root, attempt_file = "/run", "/run/attempt"

    def __init__(self, supervisor: SimSupervisor) -> None:
        self._supervisor = supervisor
        self._disk, self._name = supervisor.cluster.disk, supervisor.site.name

    def newest_epoch(self) -> int:
        return self._disk.newest_epoch(self._name)

    def pulse(self, epoch: int, count: int) -> None:
        self._disk.pulse(epoch, count)

    def newest_attempt(self) -> int:
        return self._disk.attempt

    def save_attempt(self, attempt: int) -> None:
        self._disk.storage.check_room()
        self._supervisor.acts_for_good()
        self._disk.attempt = attempt

    def checkpoints(self, state: RunState) -> tuple[dict[StateId, int], Sequence[Rollback]]:
        return dict.fromkeys(self._disk.shared, 100), [*self._disk.rollbacks]


class _Watched(Supervisor):
    """Tells the oracle what is decided, and checks the machine."""

    def __init__(self, io: Io, state: RunState, journal: Journal, hold: Hold) -> None:
        assert isinstance(io, SimSupervisor)
        self._sim = io
        super().__init__(io, state, journal, hold)
        io.shell = self

    def _do(self, effects: Sequence[do.Effect]) -> None:
        if effects:  # an event without effects has hardly changed anything
            self.machine.check()
        super()._do(effects)

    def _carry_out(self, effect: do.Effect) -> None:
        if self._sim.process.alive:
            self._sim.world.happens(effect)
            super()._carry_out(effect)
            if isinstance(effect, do.Journal):
                self._sim.cluster.oracle.recorded(self._sim, effect)


class SimSupervisor(SimShell):
    """One process. `takeover`: what stood by for it; otherwise the batch process started it. Nobody had heard
    the previous one for `silent_s`."""

    def __init__(self, cluster: Cluster, site: SimSite, takeover: SimStandby | None, silent_s: float) -> None:
        super().__init__(cluster, site)
        self.takeover = takeover
        self.port = cluster.batch_port if takeover is None else cluster.new_port()
        self.node, self.allocation = site.name, cluster.allocation
        self.files = SimFiles(self)
        self.listens = self.has_room = False  # on a full disk
        self._taking = Taking()
        self.epoch = 0
        self.shell: Supervisor
        self._peers: dict[SimConnection, SimPeer[msg.Said]] = {}
        self._silent_since = self.world.now - silent_s
        self._accept: Accept
        self._warned: Callable[[], None]
        self._terminated: Callable[[], None]

    @property
    def state(self) -> RunState:
        return self.shell.state

    @property
    def machine(self) -> Supervision:
        return self.shell.machine

    @property
    def now(self) -> float:
        """The time by the supervisor's clock."""
        return self.shell.now()

    def unblock(self) -> None:
        """Continue after waiting for the disk."""
        self.process.until = max(self.site.stopped_until, min(self.process.until, self.world.now))
        self.world.wake(self.process)

    # ---- the beginning

    def begin(self) -> None:
        self.loop.run(supervise(self, _Watched), self._over)

    def wall(self) -> float:
        return self.site.wall

    async def claim(self) -> int:
        self.epoch = await self.on_disk(lambda: self.cluster.disk.claim(self.site.name), writes=True)
        return self.epoch

    async def replayed(self) -> RunState:
        await asyncio.sleep(self.cluster.disk.reading_s)
        return await self.on_disk(self.cluster.disk.replay)

    def journal(self, epoch: int) -> SimJournal:
        return SimJournal(self, self.cluster.disk.journal[epoch])

    def first_events(self, t: float) -> Sequence[ev.Event]:
        plan = self.cluster.plan
        return [
            ev.RunStarted(
                t=t, run=plan.run, name=plan.name, active=plan.active, spares=plan.spares,
                ranks_per_node=plan.ranks_per_node, script="x", submitted_at=plan.submitted_at,
                guessed=plan.guessed, kill_on_bad_exit=plan.kill_on_bad_exit,
            )
        ]  # fmt: skip

    def silent_s(self) -> float:
        return self.world.now - self._silent_since

    def trouble(self) -> str:
        return ""

    async def allocation_begun(self, state: RunState, t: float) -> ev.AllocationStarted:
        cluster = self.cluster
        before, order = cluster.ended_as if ends.unexplained(state) else "", state.end_order
        ordered = order is not None or bool(cluster.ended_as)
        if not ends.undecided(state):  # and what the run wanted is no order
            told = (order.why if order is not None else "") or cluster.ended_as
            ordered = state.phase is Phase.REQUEUED and told == "preempted"
        if ordered:
            self.loop.call_soon(cluster.oracle.started_again, self)
        return ev.AllocationStarted(
            t=t, slurm_job="7", restarts=cluster.restarts, nodes=tuple(cluster.sites),
            host=cluster.batch_host, eligible_at=0.0, before=before, began_at=cluster.began_at,
        )  # fmt: skip

    async def serve(self, epoch: int, state: RunState, accept: Accept) -> None:
        self._accept = accept
        place = Endpoint(epoch, (self.site.name,), self.port, self.site.name, self.cluster.allocation, 1)
        await self.on_disk(lambda: self.cluster.disk.announce(place), writes=True)
        self.listens = True
        self.cluster.ports[self.site.name, self.port] = self
        self.cluster.oracle.supervises(self)

    def on_signals(self, warned: Callable[[], None], terminated: Callable[[], None]) -> None:
        self._warned, self._terminated = warned, terminated
        if self.takeover is None and self.cluster.ending:  # the batch process has kept it
            self.loop.call_soon(terminated)

    # ---- afterwards

    def written(self, journal: Journal, then: Callable[[], None]) -> bool:
        assert isinstance(journal, SimJournal)
        return not self.process.alive or journal.flush(then)

    async def why_ending(self) -> Ending:
        await asyncio.sleep(ANSWER_S)
        return Ending(self.cluster.why_ending(), self.cluster.kill_in_s)

    async def ends_in_s(self) -> float | None:
        await asyncio.sleep(ANSWER_S)
        return self.cluster.ends_in_s

    async def give_back(self, job: str, node: str) -> bool:
        self.acts_for_good()
        await asyncio.sleep(RELEASE_S)
        return True

    async def ask_for_node(self, number: int, exclude: tuple[str, ...]) -> SmallJob:
        if self.cluster.plan.pooled:
            self.cluster.oracle.pool.may_ask = not self._taking.answers
            if (member := await self._taking.take(SimPoolAccess(self, number, exclude), number)) is not None:
                return member
        self.ask_slurm()
        self.acts_for_good()
        job = self.cluster.others.submit(number, exclude)  # also if this process does not live to hear it
        await asyncio.sleep(ANSWER_S)
        return SmallJob(number, job)

    async def top_up_pool(self, exclude: tuple[str, ...]) -> tuple[list[str], str]:
        await asyncio.sleep(ANSWER_S)
        self.ask_slurm()
        return self.cluster.team.top_up(exclude), ""

    async def small_jobs(self) -> list[SmallJob]:
        await asyncio.sleep(ANSWER_S)
        self.ask_slurm()
        return self.cluster.others.look()

    async def end_small_job(self, job: str) -> None:
        self.ask_slurm()
        self.acts_for_good()
        self.cluster.others.end(job)

    def acts_for_good(self) -> None:
        """It does what nobody can take back."""
        self.cluster.oracle.acts_for_good(self)

    async def draining(self, nodes: Sequence[str]) -> dict[str, str]:
        await asyncio.sleep(ANSWER_S)
        self.ask_slurm()
        return {name: why for name, why in self.cluster.draining.items() if name in nodes}

    async def reservations(self, nodes: Sequence[str]) -> list[Reservation]:
        await asyncio.sleep(ANSWER_S)
        self.ask_slurm()
        to_ours = self.now - self.world.now
        found = self.cluster.reservations(nodes)
        return [replace(one, starts_at=one.starts_at + to_ours) for one in found]

    def ask_slurm(self) -> None:
        if self.world.now < self.cluster.slurm_silent_until:
            raise ClusterUnavailableError("slurmctld does not answer")

    def refuse_more(self) -> None:
        self.listens = False

    def give_reserve_up(self) -> None:
        self.has_room = True

    def write_outcome(self, outcome: Mapping[str, Any]) -> None: ...

    # ---- agents

    def sends(self, connection: SimConnection, message: Any) -> None:
        if not self.process.alive:
            return
        if self.cluster.dies_before(message):
            self.end()
            return
        if isinstance(message, msg.Leave):
            self.cluster.oracle.sends_home(self)
        elif isinstance(message, msg.CancelWrite):
            self.cluster.oracle.cuts_write()
        elif isinstance(message, msg.Replicate):
            self.cluster.oracle.told.copies(self, connection.ends[0].site.name, message)
        self.world.happens(message)
        connection.send(self, message)

    def hear(self, connection: SimConnection, message: Any) -> None:
        self.loop.call(self._hear, connection, message)

    def _hear(self, connection: SimConnection, message: Any) -> None:
        if connection not in self._peers:
            self._peers[connection] = SimPeer(self, connection)
            self._accept(self._peers[connection], lambda error: None)
        self._peers[connection].heard(message)

    def closed(self, connection: SimConnection) -> None:
        if connection in self._peers:
            self.loop.call(self._peers.pop(connection).lost)

    def ask(self, ask: msg.Ask) -> bool:
        """Make a request; returns whether it is carried out. That may be confirmed later."""
        done = list[object]()
        if self.listens:
            self.loop.call(self._asked, ask, done)
        return any(isinstance(one, msg.Accepted) for one in done)

    def _asked(self, ask: msg.Ask, done: list[object]) -> None:
        operator = _Operator(partial(self.cluster.oracle.missed.answered, ask))
        answer, heard_at = self.shell.answer(operator, ask), self.shell.now()
        done.append(answer)
        if isinstance(answer, msg.Accepted):
            background.start(self.shell.confirm(operator, answer, heard_at), self.loop.failed)

    def signalled(self, terminates: bool) -> None:
        """Slurm ends the job (or seems to), or warns that it will."""
        if self.listens:
            self.loop.call(self._terminated if terminates else self._warned)

    def connected(self, node: str) -> bool:
        return self.shell.is_connected(node)

    # ---- the end

    @property
    def superseded(self) -> bool:
        return hasattr(self, "shell") and self.shell.superseded

    def _over(self, task: asyncio.Task[Supervisor | None]) -> None:
        error = task.exception()
        if error is not None and not isinstance(error, OSError | RunDirectoryError):
            raise error
        if error is None and task.result() is not None:
            self.cluster.job_over(self)  # the batch process, or the supervisor that took over, goes on
        else:
            self.end()

    def end(self) -> None:
        """The process ends, or is killed; its node closes its connections."""
        if not self.process.alive:
            return
        self.process.alive = self.thread.alive = self.listens = False
        if self.cluster.ports.get((self.site.name, self.port)) is self:
            del self.cluster.ports[self.site.name, self.port]
        self.cluster.network.ended(self)
        self.cluster.supervisor_ended(self)
