"""Thousands of simulated agents in one process: real TCP, the real handshake, real seals, no ranks.

As light as Python allows, so that the supervisor they talk to is the limit: one epoll loop, what all agents
say alike is encoded once, and of what they hear only the wanted keys are read.
"""

from __future__ import annotations

import heapq
import os
import random
import re
import resource
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jurymast.cluster.allocation import Allocation
from jurymast.core.judges.silence import patience_s
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ImageId
from jurymast.core.state.messages import CadenceReport, RankReport, Room, beat_of, encode
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint
from jurymast.wire.protocol import HEAD_BYTES, MAGIC, NONCE_BYTES, SUPERVISOR, Handshake, Seal

RANKS = 8
HEARTBEAT_S = 0.5
STEP_S = 1.0
SAVE_EVERY = 30  # steps
# After which a node has the replica that it is to make of another's image, in seconds: from, to.
COPIES_S = (0.5, 20.0)
IMAGE_BYTES, COMMON_BYTES = 10**10, 10**6
# What a node takes to start ranks, and to stop them, in seconds: from, to.
STARTS_S, STOPS_S = (0.05, 0.15), (0.02, 0.08)
RECONNECT_S = 0.1
PENDING_MAX = 4000  # connections under way at the same time: what a listener holds
LOOK_S = 0.02
_PATIENCE = re.compile(rb'"patience_s":([0-9.]+)')
# With what arrives comes when it did, by the kernel: this process may read it later. As in Linux' socket.h.
SO_TIMESTAMPNS = 35
_STAMP = struct.Struct("@ll")  # seconds since the epoch, nanoseconds
_STAMP_ROOM = socket.CMSG_SPACE(_STAMP.size)


@dataclass(frozen=True)
class Heard:
    """An order: when it had arrived, by the kernel, and when this process read it. `alone`: nothing else had
    arrived by then, else the kernel knows only of the newest."""

    arrived_at: float = 0.0
    at: float = 0.0
    alone: bool = True


@dataclass
class Agent:
    """One node. `ranks`: waiting, starting, running; times are time.monotonic()."""

    name: str
    pid: int
    offset_s: float
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    ranks: msg.RanksState = "waiting"
    attempt: int = 0
    connection: socket.socket | None = None
    greeted: int = 0  # 0 nothing, 1 proof sent, 2 in
    seal: Seal | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    heard_at: float = 0.0
    beat_at: float = 0.0
    beat_answered_at: float = 0.0
    silent_s: float = 0.0  # of its supervisor, before it looks for another
    silent: bool = False  # its power is gone
    arrived_at: float = 0.0  # the newest bytes, in its kernel
    launch: Heard = Heard()
    stop: Heard = Heard()
    answered_at: float = 0.0  # that its ranks have stopped
    connections: int = 0
    rank: int = 0  # its group rank
    world: int = 0  # ranks of all nodes, as of its launch
    saved: int = 0
    schedule: tuple[int, int] = (0, 0)  # number and decision of the newest
    copies: dict[tuple[int, int, str], msg.CopyReport] = field(default_factory=dict)  # (step, rank, part)


def pids(agent: Agent) -> tuple[int, ...]:
    return tuple(agent.pid * 10 + rank for rank in range(RANKS))


