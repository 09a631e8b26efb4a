"""The supervisor: `core.supervision` decides; this module turns connections, files, threads and signals into
events, and carries out effects."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from jurymast.checkpoint.directory import BadCheckpoint, CheckpointDirectory
from jurymast.cluster.batch import SIGNALS
from jurymast.cluster.control import give_back
from jurymast.core import effects as do
from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.run.state import Phase, Role, RunState
from jurymast.core.supervision.machine import Supervision
from jurymast.errors import ClusterUnavailableError, SubmissionError, never
from jurymast.journal import JournalWriter
from jurymast.rundir import RunDirectory, renew, write_atomically, write_json
from jurymast.supervisor.acceptor import Acceptor
from jurymast.supervisor.hold import Hold
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel, Connection, ConnectionClosed, Listener
from jurymast.wire.strangers import Strangers

log = logging.getLogger("jurymast.supervisor")

HOW = "how"  # asks for the run's condition; nothing is done


class Supervisor:
    """Runs one epoch. `run` returns when the run is over, requeued, or taken over by a newer epoch. Every
    event goes to the machine, and the effects that it returns to `_do`."""

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
        # The journal stays in order even if this node's clock is behind that of an earlier supervisor.
        self._clock_offset_s = max(time.time(), state.now) - time.monotonic()
        self._machine = Supervision(state, str(directory.root), self.now())
        self._channels: dict[str, Channel[msg.Said]] = {}
        self._numbers = itertools.count(1)  # of connections
        self._allocation = ""
        self._strangers = Strangers(self._note)
        self._working = False
        self._fencing = threading.Lock()
        self._fenced = 0
        self._failure: BaseException | None = None
        self.superseded = False
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def now(self) -> float:
        """Return Unix time in seconds, set once and then advanced by the monotonic clock."""
        return time.monotonic() + self._clock_offset_s

    def feed(self, event: ev.Event) -> None:
        self._do(self._machine.record(event))

    def _note(self, node: str, text: str) -> None:
        self._do(self._machine.note(node, text, self.now()))

    # Effects.

    def _do(self, effects: Sequence[do.Effect]) -> None:
        """Carry out effects in order; successive messages to one node are sent together."""
        for node, same in groupby(
            effects, lambda effect: effect.node if isinstance(effect, do.Send) else None
        ):
            if node is None:
                for effect in same:
                    self._carry_out(effect)
            else:
                self._tell(node, *[one.message for one in same if isinstance(one, do.Send)])
        if self._machine.has_work and not self._working:
            self._working = True
            self._spawn(self._work())

    def _carry_out(self, effect: do.Effect) -> None:
        match effect:
            case do.Answer():
                go_on = msg.GoOn(
                    time=time.time(), patience_s=effect.patience_s, heard=effect.heard,
                    epoch=effect.epoch, heir=effect.heir,
                )  # fmt: skip
                self._tell(effect.node, go_on)
            case do.Journal():
                self._write(effect)
            case do.Disconnect():
                connection = self._channels.pop(effect.node, None)
                if connection is not None:
                    connection.close()
            case do.Pulse():
                self._hold.silent = not effect.on
            case do.End():
                self._over.set()
            case do.GiveWay():
                self._give_way()
            case do.Fence():
                self._spawn(self._fence(effect.attempt))
            case do.GiveBack():
                self._spawn(self._give_back(effect))
            case do.WhyEnding():
                self._spawn(self._ask_why_ending(effect))
            case do.AskSuperseded():
                self._spawn(self._ask_superseded())
            case do.Send() | do.Record() | do.SaveFirst():
                raise AssertionError(f"{effect} is not carried out here")
            case _:
                never(effect)

    def _tell(self, node: str, *messages: msg.ToAgent) -> None:
        connection = self._channels.get(node)
        if connection is not None:
            connection.send(*messages)

    def _write(self, entry: do.Journal) -> None:
        self._journal.event(entry.event)
        for instruction in entry.decided:
            self._journal.decision(entry.event.t, instruction)
        if entry.flush:
            self._journal.flush()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """End this supervisor if a task failed: starting anew from the journal is better than half
        working."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._over.set()

    # What takes time.

    async def _work(self) -> None:
        while self._machine.has_work:
            began = self.now()
            self._do(self._machine.work(began))
            now = self.now()
            self._machine.worked(now - began, now)
            await asyncio.sleep(0)  # gives others their turn
        self._working = False

    async def _fence(self, attempt: int) -> None:
        """Write the attempt's number in a thread, because storage may hang."""
        error = await asyncio.to_thread(self._write_attempt, attempt)
        why = f"cannot write {self._directory.attempt_file}: {error}" if error is not None else ""
        self._do(self._machine.fenced(attempt, why, self.now()))

    def _write_attempt(self, attempt: int) -> OSError | None:
        """Write the attempt's number, unless a newer one was written while this write was hanging."""
        with self._fencing:
            if attempt <= self._fenced:
                return None
            try:
                write_atomically(self._directory.attempt_file, str(attempt).encode(), durable=False)
            except OSError as error:
                return error
            self._fenced = attempt
            return None

    async def _give_back(self, effect: do.GiveBack) -> None:
        gone, why = False, ""
        try:
            gone = await asyncio.to_thread(give_back, effect.job, effect.node)
        except ClusterUnavailableError as error:
            why = str(error)
        self._do(self._machine.given_back(effect.node, gone, why, self.now()))

    async def _ask_why_ending(self, effect: do.WhyEnding) -> None:
        why = await asyncio.to_thread(self._why_ending)
        by = ""
        if why == "cancelled":
            by = "a signal" if self._allocation.startswith("local-") else "scancel"
        self._do(self._machine.why_ending(effect, why, by, self.now()))

    async def _ask_superseded(self) -> None:
        self._do(self._machine.superseded(await self._hold.is_superseded(), self.now()))

    async def _look_at_storage(self) -> None:
        try:
            checkpoints = CheckpointDirectory(self._directory.checkpoints)
            await asyncio.to_thread(renew, checkpoints.root)  # this node's view of it may be outdated
            sizes = await asyncio.to_thread(checkpoints.sizes)
            rollbacks = await asyncio.to_thread(checkpoints.rollbacks)
        except (OSError, BadCheckpoint) as error:
            self._note("", f"checkpoints on shared storage: {error}")
            return
        self._do(self._machine.found_on_storage(sizes, rollbacks, self.now()))

    async def _tick(self) -> None:
        took_s = 0.0
        while not self._over.is_set():
            # Other tasks get at least as much time as a tick takes.
            await asyncio.sleep(max(self._machine.interval_s - took_s, took_s))
            began = self.now()
            self._do(self._machine.tick(began, storage_waits_s=self._hold.waits_s))
            took_s = self.now() - began

    async def _await_successor(self) -> None:
        await self._hold.taken_over()
        self._give_way()

    def _give_way(self) -> None:
        """Stop, because another supervisor has taken over: this one may no longer decide or end anything."""
        self.superseded = True
        self._over.set()

    # The life of an epoch.

    async def run(
        self, listeners: Sequence[socket.socket], announce: list[str], allocation: str, node: str, pid: int
    ) -> None:
        """Announce the endpoint, and supervise until the end. Raises the error that broke it."""
        self._allocation = allocation
        acceptor = Acceptor(self._secret, self.state.active + self.state.spares)
        doors = [
            Listener(lambda come: self._spawn(self._serve(acceptor, come)), listener)
            for listener in listeners
        ]
        port = doors[0].port
        place = endpoint.Endpoint(self._hold.epoch, tuple(announce), port, node, allocation, pid)
        endpoint.announce(self._directory.epochs, place)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._do(self._machine.terminated(self.now())))
        loop.add_signal_handler(signal.SIGUSR2, lambda: self._do(self._machine.warned(self.now())))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the batch process has blocked them
        self._do(self._machine.start(self.now()))
        for work in (self._tick(), self._await_successor(), self._look_at_storage()):
            self._spawn(work)
        try:
            await self._over.wait()
        finally:
            for door in doors:
                door.close()
            for task in self._tasks:
                task.cancel()
            for connection in list(self._channels.values()):
                connection.close()
            self._write_last_words()
        if self._failure is not None:
            raise self._failure

    def _write_last_words(self) -> None:
        """Write the journal's end and the outcome; on a full disk, into the space reserved for them."""
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
        """Tell the batch script how to end the Slurm job."""
        over = self.state.ended or self.state.phase is Phase.REQUEUED
        outcome = {
            "state": self.state.public_state,
            # A run that Slurm interrupts has not succeeded, and its job must not look as if it had.
            "exit_code": self.state.exit_code if over else SubmissionError.exit_code,
            "exclude": sorted(self.state.excluded),
            "lost": sorted(n.name for n in self.state.nodes.values() if n.role is Role.FAILED),
        }
        write_json(self._directory.outcome_file, outcome)

    # Agents and operators.

    async def _serve(self, acceptor: Acceptor, come: Connection) -> None:
        if (entered := await acceptor.enter(come)) is None:
            return
        connection, first = entered
        match first:
            case msg.Ask():
                await self._answer(connection, first)
            case msg.Hello() if first.allocation == self._allocation:
                await self._serve_agent(connection, first)
            case msg.Hello():  # from an allocation that the run has given back
                connection.send(msg.Leave())
                await connection.drain()
            case _:
                never(first)
        connection.close()

    async def _answer(self, connection: Channel[msg.Said], ask: msg.Ask) -> None:
        """Answer a request before its effects are carried out, because they may end this process."""
        if ask.what == HOW:
            error = self._journal.error
            connection.send(self._machine.condition((error.strerror or "") if error else ""))
            await connection.drain()
            return
        answer, effects = self._machine.asked(ask, self.now())
        connection.send(answer)
        self._do(effects)
        await connection.drain()

    async def _serve_agent(self, connection: Channel[msg.Said], hello: msg.Hello) -> None:
        node = hello.node
        before = self._channels.get(node)
        self._channels[node] = connection
        if before is not None:
            before.close()
        number = next(self._numbers)
        self._do(self._machine.joined(node, number, hello, self.now()))
        why = await connection.listen(partial(self._hear, node, number))
        self._strangers.left(node)
        log.info("%s: %s: %s", node, type(why).__name__, why)
        if self._channels.get(node) is connection:
            del self._channels[node]
        reset = not isinstance(why, ConnectionClosed)
        self._do(self._machine.closed(node, number, self.now(), reset=reset))

    def _hear(self, node: str, number: int, message: msg.Said) -> None:
        """Handle a message that came over the connection of this number."""
        match message:
            case msg.Strange():
                self._strangers.heard(node, message)
            case msg.Hello() | msg.Ask():
                self._strangers.heard(node, msg.out_of_place(message))
            case _:
                self._do(self._machine.heard(node, number, message, self.now()))
