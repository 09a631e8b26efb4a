"""The supervisor: `core.supervision` decides; this module turns connections, answers of files and of Slurm,
and signals into events, and carries out effects. It holds its epoch: it shows by a pulse that it lives, and
checks whether another supervisor has taken over.

What it needs of the world comes from `supervisor.io`, so that the simulator runs this very code.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from jurymast import background
from jurymast.core.nodes.acknowledgement import Disk
from jurymast.core.run.ends import lost_nodes
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.message import Strangers
from jurymast.core.state.run import Phase, RunState
from jurymast.core.supervision.machine import Supervision
from jurymast.errors import (
    AuthenticationError,
    ClusterUnavailableError,
    JurymastError,
    ProtocolError,
    RunDirectoryError,
    SubmissionError,
    never,
)
from jurymast.supervisor.io import Io, Journal, PeerChannel, Sender
from jurymast.wire.channel import ConnectionClosed
from jurymast.wire.endpoint import PULSE_INTERVAL_S
from jurymast.wire.protocol import HANDSHAKE_LIMIT_S

log = logging.getLogger("jurymast.supervisor")

# ---- the epoch

RETRY_S = 0.5
# Between two looks at shared storage that could not be read.
LOOK_AGAIN_S = 5.0
ANSWER_LIMIT_S = 600.0


def _monotonic() -> float:
    return asyncio.get_running_loop().time()


class Hold:
    """Holds `epoch`. While `silent`, there is no pulse and another supervisor may take over. `looked_at`:
    when the last look began that found no newer epoch, by the loop's clock."""

    def __init__(self, io: Io, epoch: int) -> None:
        self.epoch = epoch
        self.silent = False
        self.looked_at = -math.inf
        self._asked_at: float | None = None
        self._io = io
        self._keeping: asyncio.Future[None] | None = None

    def begin(self) -> None:
        self._keeping = background.start(self._keep(), background.to_its_awaiter)

    @property
    def waits_s(self) -> float:
        """Seconds for which the run directory has not answered; 0.0 if nothing was asked."""
        return 0.0 if self._asked_at is None else _monotonic() - self._asked_at

    async def taken_over(self) -> None:
        """Wait until another supervisor has taken over."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def _keep(self) -> None:
        """Keep the pulse until another supervisor has taken over. Threads do this, because a shared file
        system that hangs must not stop a recovery. Nor does one that fails: decisions of a superseded
        supervisor reach nobody, because agents listen to the newest that they find."""
        for count in itertools.count():
            self._asked_at = began = _monotonic()
            try:
                if await self._newest() > self.epoch:  # checked first, so as not to overwrite a newer pulse
                    log.info("epoch %d: a newer supervisor has taken over", self.epoch)
                    return
                self.looked_at = began
                if not self.silent:
                    await self._io.on_disk(partial(self._io.files.pulse, self.epoch, count))
            except OSError as error:
                log.warning("epoch %d: %s", self.epoch, error)
            self._asked_at = None
            await asyncio.sleep(PULSE_INTERVAL_S)

    async def is_superseded_now(self) -> bool:
        """Return whether a newer supervisor exists: one that was stopped for a while may have a successor.
        Asked before what nobody can take back, which only the newest may do. Raises OSError if the file
        system does not say."""
        return await self._newest() > self.epoch

    async def is_superseded(self) -> bool:
        """As `is_superseded_now`, before the job is ended. Waits for the file system, to which the outcome is
        written as well. Raises OSError if it does not answer: then this supervisor ends without ending the
        job, which is left to the process that started it."""
        end = _monotonic() + ANSWER_LIMIT_S
        while True:
            try:
                return await self.is_superseded_now()
            except OSError as error:
                log.warning("epoch %d: cannot find out whether it is the newest: %s", self.epoch, error)
                if _monotonic() > end:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _newest(self) -> int:
        """Return the newest epoch. Raises OSError, also if not even our own epoch is visible: then this is
        another directory, or an outdated view of it."""
        newest = await self._io.on_disk(self._io.files.newest_epoch)
        if newest < self.epoch:
            raise OSError(f"{self._io.files.root} does not show epoch {self.epoch}")
        return newest


# ---- the supervisor

HOW = "how"  # asks for the run's condition; nothing is done
# Whoever makes a request waits for the answer for less than `wire.channel.ASK_LIMIT_S`.
CONFIRM_LIMIT_S, CONFIRM_EVERY_S = 3.0, 0.02


class Supervisor:
    """Runs one epoch. `run` returns when the run is over, requeued, or taken over by a newer epoch. Every
    event goes to the machine, and the effects that it returns to `_do`. Made in the running loop."""

    def __init__(self, io: Io, state: RunState, journal: Journal, hold: Hold) -> None:
        self._io = io
        self.state = state
        self._journal = journal
        self._hold = hold
        # The journal stays in order even if this node's clock is behind that of an earlier supervisor.
        self._monotonic = asyncio.get_running_loop().time
        self._clock_offset_s = max(io.wall(), state.now) - self._monotonic()
        self.machine = Supervision(state, io.files.root, self.now())
        self._todo: deque[do.Effect] = deque()
        self._stands_still = False
        self._channels: dict[str, PeerChannel] = {}
        self._numbers = itertools.count(1)  # of connections
        self._strangers = Strangers(self._note)
        self._unconfirmed: list[tuple[Sender, msg.Accepted]] = []
        self._working = False
        self._fencing = threading.Lock()
        self._fenced = 0
        self._failure: BaseException | None = None
        self.superseded = False
        self._asked_why: do.WhyEnding | None = None  # the newest question
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def requeues(self) -> bool:
        """Whether the job is to be requeued when this supervisor has ended."""
        return self.machine.departure.requeues

    def now(self) -> float:
        """Return Unix time in seconds, set once and then advanced by the monotonic clock."""
        return self._monotonic() + self._clock_offset_s

    def feed(self, event: ev.Event) -> None:
        self._do(self.machine.record(event))

    def _note(self, node: str, text: str) -> None:
        self._do(self.machine.note(node, text, self.now()))

    async def read_attempt(self) -> None:
        """Take in the number of the newest attempt in the run directory. A file that cannot be read is tried
        again, as storage may have a moment's trouble."""
        newest, why = None, ""
        for pause_s in (RETRY_S, RETRY_S, 0.0):
            try:
                newest = await self._io.on_disk(self._io.files.newest_attempt)
                break
            except RunDirectoryError as error:
                why = str(error)
                await asyncio.sleep(pause_s)
        self._do(self.machine.on_attempt_read(newest, why, self.now()))

    # Effects.

    def _do(self, effects: Sequence[do.Effect]) -> None:
        self._todo.extend(effects)
        if not self._stands_still:
            self._go_on()

    def _go_on(self) -> None:
        """Carry out effects in order, unless this process stands still until the journal is on disk;
        successive messages to one node are sent together."""
        self._stands_still = False
        while self._todo:
            effect = self._todo.popleft()
            if isinstance(effect, do.Send):
                self._tell(effect.node, effect.message, *self._more_to(effect.node))
                continue
            self._carry_out(effect)
            if isinstance(effect, do.Journal) and effect.flush:
                self._stands_still = not self._io.written(self._journal, self._go_on)
                if self._stands_still:
                    return
        if self.machine.has_work and not self._working:
            self._working = True
            self._spawn(self._work())

    def _more_to(self, node: str) -> Iterator[msg.ToAgent]:
        while self._todo and isinstance(one := self._todo[0], do.Send) and one.node == node:
            self._todo.popleft()
            yield one.message

    def _carry_out(self, effect: do.Effect) -> None:
        match effect:
            case do.Answer():
                go_on = msg.GoOn(
                    time=self._io.wall(), patience_s=effect.patience_s, heard=effect.heard,
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
            case do.AskForNode():
                self._spawn(self._ask_for_node(effect))
            case do.TopUpPool():
                self._spawn(self._top_up_pool(effect))
            case do.LookAtSmallJobs():
                self._spawn(self._look_at_small_jobs())
            case do.LookAtNodes():
                self._spawn(self._look_at_nodes(effect))
            case do.LookAtReservations():
                self._spawn(self._look_at_reservations(effect))
            case do.EndSmallJob():
                self._spawn(self._end_small_job(effect.job))
            case do.WhyEnding():
                self._spawn(self._ask_why_ending(effect))
            case do.AskTimeLimit():
                self._spawn(self._ask_time_limit())
            case do.LookAtStorage():
                self._spawn(self._look_at_storage())
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

    def _spawn(self, work: Any) -> None:
        task = background.start(work, self._task_failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _task_failed(self, error: BaseException) -> None:
        """End this supervisor: starting anew from the journal is better than half working."""
        self._failure = self._failure or error
        self._over.set()

    # What takes time.

    async def _work(self) -> None:
        while self.machine.has_work:
            began = self.now()
            self._do(self.machine.work(began))
            now = self.now()
            self.machine.on_work_done(now - began, now)
            await asyncio.sleep(0)  # gives others their turn
        self._working = False

    async def _be_the_newest(self) -> None:
        """Before what nobody can take back. Gives way to a supervisor that has taken over. Raises
        ClusterUnavailableError then, and where nobody knows."""
        try:
            superseded = await self._hold.is_superseded_now()
        except OSError as error:
            why = f"cannot find out whether another supervisor has taken over: {error}"
            raise ClusterUnavailableError(why) from error
        if superseded:
            self._give_way()
            raise ClusterUnavailableError("another supervisor has taken over")

    async def _fence(self, attempt: int) -> None:
        """Write the attempt's number in a thread, because storage may hang."""
        why = ""
        try:
            if await self._io.on_disk(partial(self.write_attempt, attempt)):
                self._give_way()
                return
        except OSError as error:
            why = f"cannot write {self._io.files.attempt_file}: {error}"
        self._do(self.machine.on_fenced(attempt, why, self.now()))

    def write_attempt(self, attempt: int) -> bool:
        """Write the attempt's number, unless a newer one was written while this write was hanging. Return
        True instead if another supervisor has taken over: the number is its to write. Raises OSError."""
        with self._fencing:
            if attempt <= self._fenced:
                return False
            if self._io.files.newest_epoch() > self._hold.epoch:
                return True
            self._io.files.save_attempt(attempt)
            self._fenced = attempt
            return False

    async def _give_back(self, effect: do.GiveBack) -> None:
        gone, why = False, ""
        try:
            await self._be_the_newest()
            gone = await self._io.give_back(effect.job, effect.node)
        except ClusterUnavailableError as error:
            why = str(error)
        self._do(self.machine.on_node_given_back(effect.node, gone, why, self.now()))

    async def _ask_for_node(self, effect: do.AskForNode) -> None:
        told, why = None, ""
        try:
            await self._be_the_newest()
            told = await self._io.ask_for_node(effect.number, effect.exclude)
        except JurymastError as error:  # whatever is wrong with options or Slurm here, the run goes on
            why = str(error)
        self._do(self.machine.on_node_asked(effect.number, told, why, self.now()))

    async def _top_up_pool(self, effect: do.TopUpPool) -> None:
        jobs, why = list[str](), ""
        try:
            await self._be_the_newest()
            jobs, why = await self._io.top_up_pool(effect.exclude)
        except JurymastError as error:
            why = str(error)
        self._do(self.machine.on_pool_topped_up(jobs, why, self.now()))

    async def _look_at_small_jobs(self) -> None:
        jobs = None
        try:
            jobs = await self._io.small_jobs()
        except ClusterUnavailableError as error:
            log.warning("small jobs: %s", error)
        self._do(self.machine.on_small_jobs(jobs, self.now()))

    async def _look_at_nodes(self, effect: do.LookAtNodes) -> None:
        draining = None
        try:
            draining = await self._io.draining(effect.nodes)
        except ClusterUnavailableError as error:
            log.warning("nodes: %s", error)
        self._do(self.machine.on_nodes_seen(draining, self.now()))

    async def _look_at_reservations(self, effect: do.LookAtReservations) -> None:
        found = None
        try:
            found = await self._io.reservations(effect.nodes)
        except ClusterUnavailableError as error:
            log.warning("reservations: %s", error)
        self._do(self.machine.on_reservations_seen(found, self.now()))

    async def _end_small_job(self, job: str) -> None:
        try:
            await self._be_the_newest()
            await self._io.end_small_job(job)
        except ClusterUnavailableError as error:
            log.warning("small job %s: %s", job, error)

    async def _ask_why_ending(self, effect: do.WhyEnding) -> None:
        self._asked_why = effect
        ending = await self._io.why_ending()
        if self._asked_why is not effect:
            return
        by = ""
        if ending.why == "cancelled":
            by = "a signal" if self._io.allocation.startswith("local-") else "scancel"
        self._do(self.machine.on_end_explained(effect, ending.why, by, self.now(), ending.kill_in_s))

    async def _ask_time_limit(self) -> None:
        self._do(self.machine.on_time_limit(await self._io.ends_in_s(), self.now()))

    async def _ask_superseded(self) -> None:
        by_another = await self._hold.is_superseded()
        self._do(self.machine.on_superseded(by_another, self.now(), self._disk()))

    async def _look_at_storage(self) -> None:
        noted = ""
        while True:
            try:
                sizes, rollbacks = await self._io.on_disk(partial(self._io.files.checkpoints, self.state))
                break
            except OSError as error:
                if str(error) != noted:
                    self._note("", f"checkpoints on shared storage: {error}")
                noted = str(error)
            await asyncio.sleep(LOOK_AGAIN_S)
        self._do(self.machine.on_storage_read(sizes, rollbacks, self.now()))

    def _disk(self) -> Disk:
        hold, journal = self._hold, self._journal
        looked_at = hold.looked_at + self._clock_offset_s
        return Disk(hold.waits_s, journal.appended, journal.written, looked_at)

    async def _tick(self) -> None:
        took_s = 0.0
        while not self._over.is_set():
            # Other tasks get at least as much time as a tick takes.
            await asyncio.sleep(max(self.machine.interval_s - took_s, took_s))
            began = self.now()
            self._make_room()
            self._do(self.machine.on_time(began, self._disk()))
            took_s = self.now() - began

    def _signalled(self, event: Callable[[float], list[do.Effect]]) -> None:
        self._do(event(self.now()))

    async def _await_successor(self) -> None:
        await self._hold.taken_over()
        self._give_way()

    def _give_way(self) -> None:
        """Stop, because another supervisor has taken over: this one may no longer decide or end anything."""
        self.superseded = True
        self._over.set()

    # The life of an epoch.

    async def run(self) -> None:
        """Announce the endpoint, and supervise until the end. Raises the error that broke it."""
        await self._io.serve(self._hold.epoch, self.state, self._accept)
        self._io.on_signals(
            warned=partial(self._signalled, self.machine.on_warning),
            terminated=partial(self._signalled, self.machine.on_sigterm),
        )
        self._do(self.machine.start(self.now()))
        for work in (self._tick(), self._await_successor(), self._look_at_storage()):
            self._spawn(work)
        try:
            await self._over.wait()
        finally:
            self._io.refuse_more()
            for task in list(self._tasks):
                task.cancel()
            for connection in list(self._channels.values()):
                connection.close()
            self._write_last_words()
        if self._failure is not None:
            raise self._failure

    def _make_room(self) -> None:
        """Let the journal's end be written into the space reserved for it, if the disk is full and the agents
        wait for that alone: others may take at once what is given up."""
        if self._journal.error is not None and self.machine.departure.lacks_journal:
            self._io.give_reserve_up()

    def _write_last_words(self) -> None:
        """Write the journal's end and the outcome; on a full disk, into the space reserved for them."""
        if self._journal.error is not None:
            self._io.give_reserve_up()
        self._journal.close()
        if self.superseded or self._failure is not None:
            return
        self._confirm_all()
        try:
            self._write_outcome()
        except OSError:
            self._io.give_reserve_up()
            self._write_outcome()

    def _write_outcome(self) -> None:
        """Tell the batch script how to end the Slurm job."""
        over = self.state.ended or self.requeues
        outcome = {
            "state": Phase.REQUEUED.value if self.requeues else self.state.public_state,
            # A run that Slurm interrupts has not succeeded, and its job must not look as if it had.
            "exit_code": self.state.exit_code if over else SubmissionError.exit_code,
            "exclude": sorted(self.state.excluded),
            "lost": lost_nodes(self.state),
            "step_alone": self.state.step_alone,
        }
        self._io.write_outcome(outcome)

    # Agents and operators.

    def _accept(self, connection: PeerChannel, refused: Callable[[Exception], None]) -> None:
        self._spawn(self.serve(connection, refused))

    async def serve(self, connection: PeerChannel, refused: Callable[[Exception], None]) -> None:
        """Serve a connection until its end; `refused` gets the reason if it is not served."""
        try:
            first = await asyncio.wait_for(connection.receive(), HANDSHAKE_LIMIT_S)
        except (OSError, AuthenticationError, ProtocolError, asyncio.TimeoutError) as error:
            if not isinstance(error, ConnectionError):  # an agent that connected faster elsewhere hangs up
                refused(error)
            connection.close()
            return
        match first:
            case msg.Ask():
                answer, heard_at = self.answer(connection, first), self.now()
                if isinstance(answer, msg.Accepted):
                    await self.confirm(connection, answer, heard_at)
                await connection.drain()
            case msg.Hello() if first.allocation == self._io.allocation:
                await self._serve_agent(connection, first)
            case msg.Hello():  # from an allocation that the run has given back
                connection.send(msg.Leave())
                await connection.drain()
            case _:
                what = first if isinstance(first, msg.Unreadable) else msg.out_of_place(first)
                refused(ProtocolError(f"no greeting: {what}"))
        connection.close()

    def answer(self, connection: Sender, ask: msg.Ask) -> msg.Accepted | msg.Declined | msg.Condition:
        """Carry out a request, and answer it at once; but that it is accepted is for `confirm` to say."""
        if ask.what == HOW:
            error = self._journal.error
            condition = self.machine.condition((error.strerror or "") if error else "")
            connection.send(condition)
            return condition
        answer, effects = self.machine.on_request(ask, self.now())
        if isinstance(answer, msg.Accepted):
            self._unconfirmed.append((connection, answer))
        else:
            connection.send(answer)
        self._do(effects)
        return answer

    async def confirm(self, connection: Sender, answer: msg.Accepted, heard_at: float) -> None:
        """Say that a request is accepted once every later supervisor will know of it. One that has been
        replaced meanwhile hangs up instead."""
        until = self.now() + CONFIRM_LIMIT_S
        while not (known := self.machine.watch.known.until > heard_at) and self.now() < until:
            await asyncio.sleep(CONFIRM_EVERY_S)
        if (connection, answer) in self._unconfirmed:
            self._unconfirmed.remove((connection, answer))
            connection.send(structs.replace(answer, unwritten=not known))

    def _confirm_all(self) -> None:
        """As `confirm`, at this process's end, when all is written that will be."""
        for connection, answer in self._unconfirmed:
            unwritten = self._journal.written < self._journal.appended
            connection.send(structs.replace(answer, unwritten=unwritten))

    async def _serve_agent(self, connection: PeerChannel, hello: msg.Hello) -> None:
        node = hello.node
        before = self._channels.get(node)
        self._channels[node] = connection
        if before is not None:
            before.close()
        number = next(self._numbers)
        self._do(self.machine.on_agent_joined(node, number, hello, self.now()))
        why = await connection.listen(partial(self._hear, node, number))
        self._strangers.left(node)
        log.info("%s: %s: %s", node, type(why).__name__, why)
        if self._channels.get(node) is connection:
            del self._channels[node]
        reset = not isinstance(why, ConnectionClosed)
        self._do(self.machine.on_connection_closed(node, number, self.now(), reset=reset))

    def _hear(self, node: str, number: int, message: msg.Said) -> None:
        """Handle a message that came over the connection of this number."""
        match message:
            case msg.Unreadable():
                self._strangers.heard(node, message)
            case msg.Hello() | msg.Ask():
                self._strangers.heard(node, msg.out_of_place(message))
            case _:
                self._do(self.machine.on_message(node, number, message, self.now()))

    def is_connected(self, node: str) -> bool:
        return node in self._channels


# ---- one epoch


async def supervise(io: Io, made: type[Supervisor] = Supervisor) -> Supervisor | None:
    """Supervise one epoch, with a supervisor of the class `made`. Return it at its end, or None if a newer
    epoch took over. Raises RunDirectoryError or OSError if the run directory cannot be read or written."""
    epoch = await io.claim()
    if epoch is None:
        return None
    hold = Hold(io, epoch)
    hold.begin()  # before a long journal is read, so that agents do not take this supervisor for dead
    state = await io.replayed()
    supervisor = made(io, state, io.journal(epoch), hold)
    if state.epoch == 0:
        for event in io.first_events(supervisor.now()):
            supervisor.feed(event)
    supervisor.feed(
        ev.SupervisorStarted(
            t=supervisor.now(), epoch=epoch, node=io.node, silent_s=io.silent_s(), read=dict(state.lines_read)
        )
    )
    if trouble := io.trouble():
        supervisor.feed(ev.Noted(t=supervisor.now(), message=trouble))
    if state.allocation != io.allocation:
        supervisor.feed(await io.allocation_begun(state, supervisor.now()))
    await supervisor.read_attempt()
    assert state.phase is not Phase.QUEUED
    await supervisor.run()
    return None if supervisor.superseded else supervisor
