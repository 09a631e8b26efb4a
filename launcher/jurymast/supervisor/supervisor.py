"""The supervisor: drives `core.run.step` with what the agents report and carries its instructions out."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import asdict

from jurymast.checkpoint.directory import BadCheckpoint, CheckpointDirectory
from jurymast.cluster.batch import SIGNALS
from jurymast.cluster.control import STILL_RUNNING, give_back
from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.checkpoints.saves import Saves
from jurymast.core.copies import SHARED
from jurymast.core.effects import (
    Answer,
    Disconnect,
    Effect,
    GiveBack,
    Pulse,
    Record,
    SaveFirst,
    Send,
)
from jurymast.core.instructions import Dismiss, Finish, Instruction, Launch, Requeue, StopWorkers, Test
from jurymast.core.nodes.hangs import Hangs
from jurymast.core.nodes.health import Health
from jurymast.core.nodes.preflight import Preflight
from jurymast.core.nodes.sick import SickNodes
from jurymast.core.nodes.stragglers import Stragglers
from jurymast.core.nodes.watch import STEADY_INTERVAL_S, WATCH_INTERVAL_S, Watch
from jurymast.core.rank_events import RankEvents
from jurymast.core.run import resume, step
from jurymast.core.state import Phase, Role, RunState
from jurymast.errors import ClusterUnavailableError, SubmissionError, never
from jurymast.journal import JournalWriter
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.supervisor.asks import Asks
from jurymast.supervisor.cadence import Cadence
from jurymast.supervisor.clock import Clock
from jurymast.supervisor.door import BACKLOG, Door
from jurymast.supervisor.hold import Hold
from jurymast.supervisor.launching import Launching
from jurymast.supervisor.progress import Progress
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.connection import Connection, listen
from jurymast.wire.strangers import Strangers

# While a run just runs, only silence is looked for at every look; the rest at every so many.
STEADY_LOOKS = 3
LEAVE_LIMIT_S = 4.0
# How long the nodes are kept for the newest checkpoint to get to shared storage, by how the run ends. Slurm
# kills 30 s (KillWait) after a SIGTERM unless the partition's GraceTime says otherwise.
SECURE_LIMIT_S = {"succeeded": 1800.0, "failed": 600.0, "requeued": 300.0}
SECURE_HURRY_S = 20.0
SECURE_POLL_S = 0.02


class Supervisor:
    """One epoch. `run` returns when the run is over, requeued or taken over by a newer epoch."""

    def __init__(
        self,
        directory: RunDirectory,
        state: RunState,
        journal: JournalWriter,
        why_ending: Callable[[], str],
        hold: Hold,
    ) -> None:
        self._directory = directory
        self._secret = directory.secret()
        self.state = state
        self._journal = journal
        self._why_ending = why_ending
        self._hold = hold
        self._clock = Clock(not_before=state.now)
        self._watch = Watch(state, self.now())
        self._saves = Saves(state)
        self._progress = Progress(state, self._watch.reports, self._saves, self.feed, self.now)
        self._hangs = Hangs(state, self._watch.reports)
        self._checkpoints = Checkpoints(state)
        self._cadence = Cadence(state, self._tell, self.feed, self.now, lambda: self._checkpoints.writing)
        self._asks = Asks(state, self._checkpoints, self._cadence, self._do, self.feed, self.now, self._how)
        self._rank_events = RankEvents(state, self._checkpoints)
        self._health = Health()
        self._preflight = Preflight(state)
        self._stragglers = Stragglers(state)
        self._sick = SickNodes(state)
        self._channels: dict[str, Channel[msg.Said]] = {}
        self._numbers = itertools.count(1)  # of connections
        self._allocation = ""
        self._launching = Launching(
            directory, state, self._channels, self._watch, self._checkpoints, self._do, self.now
        )
        self._strangers = Strangers(self._note)
        self._replicating = False
        self._terminating = False
        self._leaving = False
        self._failure: BaseException | None = None
        self.superseded = False
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Events in, instructions out.

    def feed(self, event: ev.Event) -> None:
        """Journal an event, decide, journal and carry out what follows."""
        self._ahead_of(event)
        before = (self.state.phase, self.state.deadline)
        instructions = step(self.state, event)
        if (
            isinstance(event, ev.Tick)
            and not instructions
            and before == (self.state.phase, self.state.deadline)
        ):
            return
        self._journal.event(event)
        self._cadence.heard(event)
        for instruction in instructions:
            self._journal.decision(self.state.now, instruction)
        if any(isinstance(i, Launch | Requeue | Finish) for i in instructions):
            self._journal.flush()
        for instruction in instructions:
            self._carry_out(instruction)

    def _ahead_of(self, event: ev.Event) -> None:
        """Before the first event that ends an attempt, and before the last: tell how far its ranks came. To
        look at all ranks for each node's would take too long where there are many."""
        if isinstance(event, ev.NodeLost | ev.WorkerFailed | ev.WorkersStopped):
            if self.state.phase is Phase.RUNNING or self._is_last(self.state.stopped):
                self._progress.report(forced=True)
        elif isinstance(event, ev.RanksHung) or (
            isinstance(event, ev.NodeFinished) and self._is_last(self.state.finished)
        ):
            self._progress.report(forced=True)
        if isinstance(event, ev.NodeLost):
            self._do(self._checkpoints.lost(event.node, event.t))

    def _is_last(self, said: set[str]) -> bool:
        """Whether the word of one more node makes all."""
        return len(said) + 1 >= len(self.state.placement) - len(self.state.findings.lost)

    def _saved(self, save: ev.Saved) -> None:
        """Saves that are as usual are journalled now and then, together."""
        told = self._saves.hear(save, self.now())
        for event in told:
            self.feed(event)
        if not told:
            self._cadence.heard(save)

    def now(self) -> float:
        return self._clock.now()

    def _do(self, effects: Sequence[Effect]) -> None:
        """What a machine wants done."""
        for effect in effects:
            match effect:
                case Send():
                    self._tell(effect.node, effect.message)
                case Record(event=ev.Saved() as save):
                    self._saved(save)
                case Record():
                    self.feed(effect.event)
                case Answer():
                    self._tell(effect.node, msg.GoOn(time=time.time(), patience_s=effect.patience_s))
                case Disconnect():
                    connection = self._channels.pop(effect.node, None)
                    if connection is not None:
                        connection.close()
                case Pulse():
                    self._hold.silent = not effect.on
                case GiveBack():
                    self._spawn(self._give_back(effect))
                case SaveFirst():
                    self._spawn(self._save_first(effect))
                case _:
                    never(effect)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Launch):
            self._spawn(self._launching.carry_out(instruction))
        elif isinstance(instruction, StopWorkers):
            self._watch.reports.attempt_over()
            stop = msg.Stop(attempt=instruction.attempt, stacks=instruction.stacks)
            for node in instruction.nodes:
                self._tell(node, stop)
        elif isinstance(instruction, Dismiss):
            self._tell(instruction.node, msg.Dismiss())
            self._do(self._sick.dismissed(instruction.node, self.now()))
        elif isinstance(instruction, Test):
            self._do(self._preflight.begin(instruction, self.now()))
        elif isinstance(
            instruction, Requeue | Finish
        ):  # the batch process requeues, once its agents are gone
            self._spawn(self._leave())

    def _tell(self, node: str, message: msg.ToAgent) -> None:
        connection = self._channels.get(node)
        if connection is not None:
            connection.send(message)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """A supervisor that half works is worse than one that starts anew from the journal."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._over.set()

    # The life of an epoch.

    async def run(
        self, listener: socket.socket, announce: list[str], allocation: str, node: str, pid: int
    ) -> None:
        """Announce the endpoint, and supervise until the end. Raises what broke it."""
        self._allocation = allocation
        door = Door(self._secret, self.state.active + self.state.spares)
        server = await listen(lambda come: self._spawn(self._serve(door, come)), listener, BACKLOG)
        port = server.sockets[0].getsockname()[1]
        place = endpoint.Endpoint(self._hold.epoch, tuple(announce), port, node, allocation, pid)
        endpoint.announce(self._directory.epochs, place)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._spawn(self._terminated()))
        loop.add_signal_handler(signal.SIGUSR2, self._asks.warned)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the batch process had them wait
        self._watch.take_over(self.now())
        for instruction in resume(self.state):
            self._carry_out(instruction)
        self._spawn(self._watch_all())
        self._spawn(self._give_way())
        self._spawn(self._look_at_storage())
        if self.state.ended:  # the last supervisor died between the decision and its outcome
            self._spawn(self._leave())
        try:
            await self._over.wait()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            for connection in list(self._channels.values()):
                connection.close()
            self._write_last_words()
        if self._failure is not None:
            raise self._failure

    def _write_last_words(self) -> None:
        """On a full disk into the room that was kept free for them."""
        if self._journal.error is not None:
            self._directory.give_reserve_up()
        self._journal.close()
        if self.superseded or self._failure is not None:
            return
        try:
            self._write_outcome()
        except OSError:
            self._directory.give_reserve_up()
            self._write_outcome()

    def _write_outcome(self) -> None:
        """For the batch script: how to end the Slurm job."""
        over = self.state.ended or self.state.phase is Phase.REQUEUED
        outcome = {
            "state": self.state.public_state,
            # A run that Slurm interrupts has not succeeded, and its job must not end as if it had.
            "exit_code": self.state.exit_code if over else SubmissionError.exit_code,
            "exclude": sorted(self.state.excluded),
            "lost": sorted(n.name for n in self.state.nodes.values() if n.role is Role.FAILED),
        }
        write_atomically(self._directory.outcome_file, json.dumps(outcome).encode())

    def _steady(self) -> bool:
        return self.state.phase is Phase.RUNNING and self.state.incident is None

    async def _watch_all(self) -> None:
        count = itertools.count()
        while not self._over.is_set():
            await asyncio.sleep(STEADY_INTERVAL_S if self._steady() else WATCH_INTERVAL_S)
            self._do(self._watch.tick(self.now()))
            if self.state.ended or self._terminating or self.state.phase is Phase.REQUEUED:
                continue
            if self._watch.cut_off:
                continue
            self._do(self._preflight.tick(self.now()))
            if next(count) % STEADY_LOOKS and self._steady():
                continue
            self._progress.report(forced=False)
            self._about_checkpoints(self._checkpoints.look(self.now()))
            self._cadence.look()
            self._do(self._hangs.tick(self.now()))
            self._do(self._sick.tick(self.now()))
            self.feed(ev.Tick(t=self.now()))

    def _about_checkpoints(self, effects: Sequence[Effect]) -> None:
        self._do(effects)
        if self._checkpoints.replicating and not self._replicating:
            self._replicating = True
            self._spawn(self._replicate())

    async def _give_back(self, effect: GiveBack) -> None:
        gone, why = False, ""
        try:
            gone = await asyncio.to_thread(give_back, effect.job, effect.node)
        except ClusterUnavailableError as error:
            why = str(error)
        self._do(self._sick.given_back(effect.node, gone, why, self.now()))

    async def _save_first(self, effect: SaveFirst) -> None:
        await self._cadence.save_first(effect.why, effect.limit_s)
        self._do(self._stragglers.saved(effect.why, self.now()))

    async def _replicate(self) -> None:
        """Of thousands of nodes some at a time; others have their turn in between."""
        while self._checkpoints.replicating:
            began = self.now()
            self._do(self._checkpoints.replicate(began))
            now = self.now()
            self._checkpoints.replicated(now - began, now)
            await asyncio.sleep(0)
        self._replicating = False

    async def _look_at_storage(self) -> None:
        try:
            checkpoints = CheckpointDirectory(self._directory.checkpoints)
            sizes = await asyncio.to_thread(checkpoints.sizes)
            rollbacks = await asyncio.to_thread(checkpoints.rollbacks)
        except (OSError, BadCheckpoint) as error:
            self.feed(ev.Noted(t=self.now(), message=f"checkpoints on shared storage: {error}"))
            return
        self._checkpoints.found_on_storage(sizes, rollbacks)

    async def _give_way(self) -> None:
        """Once another has taken over, nothing is this one's to decide or to end any more."""
        await self._hold.taken_over()
        self.superseded = True
        self._over.set()

    # Agents and operators.

    async def _serve(self, door: Door, come: Connection) -> None:
        if (entered := await door.enter(come)) is None:
            return
        connection, first = entered
        match first:
            case msg.Ask():
                await self._asks.answer(connection, first)
            case msg.Hello() if first.allocation == self._allocation:
                await self._serve_agent(connection, first)
            case msg.Hello():  # of an allocation that the run has given back
                connection.send(msg.Leave())
                await connection.drain()
            case _:
                never(first)
        connection.close()

    async def _serve_agent(self, connection: Channel[msg.Said], hello: msg.Hello) -> None:
        node = hello.node
        before = self._channels.get(node)
        self._channels[node] = connection
        if before is not None:
            before.close()
        number = next(self._numbers)
        self._watch.joined(node, number)
        self._about_checkpoints(self._checkpoints.joined(node, hello, self.now()))
        self.feed(
            ev.NodeJoined(
                t=self.now(), node=node, address=hello.address, incarnation=hello.incarnation,
                pid=hello.pid, boot_id=hello.boot_id, gpus=hello.gpus,
            )
        )  # fmt: skip
        self._do(self._health.joined(node, hello.health, self.now()))
        self._catch_up(node, hello)
        why = await connection.listen(partial(self._hear, node, number))
        self._strangers.left(node)
        print(f"{node}: {type(why).__name__}: {why}", flush=True)
        if self._channels.get(node) is connection:
            del self._channels[node]
        self._do(self._watch.closed(node, number, self.now()))

    def _catch_up(self, node: str, hello: msg.Hello) -> None:
        """What the agent may have said, or been told, while no connection was there."""
        attempt, ranks = hello.attempt, hello.ranks
        if attempt > self.state.attempt:
            self.feed(ev.AttemptFound(t=self.now(), node=node, attempt=attempt))
        current = attempt == self.state.attempt
        placed = node in self.state.places
        if ranks in ("waiting", "finished"):
            if ranks == "finished" and current and placed:
                self.feed(ev.NodeFinished(t=self.now(), node=node, attempt=attempt))
            elif current and placed and self.state.phase in (Phase.RUNNING, Phase.STOPPING):
                self._stopped(node, attempt, hello.store_port)
            else:
                self.feed(ev.NodeReady(t=self.now(), node=node, store_port=hello.store_port))
        elif ranks == "warming" and current and placed:  # its host died, and with it the ranks
            self._stopped(node, attempt, 0)
        elif ranks == "running" and current and placed:
            self.feed(ev.WorkersStarted(t=self.now(), node=node, attempt=attempt, pids=hello.pids))
        elif ranks in ("running", "starting") and not (current and placed):
            self._tell(node, msg.Dismiss())
        if placed:
            self._send_again(node, attempt)

    def _send_again(self, node: str, attempt: int) -> None:
        """What the agent, whose newest attempt is this one, may not have been told."""
        if self.state.phase is Phase.STOPPING and node not in self.state.stopped:
            self._tell(node, msg.Stop(attempt=self.state.attempt))
        self._launching.tell_again(node, attempt)

    def _stopped(self, node: str, attempt: int, store_port: int) -> None:
        self.feed(ev.WorkersStopped(t=self.now(), node=node, attempt=attempt, store_port=store_port))

    def _beat(self, node: str, beat: msg.Beat) -> None:
        now = self.now()
        self._do(self._watch.beat(node, beat, now))
        self._cadence.beat(node, beat)
        self._do(self._stragglers.beat(node, beat, now))

    def _hear(self, node: str, number: int, message: msg.Said) -> None:
        """Over the connection of this number."""
        if isinstance(message, msg.Beat):
            self._beat(node, message)
            return
        now = self.now()
        match message:
            case msg.Ready():
                self.feed(ev.NodeReady(t=now, node=node, store_port=message.store_port))
            case msg.Started():
                started = ev.WorkersStarted(t=now, node=node, attempt=message.attempt, pids=message.pids)
                self.feed(started)
            case msg.Failed():
                self.feed(ev.WorkerFailed(t=now, node=node, **asdict(message)))
            case msg.Looked():
                self._hangs.looked(message)
            case msg.Stacks():
                flights = tuple(one.to_json() for one in message.flights)
                self.feed(ev.StacksTaken(t=now, node=node, **{**asdict(message), "flights": flights}))
            case msg.Stopped():
                self._stopped(node, message.attempt, message.store_port)
            case msg.Finished():
                self.feed(ev.NodeFinished(t=now, node=node, attempt=message.attempt))
            case msg.Health():
                self._do(self._health.found(node, message.finding, now))
            case msg.RankEvent():
                self._do(self._rank_events.hear(node, message, now))
            case msg.VerdictLeft():
                self._do(self._sick.answered(node, message, now))
            case msg.Terminated():
                self._spawn(self._agent_terminated(node, number))
            case msg.HangsUp():
                self._do(self._watch.hung_up(node, number))
            case msg.Leaving():
                self._do(self._watch.left(node, number, message.why, now))
            case msg.TestedAlone() | msg.TestedPair():
                self._do(self._preflight.heard(node, message, now))
            case msg.Strange():
                self._strangers.heard(node, message)
            case msg.Hello() | msg.Ask():
                self._strangers.heard(node, msg.out_of_place(message))
            case _:
                self._about_checkpoints(self._checkpoints.hear(node, message, now))

    def _note(self, node: str, text: str) -> None:
        self.feed(ev.Noted(t=self.now(), node=node, message=text))

    def _how(self) -> msg.Condition:
        """What the journal does not tell yet."""
        state, error = self.state, self._journal.error
        waits = ""
        if self._leaving and (unsaved := self._checkpoints.unsaved()):
            known = state.saved.get(SHARED)
            why = f": {known.error}" if known is not None and known.error else ""
            waits = f"{unsaved} is on its way to {self._directory.checkpoints}{why}"
        return msg.Condition(
            state=state.public_state, waits=waits, journal=(error.strerror or "") if error else "",
            step=self._progress.step, alerts=tuple(state.alerts),
        )  # fmt: skip

    # The end of an epoch.

    async def _agent_terminated(self, node: str, number: int) -> None:
        """An agent got a SIGTERM: the job ends, or Slurm takes just this node away."""
        why = await asyncio.to_thread(self._why_ending)
        if why != STILL_RUNNING:
            await self._terminated()
        elif not self.state.ended:
            self._do(self._watch.left(node, number, "its agent got a SIGTERM", self.now()))

    async def _terminated(self) -> None:
        """Slurm ends the job. Who wanted that decides what the run's state becomes."""
        if self.state.phase is Phase.REQUEUED or self.state.ended or self._terminating:
            return
        self._terminating = self._watch.ending = True
        self._progress.report(forced=True)
        self.feed(ev.Signalled(t=self.now(), signal="SIGTERM"))
        why = await asyncio.to_thread(self._why_ending)
        if why == STILL_RUNNING:  # a stray signal, not the end of the job
            self._terminating = self._watch.ending = False
            return
        if why == "cancelled":
            by = "a signal" if self._allocation.startswith("local-") else "scancel"
            self.feed(ev.Asked(t=self.now(), what="cancel", by=by))
        else:
            self.feed(ev.Signalled(t=self.now(), signal=why))
        self._journal.flush()
        await self._leave()

    async def _secure(self) -> None:
        """The newest checkpoint may be in memory only, and that goes with the nodes."""
        began = time.monotonic()
        while not self._secured():
            limit_s = SECURE_LIMIT_S.get(self.state.public_state, SECURE_HURRY_S)
            given_up = f": {self._asks.given_up_by} gave it up" if self._asks.given_up_by else ""
            if given_up or time.monotonic() > began + (SECURE_HURRY_S if self._terminating else limit_s):
                lost = f"{self._checkpoints.unsaved() or 'nothing'} was lost with the nodes{given_up}"
                self.feed(ev.Noted(t=self.now(), message=lost))
                return
            await asyncio.sleep(SECURE_POLL_S)

    def _secured(self) -> bool:
        self._do(self._checkpoints.secure(self.now()))
        return self._checkpoints.secured

    async def _leave(self) -> None:
        """Send the agents home and wait until they have gone, within a limit."""
        if self._leaving:
            return
        self._leaving = True
        await self._secure()
        leave = msg.Leave(over=self.state.ended)
        for connection in self._channels.values():
            connection.send(leave)
        end = time.monotonic() + LEAVE_LIMIT_S
        while self._channels and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if await self._hold.is_superseded():
            await self._give_way()
            return
        why = self.state.end_reason or "requeued"
        job = self._allocation.rpartition(".")[0]
        self.feed(ev.AllocationEnded(t=self.now(), slurm_job=job, why=why))
        self._over.set()