class Fleet:
    """The agents of a run."""

    def __init__(
        self, root: Path, secret: bytes, allocation: str, names: list[str], heartbeat_s: float
    ) -> None:
        self._epochs, self._secret, self._allocation = root / "epochs", secret, allocation
        self.heartbeat_s = heartbeat_s
        self._silent_s = patience_s(heartbeat_s, len(names))
        self._due: list[tuple[float, int, str]] = []
        chance = random.Random(1)
        self.agents = {
            name: Agent(name, 1000 + number, chance.random() * heartbeat_s)
            for number, name in enumerate(names)
        }
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Agent] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._waiting: deque[tuple[float, Agent]] = deque()
        self._pending = self._world = 0  # connections; ranks of all nodes
        self._place: tuple[str, int] | None = None
        self._chance = chance
        self.hung_up = 0
        self.reconnect_s = RECONNECT_S
        self.saves = True
        self.bytes_out = self.bytes_in = self.frames_in = self.frames_out = 0
        self.begun = 0.0
        self._wall_s = time.time() - time.monotonic()
        # From the newest heartbeat to an answer, and from one answer to the next, in seconds.
        self.round_trips: list[float] = []
        self.silences: list[float] = []
        self._beats: dict[tuple[int, bool, tuple[int, int]], bytes] = {}
        self._beats_step = -1
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    # ---- life

    def start(self, within_s: float = 0.0) -> None:
        """All connect, spread over so many seconds."""
        now = self.begun = time.monotonic()
        for number, agent in enumerate(self.agents.values()):
            self._waiting.append((now + within_s * number / len(self.agents), agent))

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Serve all agents until the condition holds; False when it took longer than the limit."""
        now = time.monotonic()
        end, look_at = now + limit_s, now
        while now < end:
            self.turn()
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_S  # it may look at all agents
                if condition():
                    return True
        return False

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def turn(self) -> None:
        now = time.monotonic()
        self._connect_due(now)
        while self._later and self._later[0][0] <= now:
            _, _, action = heapq.heappop(self._later)
            action()
        self._beat_due(now)
        for descriptor, what in self._poll.poll(0.002):
            agent = self._by_descriptor.get(descriptor)
            if agent is not None:
                self._serve(agent, what)

    def close(self) -> None:
        for agent in self.agents.values():
            self._drop(agent)
        self._poll.close()

    @property
    def healthy(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if not agent.silent]

    def all_in(self) -> bool:
        return all(agent.greeted == 2 and agent.connection is not None for agent in self.healthy)

    def runs(self, nodes: int, attempt: int) -> bool:
        """Whether so many run the attempt, or a later one."""
        return sum(a.ranks == "running" and a.attempt >= attempt for a in self.healthy) >= nodes

    # ---- faults

    def crash(self, name: str) -> None:
        """Its kernel closes the connection with a reset; it never comes back."""
        agent = self.agents[name]
        agent.silent = True
        if agent.connection is not None:
            linger = struct.pack("ii", 1, 0)
            agent.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._drop(agent)

    def lose_power(self, name: str) -> None:
        """Its connection stays, and nothing is heard of it any more."""
        self.agents[name].silent = True

    # ---- connections

    def _connect_due(self, now: float) -> None:
        while self._waiting and self._pending < PENDING_MAX and self._waiting[0][0] <= now:
            _, agent = self._waiting.popleft()
            if agent.silent:
                continue
            place = self.place()
            if place is None:
                self._waiting.append((now + RECONNECT_S, agent))
                continue
            connection = socket.socket()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            connection.connect_ex(place)
            agent.connection, agent.greeted = connection, 0
            agent.inbox.clear()
            agent.outbox.clear()
            agent.heard_at = now
            agent.connections += 1
            self._pending += 1
            self._by_descriptor[connection.fileno()] = agent
            self._poll.register(connection, select.EPOLLIN)

    def place(self) -> tuple[str, int] | None:
        if self._place is None:
            found = endpoint.find(self._epochs)
            self._place = None if found is None else ("127.0.0.1", found.port)
        return self._place

    def forget_place(self) -> None:
        """The supervisor is another one from now on."""
        self._place = None

    def _drop(self, agent: Agent, again: bool = False) -> None:
        if agent.connection is None:
            return
        if agent.greeted < 2:
            self._pending -= 1
        del self._by_descriptor[agent.connection.fileno()]
        self._poll.unregister(agent.connection)
        agent.connection.close()
        agent.connection = None
        if again:
            self._place = None
            pause_s = self.reconnect_s * (0.5 + self._chance.random())
            self._waiting.append((time.monotonic() + pause_s, agent))

    def _serve(self, agent: Agent, what: int) -> None:
        assert agent.connection is not None
        if what & select.EPOLLOUT:
            self._flush(agent)
        if not what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data, stamps, _, _ = agent.connection.recvmsg(65536, _STAMP_ROOM)
        except BlockingIOError:
            return
        except OSError:
            data, stamps = b"", []
        if not data:
            self._drop(agent, again=not agent.silent)
            return
        if agent.silent:
            return
        for _, _, stamp in stamps:
            seconds, nanoseconds = _STAMP.unpack(stamp)
            agent.arrived_at = seconds + 1e-9 * nanoseconds - self._wall_s
        agent.inbox += data
        self.bytes_in += len(data)
        if agent.greeted < 2:
            self._greet(agent)
        if agent.greeted == 2:
            self._read(agent)

    def _greet(self, agent: Agent) -> None:
        assert agent.connection is not None
        if agent.greeted == 0 and len(agent.inbox) >= len(MAGIC) + NONCE_BYTES:
            theirs = bytes(agent.inbox[len(MAGIC) : len(MAGIC) + NONCE_BYTES])
            del agent.inbox[: len(MAGIC) + NONCE_BYTES]
            ours = secrets.token_bytes(NONCE_BYTES)
            shaking = Handshake(self._secret, SUPERVISOR, theirs, ours)
            agent.seal = Seal(shaking.made(b"to-server"))
            agent.greeted = 1
            self._write(agent, ours + shaking.made(b"client"))
        elif agent.greeted == 1 and len(agent.inbox) >= NONCE_BYTES:
            del agent.inbox[:NONCE_BYTES]
            agent.greeted = 2
            self._pending -= 1
            agent.heard_at = time.monotonic()
            agent.silent_s = self._silent_s
            self._say(agent, self._hello(agent))
            heapq.heappush(self._due, (agent.heard_at + agent.offset_s, agent.connections, agent.name))

    def _hello(self, agent: Agent) -> msg.Hello:
        return msg.Hello(
            node=agent.name, allocation=self._allocation, address="127.0.0.1",
            incarnation=agent.incarnation, pid=agent.pid, boot_id="b", gpus=RANKS, attempt=agent.attempt,
            ranks=agent.ranks, store_port=29500, pids=pids(agent) if agent.ranks == "running" else (),
            data_port=1, copies=tuple(agent.copies.values()),
        )  # fmt: skip

    # ---- words

    def _say(self, agent: Agent, message: msg.ToSupervisor) -> None:
        self._seal(agent, encode(message))

    def _seal(self, agent: Agent, payload: bytes) -> None:
        assert agent.seal is not None
        tag = agent.seal.tag(payload)
        self.frames_out += 1
        self._write(agent, struct.pack(">I", len(payload)) + tag + payload)

    def _write(self, agent: Agent, data: bytes) -> None:
        if agent.connection is None:
            return
        self.bytes_out += len(data)
        if agent.outbox:
            agent.outbox += data
            return
        try:
            sent = agent.connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # shows at the next read
        if sent < len(data):
            agent.outbox += data[sent:]
            self._poll.modify(agent.connection, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, agent: Agent) -> None:
        assert agent.connection is not None
        try:
            sent = agent.connection.send(agent.outbox)
        except OSError:
            return
        del agent.outbox[:sent]
        if not agent.outbox:
            self._poll.modify(agent.connection, select.EPOLLIN)

    def _beat_due(self, now: float) -> None:
        step = int((now - self.begun) / STEP_S)
        if step != self._beats_step:
            self._beats, self._beats_step = {}, step
        while self._due and self._due[0][0] <= now:
            at, connections, name = heapq.heappop(self._due)
            agent = self.agents[name]
            if agent.connections != connections or agent.connection is None or agent.silent:
                continue
            if now - agent.heard_at > agent.silent_s:  # as agents do: this supervisor is gone
                self.hung_up += 1
                self._say(agent, msg.HangsUp())
                self._drop(agent, again=True)
                continue
            missed = (
                now - at
            ) // self.heartbeat_s  # while this process was late: agents do not drift together
            heapq.heappush(self._due, (at + (missed + 1) * self.heartbeat_s, connections, name))
            agent.beat_at = time.monotonic()
            self._seal(agent, self._beat(agent, step))
            if self.saves and agent.ranks == "running" and step // SAVE_EVERY > agent.saved:
                agent.saved = step // SAVE_EVERY
                self._save(agent, agent.saved * SAVE_EVERY)

    def _beat(self, agent: Agent, step: int) -> bytes:
        key = agent.attempt, agent.ranks == "running", agent.schedule
        if key not in self._beats:
            attempt, running, (number, decided) = key
            settled = number if decided else 0
            rank = RankReport(step, step, self.saves, "training", 0.3127, 0.3127, 1.0042, settled, 0.0, 0.0)
            cadence = CadenceReport(number, decided) if self.saves and running else None
            self._beats[key] = encode(beat_of(attempt, [rank] * RANKS if running else [], cadence))
        return self._beats[key]

    def _save(self, agent: Agent, step: int) -> None:
        """All ranks of the node have saved into its memory."""
        ranks = range(agent.rank * RANKS, (agent.rank + 1) * RANKS)
        of = agent.attempt
        self._hold(agent, tuple(self._copy((step, of, rank), agent.world, "memory", "all") for rank in ranks))

    def _copy(self, image: tuple[int, int, int], world: int, tier: str, part: str) -> msg.CopyReport:
        step, attempt, rank = image
        return msg.CopyReport(
            tier=tier, step=step, attempt=attempt, rank=rank, world=world, part=part,
            size_bytes=IMAGE_BYTES, common_bytes=COMMON_BYTES, common_id="alike",
        )  # fmt: skip

    def _hold(self, agent: Agent, copies: tuple[msg.CopyReport, ...]) -> None:
        agent.copies |= {(copy.step, copy.rank, copy.part): copy for copy in copies}
        self._say(agent, msg.Held(copies=copies))

    def _copied(self, agent: Agent, copy: msg.CopyReport) -> None:
        if agent.connection is not None and agent.greeted == 2 and not agent.silent:
            self._hold(agent, (copy,))

    def _read(self, agent: Agent) -> None:
        inbox = agent.inbox
        agent.heard_at = time.monotonic()
        while len(inbox) >= 4:
            (length,) = struct.unpack_from(">I", inbox)
            if len(inbox) < HEAD_BYTES + length:
                return
            payload = bytes(inbox[HEAD_BYTES : HEAD_BYTES + length])
            del inbox[: HEAD_BYTES + length]
            self.frames_in += 1
            if payload.startswith(b'{"do":"go on"'):
                told = _PATIENCE.search(payload)
                agent.silent_s = float(told[1]) if told else self._silent_s
                self.round_trips.append(agent.heard_at - agent.beat_at)
                self.silences.append(agent.heard_at - (agent.beat_answered_at or agent.heard_at))
                agent.beat_answered_at = agent.heard_at
            else:
                self._obey(agent, msg.read_order(payload), Heard(agent.arrived_at, agent.heard_at, not inbox))
            if agent.connection is None:
                return

    def _obey(self, agent: Agent, order: msg.Order, heard: Heard) -> None:
        match order:
            case msg.Launch() if order.attempt > agent.attempt:
                agent.attempt, agent.ranks = order.attempt, "starting"
                agent.launch = heard
                agent.schedule = 0, 0
                agent.rank, agent.world = order.rank, RANKS * order.world
                self._world = agent.world
                self._after(STARTS_S, lambda: self._started(agent, order.attempt))
            case msg.Stop() if agent.attempt <= order.attempt:
                agent.attempt, agent.stop = order.attempt, heard
                self._after(STOPS_S, lambda: self._stopped(agent, order.attempt))
            case msg.Replicate():
                image = ImageId(order.step, order.attempt, order.rank)
                copy = self._copy(image, self._world, "peer", order.part)
                self._after(COPIES_S, lambda: self._copied(agent, copy))
            case msg.Committed():
                agent.copies = {key: copy for key, copy in agent.copies.items() if key[0] >= order.step}
            case msg.CadenceSet():
                agent.schedule = order.schedule.number, order.decided
            case msg.Dismiss():
                self._after(STOPS_S, lambda: self._stopped(agent, agent.attempt))
            case msg.Leave():
                self._drop(agent)
            case msg.Unreadable():
                raise AssertionError(f"the supervisor says what is no order: {order}")

    def _after(self, between_s: tuple[float, float], action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(
            self._later, (time.monotonic() + self._chance.uniform(*between_s), self._number, action)
        )

    def _started(self, agent: Agent, attempt: int) -> None:
        if agent.silent or agent.connection is None or agent.attempt != attempt:
            return
        agent.ranks = "running"
        self._say(agent, msg.Started(attempt=attempt, pids=pids(agent)))
        if self.saves:
            sizes = {"image_bytes": RANKS * IMAGE_BYTES, "own_bytes": RANKS * (IMAGE_BYTES - COMMON_BYTES)}
            self._say(agent, msg.Foreseen(**sizes, room=Room(1 << 42, "its memory")))

    def _stopped(self, agent: Agent, attempt: int) -> None:
        if agent.silent or agent.connection is None:
            return
        agent.ranks, agent.answered_at = "waiting", time.monotonic()
        self._say(agent, msg.Stopped(attempt=attempt, store_port=29500))


@dataclass
class Supervised:
    """A run with `nodes` active nodes: the real supervisor in a process of its own, and the fleet."""

    directory: RunDirectory
    nodes: int
    fleet: Fleet
    log: Path
    supervisor: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "jurymast.supervisor", str(self.directory.root)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(self.log, "ab") as log:
            self.supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self.fleet.forget_place()

    def kill(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()


def run_directory(folder: Path, names: list[str], nodes: int) -> tuple[RunDirectory, Allocation]:
    """Of a run with `nodes` active nodes in an allocation of these, whose last one is the batch host."""
    folder.mkdir(parents=True)
    directory = RunDirectory(folder / "run")
    directory.create()
    directory.save_plan(
        RunPlan(
            run="fleet", name="fleet", directory=str(directory.root), cluster="local", active=nodes,
            spares=len(names) - nodes, ranks_per_node=RANKS, script="train.py", submitted_at=time.time(),
            settings=Settings(heartbeat_s=HEARTBEAT_S, preflight_s=0.0),
        )
    )  # fmt: skip
    allocation = Allocation("local-1", 0, tuple(names), names[-1], time.time())
    allocation.save(directory)
    return directory, allocation


@contextmanager
def supervised(folder: Path, nodes: int, spares: int) -> Iterator[Supervised]:
    names = [f"n{number:05d}" for number in range(nodes + spares)]
    directory, allocation = run_directory(folder, names, nodes)
    fleet = Fleet(directory.root, directory.secret(), allocation.key, names, HEARTBEAT_S)
    run = Supervised(directory, nodes, fleet, folder / "supervisor.log")
    run.start()
    try:
        yield run
    finally:
        run.kill()
        fleet.close()
