#!/usr/bin/env python3
"""What it takes one supervisor to tell all nodes to stop, to hear that they have, and to tell them to launch:
processor seconds, which hold on a busy machine too.

The real supervisor with its journal, and a real TCP connection and seals for each node, 8 ranks each. The
other ends are in a process that reads nothing, so what agents take is not in it; the system calls are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import CadenceReport, RankReport, beat_of, encode, read_said
from jurymast.core.state.run import Phase
from jurymast.journal import first_events, replay
from jurymast.supervisor.real_io import RealIo
from jurymast.supervisor.supervisor import Hold, Supervisor
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel, Connection
from jurymast.wire.protocol import Seal
from support.fleet import RANKS, run_directory

NODES = (100, 500, 2000, 5000, 12500)
QUICK_NODES = (100, 500)
ROUNDS = 3  # each with a new run: one that fails again and again waits in between
PORT, LIMIT_S = 29500, 60.0
KEY = bytes(32)
STOP, LAUNCH = (
    "from a verdict until all are told to stop",
    "from the last answer until all are told to launch",
)
WANTED_S = {STOP: 0.25, LAUNCH: 2.0}


def spares(nodes: int) -> int:
    return max(16, nodes // 64)


class Crowd:
    """A supervisor, and who has connected to it. `times`: processor seconds of each round."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.nodes = nodes
        self.names = [f"n{number:05d}" for number in range(nodes + spares(nodes))]
        directory, allocation = run_directory(folder, self.names, nodes)
        endpoint.claim(directory.epochs, 1)
        self._allocation = allocation.key
        io = RealIo(directory, allocation, lambda: replay(directory))
        self.supervisor = Supervisor(io, replay(directory), io.journal(1), Hold(io, 1))
        for event in first_events(directory, self.supervisor.now(), ""):
            self.supervisor.feed(event)
        self.supervisor.feed(ev.SupervisorStarted(t=self.supervisor.now(), epoch=1, node=allocation.host))
        self.supervisor.feed(
            ev.AllocationStarted(
                t=self.supervisor.now(), slurm_job=allocation.job, restarts=0, nodes=allocation.nodes,
                host=allocation.host, eligible_at=allocation.eligible_at,
            )
        )  # fmt: skip
        self.times: dict[str, float] = {}
        self._machine, self._state = self.supervisor.machine, self.supervisor.state
        self._connections: dict[str, tuple[Connection, Seal]] = {}
        self._tasks: list[asyncio.Task[Exception]] = []

    async def connect(self, listener: socket.socket) -> None:
        waiting = list(reversed(self.names))
        listener.setblocking(False)
        self.supervisor._do(self._machine.start(self.supervisor.now()))
        while waiting:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._enter(waiting.pop(), Connection(sock))
        await self._until(Phase.LAUNCHING)

    def _enter(self, name: str, come: Connection) -> None:
        number = len(self._connections) + 1
        channel = Channel(come, KEY, KEY, read_said)
        self.supervisor._channels[name] = channel
        self._connections[name] = come, Seal(KEY)
        self._tasks.append(
            asyncio.ensure_future(channel.listen(partial(self.supervisor._hear, name, number)))
        )
        hello = msg.Hello(
            node=name, allocation=self._allocation, address="127.0.0.1", incarnation=name, pid=number,
            boot_id="b", gpus=RANKS, attempt=0, ranks="waiting", store_port=PORT, pids=(), data_port=1,
            copies=(),
        )  # fmt: skip
        self.supervisor._do(self._machine.on_agent_joined(name, number, hello, self.supervisor.now()))

    async def _until(self, phase: Phase) -> None:
        """Told, too. The clock ticks as always."""
        end = time.monotonic() + LIMIT_S
        while self._state.phase is not phase or not self._machine.launching._told:
            if time.monotonic() > end:
                raise SystemExit(f"{self.nodes} nodes: no launch within {LIMIT_S:.0f} s")
            await asyncio.sleep(self._machine.interval_s)
            self.supervisor._do(self._machine.on_time(self.supervisor.now()))

    def say(self, nodes: Sequence[str], message: msgspec.Struct) -> float:
        """All say the same; processor seconds that it takes to hear them, from their bytes on."""
        payload, frames = encode(message), []
        for name in nodes:
            connection, seal = self._connections[name]
            frames.append((connection, struct.pack(">I", len(payload)) + seal.tag(payload) + payload))
        began = time.process_time()
        for connection, frame in frames:
            assert connection.on_bytes is not None
            connection.unread += frame
            connection.on_bytes()
        return time.process_time() - began

    async def recover(self) -> None:
        """The ranks start and train; a node is lost, all are stopped, and launched anew."""
        state, supervisor = self._state, self.supervisor
        placed = state.placement
        self.say(placed, msg.Started(attempt=state.attempt, pids=tuple(range(RANKS))))
        assert state.phase is Phase.RUNNING
        rank = RankReport(9, 9, True, "training", 0.31, 0.31, 1.0, 0, 0.0, 0.0)
        beat = beat_of(state.attempt, [rank] * RANKS, CadenceReport(0, 0))
        self.say(placed, beat)
        self.times["hear a heartbeat, from its bytes on, and answer it if it is due"] = self.say(
            placed, beat
        ) / len(placed)
        victim, others = placed[0], list(placed[1:])
        began = time.process_time()
        lost = ev.NodeLost(t=supervisor.now(), node=victim, how="silent", silent_s=1.5)
        supervisor._do(self._machine.record(lost))
        self.times[STOP] = time.process_time() - began
        stopped = msg.Stopped(attempt=state.attempt, store_port=PORT)
        heard_s = self.say(others[:-1], stopped) / (len(others) - 1)
        self.times["hear that one has stopped, from its bytes on"] = heard_s
        began = time.process_time()
        self.say(others[-1:], stopped)
        await self._until(Phase.LAUNCHING)
        self.times[LAUNCH] = time.process_time() - began

    async def close(self) -> None:
        for connection, _ in self._connections.values():
            connection.abort()
        await asyncio.gather(*self._tasks)


