"""The simulated process of a supervisor: the real `Supervision`, and what `jurymast.supervisor` does around
it with files, timers and connections, in simulated time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jurymast.core.run import ends
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import Phase, RunState
from jurymast.core.supervision.machine import Supervision
from jurymast.journal import FLUSH_LIMIT_S, TRY_EVERY_S
from jurymast.sim.cluster.world import Item, SimConnection, Steps
from jurymast.wire.endpoint import PULSE_INTERVAL_S

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent, SimSite
    from jurymast.sim.cluster.cluster import Cluster

GATHER_S = 0.01
WORK_S = 0.0005
ASK_AGAIN_S = 0.5


class SimJournal:
    """The journal, written in a thread: lines that were not on the disk when the process died are lost."""

    def __init__(self, supervisor: SimSupervisor, items: list[Item]) -> None:
        self._supervisor, self._items = supervisor, items
        self._unwritten: list[Item] = []
        self._writing = False
        self.error: OSError | None = None
        self._waits = 0
        self._flushed: Callable[[], None] | None = None

    @property
    def unwritten(self) -> bool:
        return bool(self._unwritten)

    def add(self, items: Sequence[Item]) -> None:
        self._unwritten += items
        if not self._writing:
            self._writing = True
            self._supervisor.world.go(self._supervisor.thread, self._write())

    def flush(self, then: Callable[[], None]) -> None:
        """Call `then` once everything is on the disk, or that took too long."""
        if not self._unwritten:
            then()
            return
        self._flushed = then
        world, process = self._supervisor.world, self._supervisor.process
        self._waits += 1
        world.at(world.now + FLUSH_LIMIT_S, process, self._enough, self._waits, first=True)
        process.stop_until(world.now + FLUSH_LIMIT_S)

    def _enough(self, number: int) -> None:
        if number == self._waits and self._flushed is not None:
            then, self._flushed = self._flushed, None
            then()

    def _write(self) -> Steps[None]:
        supervisor, world = self._supervisor, self._supervisor.world
        yield world.now + GATHER_S
        while self._unwritten:
            batch = list(self._unwritten)
            write, storage = partial(self._items.extend, batch), supervisor.cluster.storage
            has_room = supervisor.machine.departure.for_good  # some is reserved for the end
            self.error = yield from storage.work(supervisor.site.name, write, writes=not has_room)
            if self.error is None:
                del self._unwritten[: len(batch)]
            if self.error is not None or not self._unwritten:
                self._tried()
            if self.error is not None:
                yield world.now + TRY_EVERY_S
        self._writing = False

    def _tried(self) -> None:
        """Nobody waits for the disk any longer."""
        if self._flushed is not None:
            self._waits += 1
            then, self._flushed = self._flushed, None
            self._supervisor.unblock()
            world = self._supervisor.world
            world.at(world.now, self._supervisor.process, then, first=True)


class SimSupervisor:
    """One process. `takeover`: the agent that started it; otherwise the batch process did. Nobody had heard
    the previous one for `silent_s`."""

    def __init__(self, cluster: Cluster, site: SimSite, takeover: SimAgent | None, silent_s: float) -> None:
        self.cluster, self.site, self.world, self.takeover = cluster, site, cluster.world, takeover
        self.process, self.thread = site.process(), site.process()
        self.port = cluster.batch_port if takeover is None else cluster.new_port()
        self.allocation = cluster.allocation
        self.listens = False
        self.superseded = False
        self.epoch = 0
        self._offset = 0.0
        self._asked_at: float | None = None  # the run directory, of whatever it has not answered yet
        self._silent = False
        self._channels: dict[str, SimConnection] = {}
        self._numbers: dict[SimConnection, tuple[str, int]] = {}  # node, and number
        self._number = 0
        self._todo: deque[do.Effect] = deque()
        self._blocked = self._working = False
        self._fenced = 0
        self._asked_why: do.WhyEnding | None = None  # the newest question
        self.machine: Supervision
        self.state: RunState
        self._silent_since = self.world.now - silent_s

    @property
    def now(self) -> float:
        return self.world.now + self._offset

    def unblock(self) -> None:
        """Continue after waiting for the disk."""
        self.process.until = max(self.site.stopped_until, min(self.process.until, self.world.now))
        self.world.wake(self.process)

    # ---- the beginning

    def _on_disk(self, work: Callable[[], Any], then: Callable[[Any], None], *, writes: bool = False) -> None:
        def checked(result: Any) -> None:
            if isinstance(result, OSError):
                self.end()
            else:
                self.world.at(self.world.now, self.process, then, result)

        self.cluster.storage.do(self.site.name, self.thread, work, checked, writes=writes)

    def begin(self) -> None:
        self._on_disk(lambda: self.cluster.disk.claim(self.site.name), self._claimed, writes=True)

    def _claimed(self, epoch: int) -> None:
        self.epoch = epoch
        self.world.go(self.process, self._hold())
        self.world.after(self.cluster.disk.reading_s, self.process, self._read)

    def _read(self) -> None:
        self._on_disk(self.cluster.disk.replay, self._replayed)

    def _replayed(self, state: RunState) -> None:
        self.state = state
        self._offset = max(self.site.wall, state.now) - self.world.now
        self._journal = SimJournal(self, self.cluster.disk.journal[self.epoch])
        self.machine = Supervision(state, "/run", self.now)
        plan, cluster = self.cluster.plan, self.cluster
        if state.epoch == 0:
            self.feed(
                ev.RunStarted(
                    t=self.now, run=plan.run, name=plan.name, active=plan.active, spares=plan.spares,
                    ranks_per_node=plan.ranks_per_node, script="x", submitted_at=0.0,
                    guessed=plan.guessed,
                )
            )  # fmt: skip
        self.feed(
            ev.SupervisorStarted(
                t=self.now, epoch=self.epoch, node=self.site.name,
                silent_s=self.world.now - self._silent_since, read=dict(state.lines_read),
            )
        )  # fmt: skip
        if state.allocation != cluster.allocation:
            before, order = cluster.ended_as if ends.unexplained(state) else "", state.end_order
            ordered = order is not None or bool(cluster.ended_as)
            if not ends.undecided(state):  # and what the run wanted is no order
                told = (order.why if order is not None else "") or cluster.ended_as
                ordered = state.phase is Phase.REQUEUED and told == "preempted"
            self.feed(
                ev.AllocationStarted(
                    t=self.now, slurm_job="7", restarts=cluster.restarts, nodes=tuple(cluster.sites),
                    host=cluster.batch_host, eligible_at=0.0, before=before,
                )
            )  # fmt: skip
            if ordered:
                cluster.oracle.started_again(self)
        self._on_disk(lambda: cluster.disk.attempt, self._knows_attempt)

    def _knows_attempt(self, newest: int) -> None:
        self._do(self.machine.attempt_read(newest, "", self.now))
        place = Endpoint(self.epoch, (self.site.name,), self.port, self.site.name, self.cluster.allocation, 1)
        self._on_disk(lambda: self.cluster.disk.announce(place), self._announced, writes=True)

    def _announced(self, _: None) -> None:
        self.listens = True
        self.cluster.ports[self.site.name, self.port] = self
        self.cluster.oracle.supervises(self)
        self._do(self.machine.start(self.now))
        self._tick()
        if self.takeover is None and self.cluster.ending:
            self.signalled(terminates=True)  # the batch process has kept it
        self.world.go(self.process, self._look_on_storage())

    def _look_on_storage(self) -> Steps[None]:
        disk = self.cluster.disk
        found = yield from self.cluster.storage.work(
            self.site.name, lambda: (dict.fromkeys(disk.shared, 100), [*disk.rollbacks])
        )
        if isinstance(found, OSError):
            self._do(self.machine.note("", str(found), self.now))
        else:
            self._do(self.machine.found_on_storage(*found, self.now))

    # ---- holding the epoch

    def _hold(self) -> Steps[None]:
        disk, name = self.cluster.disk, self.site.name
        pulses = itertools.count()

        def beat() -> int:
            count, newest = next(pulses), disk.newest_epoch(name)
            if newest <= self.epoch and not self._silent:
                disk.pulse(self.epoch, count)
            return newest

        while True:
            self._asked_at = self.world.now
            newest = yield from self.cluster.storage.work(name, beat)
            self._asked_at = None
            if not isinstance(newest, OSError) and newest > self.epoch:
                self._give_way()
                return
            yield self.world.now + PULSE_INTERVAL_S

    # ---- effects

    def feed(self, event: ev.Event) -> None:
        self._do(self.machine.record(event))

    def _do(self, effects: Sequence[do.Effect]) -> None:
        self._todo.extend(effects)
        if effects:  # an event without effects has hardly changed anything
            self.machine.check()
        if not self._blocked:
            self._carry_on()

    def _carry_on(self) -> None:
        self._blocked = False
        while self._todo and self.process.alive:
            effect = self._todo.popleft()
            self.world.happens(effect)
            if isinstance(effect, do.Journal):
                told: list[Item] = [effect.event, *((effect.event.t, one) for one in effect.decided)]
                self._journal.add(told)
                self.cluster.oracle.recorded(self, effect)
                if effect.flush:
                    self._blocked = True
                    self._journal.flush(self._carry_on)
                    if self._blocked:
                        return
            else:
                self._one(effect)
        if self.process.alive and self.machine.has_work and not self._working:
            self._working = True
            self.world.after(WORK_S, self.process, self._work)

    def _one(self, effect: do.Effect) -> None:
        match effect:
            case do.Send() if self.cluster.dies_before(effect.message):
                self.end()
            case do.Send():
                if isinstance(effect.message, msg.Leave):
                    self.cluster.oracle.sends_home(self)
                elif isinstance(effect.message, msg.CancelWrite):
                    self.cluster.oracle.cuts_write()
                self._send(effect.node, effect.message)
            case do.Answer():
                go_on = msg.GoOn(
                    time=self.site.wall, patience_s=effect.patience_s, heard=effect.heard,
                    epoch=effect.epoch, heir=effect.heir,
                )  # fmt: skip
                self._send(effect.node, go_on)
            case do.Disconnect():
                self._hang_up(self._channels.pop(effect.node, None))
            case do.Pulse():
                self._silent = not effect.on
            case do.End():  # the batch process, or the supervisor that took over, goes on
                self.cluster.job_over(self)
            case do.GiveWay():
                self._give_way()
            case do.Fence():
                self.world.go(self.process, self._fence(effect.attempt))
            case do.GiveBack():
                self._after(1.0, lambda: self.machine.given_back(effect.node, True, "", self.now))
            case do.WhyEnding():
                self._asked_why = effect
                self._after(0.2, lambda: self._why_ending(effect))
            case do.AskTimeLimit():
                self._after(0.2, lambda: self.machine.time_limit(self.cluster.ends_in_s, self.now))
            case do.LookAtStorage():  # all ranks save to the run directory
                pass
            case do.AskSuperseded():
                self.world.go(self.process, self._ask_superseded())
            case _:
                raise AssertionError(f"{effect} has left the machine")

    def _send(self, node: str, message: Any) -> None:
        connection = self._channels.get(node)
        if connection is not None:
            connection.send(self, message)

    def _work(self) -> None:
        self._working = False
        if self.machine.has_work:
            self._do(self.machine.work(self.now))
            self.machine.worked(WORK_S, self.now)

    def _tick(self) -> None:
        waits_s = 0.0 if self._asked_at is None else self.world.now - self._asked_at
        self._do(self.machine.tick(self.now, storage_waits_s=waits_s, unwritten=self._journal.unwritten))
        self.world.after(self.machine.interval_s, self.process, self._tick)

    def _fence(self, attempt: int) -> Steps[None]:
        disk = self.cluster.disk

        def write() -> None:
            disk.attempt = max(disk.attempt, attempt) if self._fenced >= attempt else attempt

        self._fenced = attempt
        result = yield from self.cluster.storage.work(self.site.name, write, writes=True)
        why = f"cannot write the attempt: {result}" if result is not None else ""
        self._do(self.machine.fenced(attempt, why, self.now))

    def _after(self, seconds: float, handle: Callable[[], Sequence[do.Effect]]) -> None:
        """Let the machine handle something after a while."""
        self.world.after(seconds, self.process, lambda: self._do(handle()))

    def _why_ending(self, effect: do.WhyEnding) -> list[do.Effect]:
        if self._asked_why is not effect:
            return []
        why = self.cluster.why_ending()
        by = "scancel" if why == "cancelled" else ""
        return self.machine.why_ending(effect, why, by, self.now, self.cluster.kill_in_s)

    def _ask_superseded(self) -> Steps[None]:
        disk, name = self.cluster.disk, self.site.name
        while True:
            newest = yield from self.cluster.storage.work(name, lambda: disk.newest_epoch(name))
            if not isinstance(newest, OSError) and newest >= self.epoch:
                break
            yield self.world.now + ASK_AGAIN_S
        self._do(self.machine.superseded(newest > self.epoch, self.now))

    # ---- agents

    def hear(self, connection: SimConnection, message: Any) -> None:
        known = self._numbers.get(connection)
        if isinstance(message, msg.Hello):
            self._number += 1
            node = message.node
            before, self._channels[node] = self._channels.get(node), connection
            self._numbers[connection] = (node, self._number)
            self._hang_up(before)
            self._do(self.machine.joined(node, self._number, message, self.now))
        elif known is not None:
            self._do(self.machine.heard(known[0], known[1], message, self.now))

    def _hang_up(self, connection: SimConnection | None) -> None:
        if connection is not None:
            connection.close(self)
            self.world.after(0.0, self.process, self.closed, connection)

    def closed(self, connection: SimConnection) -> None:
        known = self._numbers.pop(connection, None)
        if known is None:
            return
        node, number = known
        if self._channels.get(node) is connection:
            del self._channels[node]
        self._do(self.machine.closed(node, number, self.now))

    def ask(self, ask: msg.Ask) -> bool:
        """Make a request; returns whether it was accepted."""
        if not self.listens:
            return False
        answer, effects = self.machine.asked(ask, self.now)
        self._do(effects)
        return isinstance(answer, msg.Accepted)

    def signalled(self, terminates: bool) -> None:
        """Slurm ends the job (or seems to), or warns that it will."""
        if self.listens:
            self._do(self.machine.terminated(self.now) if terminates else self.machine.warned(self.now))

    def connected(self, node: str) -> bool:
        return node in self._channels

    # ---- the end

    def _give_way(self) -> None:
        self.superseded = True
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