async def measure(nodes: int, folder: Path, listener: socket.socket) -> dict[str, float]:
    crowd = Crowd(folder, nodes)
    await crowd.connect(listener)
    await crowd.recover()
    await crowd.close()
    return crowd.times


def other_ends(place: tuple[str, int], count: int, over: int) -> None:
    """The other ends, until nobody is on this one any more."""
    ends = [socket.create_connection(place) for _ in range(count)]
    os.read(over, 1)
    del ends
    os._exit(0)


def measured(nodes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="jurymast-bench-") as folder:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        over, hold = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hold)
            other_ends(listener.getsockname()[:2], nodes + spares(nodes), over)
        os.close(over)
        try:
            return asyncio.run(measure(nodes, Path(folder) / "fleet", listener))
        finally:
            listener.close()
            os.close(hold)
            os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, nargs="*", help=f"sizes; {NODES} unless said otherwise")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_NODES} nodes, for the shape")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[Row] = []
    targets: list[Target] = []
    for nodes in arguments.nodes or (QUICK_NODES if arguments.quick else NODES):
        rounds = [measured(nodes) for _ in range(ROUNDS)]
        for what in rounds[0]:
            samples = [times[what] for times in rounds]
            found = common.spread(samples)
            rows.append(
                Row(
                    f"{nodes} nodes", JURYMAST, what, "s", found.median, found.low, found.high, found.n,
                    samples=samples,
                )
            )  # fmt: skip
            common.progress(f"{nodes} nodes: {what}: {found.median:.6f} s")
            if what in WANTED_S:
                targets.append(Target(f"{nodes} nodes: {what}", found.median, WANTED_S[what], "lower"))
    about = {**common.machine(), "rounds": ROUNDS, "ranks_per_node": RANKS, "quick": arguments.quick}
    common.print_report("telling", rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
