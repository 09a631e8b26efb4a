#!/usr/bin/env python3
"""How many nodes one supervisor carries. It runs in a process of its own, with a real journal, behind real
TCP and seals; the agents are simulated, 8 ranks each, heartbeats every 0.5 s (see `tests/support/fleet.py`).

Phases, one after the other: all nodes join within a second; the first launch; half a minute of training; a
connection that is reset; a node that falls silent; twenty nodes at once; the supervisor's process is stopped
for five seconds; another supervisor takes over. Or, after the launch, only a crowd of strangers at the
supervisor's port, and nobody, in turns.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.core.state.messages import read_said
from jurymast.journal import read
from jurymast.wire import stream
from jurymast.wire.protocol import SUPERVISOR
from support.fleet import HEARTBEAT_S, Fleet, Heard, Supervised, supervised

SIZES = (100, 500, 2000, 5000, 12500)
QUICK_SIZES = (100, 500)
SPARE_SHARE = 64  # nodes for each spare; at least 32, for what is lost here
SWITCH = 20
STALL_S = 5.0
WRONGLY = "healthy nodes declared lost"
JOIN_S = 1.0
STEADY_S, QUICK_STEADY_S = 30.0, 5.0
LIMIT_S = 120.0
STRANGERS, TURNS = 3000, 5
CROWD = f"{STRANGERS} strangers"
TURN_S, QUICK_TURN_S, SETTLE_S = 10.0, 4.0, 1.0
COME_EVERY_S, COME_LIMIT_S = 0.1, 30.0


@dataclass
class Lab:
    """A run under load. `rows` gathers what was measured."""

    run: Supervised
    rows: list[Row] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # on purpose

    @property
    def fleet(self) -> Fleet:
        return self.run.fleet

    @property
    def nodes(self) -> int:
        return self.run.nodes

    def row(self, case: str, metric: str, unit: str, value: float | None, note: str = "") -> None:
        name = f"{self.nodes} nodes: {case}"
        self.rows.append(Row(name, JURYMAST, metric, unit, value, value, value, 1, note))
        shown = "-" if value is None else f"{value:.3f}"
        common.progress(f"{name}: {metric} {shown} {unit}")

    def times(self, case: str, metric: str, seconds: list[float]) -> None:
        """p50, p99 and last."""
        ordered = sorted(seconds)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("last", 1.0)):
            value = ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
            self.row(case, f"{metric}, {name}", "s", value)

    def arrivals(self, case: str, metric: str, told: list[Heard], since: float) -> None:
        """When it was in the agents' kernels, as far as those know, and when the one process of all agents
        had read it, too."""
        self.times(case, metric, [one.arrived_at - since for one in told if one.alone])
        last = max((one.at - since for one in told), default=None)
        self.row(case, f"{metric}, read by the last", "s", last)

    def known(self, case: str, what: str, told: list[Heard]) -> None:
        """The share of orders whose arrival the agents' kernels still knew when they were read."""
        if told:
            self.row(case, f"{what} whose arrival is known", "", sum(one.alone for one in told) / len(told))


def waited(one: Lab, what: str, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> float | None:
    """Seconds until it held; None: it never did."""
    began = time.monotonic()
    if one.fleet.run_until(condition, limit_s):
        return time.monotonic() - began
    code = one.run.supervisor.poll()
    ended = "" if code is None else f", and the supervisor has ended ({code})"
    common.progress(f"{one.nodes} nodes: {what}: not within {limit_s:.0f} s{ended}")
    return None


def phases(one: Lab, *, quick: bool, only_crowd: bool) -> bool:
    """False when the run did not get through."""
    if not up(one):
        return False
    if only_crowd:
        crowd(one, QUICK_TURN_S if quick else TURN_S)
        return True
    steady(one, QUICK_STEADY_S if quick else STEADY_S)
    chosen = [agent.name for agent in one.fleet.healthy if agent.ranks == "running"]
    faults: list[tuple[str, list[str], Callable[[str], None]]] = [
        ("one connection reset", chosen[:1], one.fleet.crash),
        ("one silent node", chosen[1:2], one.fleet.lose_power),
        (f"{SWITCH} silent nodes", chosen[2 : 2 + SWITCH], one.fleet.lose_power),
    ]
    for case, victims, hurt in faults:
        if not fault(one, case, victims, hurt):
            return False
    stands_still(one)
    return take_over(one)


def up(one: Lab) -> bool:
    fleet = one.fleet
    if waited(one, "the endpoint", lambda: fleet.place() is not None) is None:
        return False
    fleet.start(JOIN_S)
    began = fleet.begun
    joined = waited(one, "all in", fleet.all_in)
    one.row("join", "last agent in", "s", joined)
    if joined is None:
        return False
    if waited(one, "the first launch", lambda: fleet.runs(one.nodes, 1)) is None:
        one.row("first launch", "last agent launched, from the first connection", "s", None)
        return False
    told = [agent.launch for agent in fleet.agents.values() if agent.launch.at]
    one.arrivals("first launch", "launch at an agent, from the first connection", told, began)
    one.known("first launch", "launches", told)
    return True


def steady(one: Lab, seconds: float) -> None:
    fleet = one.fleet
    process, own = psutil.Process(one.run.supervisor.pid), psutil.Process()
    fleet.run_for(2.0)
    before = process.cpu_times(), own.cpu_times(), time.monotonic()
    sent, heard, journal = fleet.bytes_out, fleet.bytes_in, journal_bytes(one)
    frames = fleet.frames_out
    fleet.run_for(seconds)
    took_s = time.monotonic() - before[2]
    share = _share(before[0], process.cpu_times(), took_s)
    one.row("steady", "supervisor", "cores", share)
    one.row("steady", "simulated agents", "cores", _share(before[1], own.cpu_times(), took_s))
    one.row("steady", "a message costs", "us", 1e6 * share * took_s / max(1, fleet.frames_out - frames))
    one.row("steady", "to the supervisor", "MB/s", (fleet.bytes_out - sent) / took_s / 1e6)
    one.row("steady", "from it", "MB/s", (fleet.bytes_in - heard) / took_s / 1e6)
    one.row("steady", "journal", "bytes/s", (journal_bytes(one) - journal) / took_s)
    one.row("steady", "resident memory", "MB", process.memory_info().rss / 1e6)
    one.row("steady", "agents that hung up", "", fleet.hung_up)


def crowd(one: Lab, turn_s: float) -> None:
    """Heartbeats while strangers connect, say nothing, and come again when they are hung up on."""
    counts, hung_up = {"nobody else": 0, CROWD: STRANGERS}, one.fleet.hung_up
    found: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for _ in range(TURNS):
        for case, count in counts.items():
            with strangers(one, count):
                one.fleet.run_for(SETTLE_S)
                one.fleet.round_trips, one.fleet.silences = [], []
                with coming_in(one) as ways_in:
                    one.fleet.run_for(turn_s)
            trips = sorted(one.fleet.round_trips)
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                trip_s = trips[int(share * len(trips))] if trips else None
                found[case, f"a heartbeat's round trip, {name}"].append(trip_s)
            found[case, "longest from one answer to the next"].append(max(one.fleet.silences, default=None))
            found[case, "longest until one who knows the secret was in"].append(max(ways_in, default=None))
    for (case, metric), turns in found.items():
        of, name = common.spread(turns), f"{one.nodes} nodes: {case}"
        one.rows.append(Row(name, JURYMAST, metric, "s", of.median, of.low, of.high, of.n, samples=turns))
    one.row(CROWD, "agents that hung up", "", one.fleet.hung_up - hung_up)
    one.row(CROWD, WRONGLY, "", wrongly_lost(one))


@contextmanager
def strangers(one: Lab, count: int) -> Iterator[None]:
    """While they are here."""
    place = one.fleet.place()
    assert place is not None
    command = [sys.executable, "-m", "support.strangers", place[0], str(place[1]), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            one.fleet.run_until(lambda: process.stdout is not None and bool(process.stdout.read()), LIMIT_S)
            yield
        finally:
            process.kill()


@contextmanager
def coming_in(one: Lab) -> Iterator[list[float]]:
    """Somebody who knows the secret, again and again: how long each time until he was in, in seconds."""
    place, secret, seconds, over = one.fleet.place(), one.run.directory.secret(), [], threading.Event()
    assert place is not None

    def come() -> None:
        while not over.wait(COME_EVERY_S):
            began = time.monotonic()
            with suppress(OSError):
                stream.connect(*place, secret, SUPERVISOR, read_said, COME_LIMIT_S).close()
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def _share(before: Any, after: Any, seconds: float) -> float:
    return float(after.user + after.system - before.user - before.system) / seconds


def journal_bytes(one: Lab) -> int:
    return sum(path.stat().st_size for path in one.run.directory.journal_files())


def fault(one: Lab, case: str, victims: list[str], hurt: Callable[[str], None]) -> bool:
    fleet = one.fleet
    attempt = max(agent.attempt for agent in fleet.agents.values())
    began = time.monotonic()
    for name in victims:
        hurt(name)
    one.lost.update(victims)
    done = waited(one, case, lambda: fleet.runs(one.nodes, attempt + 1))
    verdict = verdict_at(one, victims)
    stops = [a.stop for a in fleet.healthy if a.stop.at > began]
    launches = [a.launch for a in fleet.healthy if a.launch.at > began] if done is not None else []
    one.row(case, "verdict", "s", verdict - began)
    one.arrivals(case, "stop at an agent", stops, began)
    one.arrivals(case, "stop at an agent, from the verdict", stops, verdict)
    one.known(case, "stops", stops)
    answered = max((a.answered_at for a in fleet.healthy), default=began)
    one.row(case, "last answer", "s", answered - began)
    one.arrivals(case, "launch at an agent, from the last answer", launches, answered)
    one.known(case, "launches", launches)
    one.row(case, WRONGLY, "", wrongly_lost(one))
    return done is not None


def verdict_at(one: Lab, victims: list[str]) -> float:
    """When the first of them was lost, by time.monotonic()."""
    lost = [
        float(entry["t"])
        for entry in read(one.run.directory)
        if entry.get("event") == "NodeLost" and entry["node"] in victims
    ]
    return min(lost, default=math.nan) - time.time() + time.monotonic()


def wrongly_lost(one: Lab) -> int:
    told = {entry["node"] for entry in read(one.run.directory) if entry.get("event") == "NodeLost"}
    return len(told - one.lost)


def stands_still(one: Lab) -> None:
    """The supervisor's loop, as on a host that is far too busy."""
    fleet, case = one.fleet, f"the supervisor stands still for {STALL_S:.0f} s"
    fleet.run_for(3.0)
    attempt, told = max(agent.attempt for agent in fleet.agents.values()), len(notes(one))
    process = psutil.Process(one.run.supervisor.pid)
    process.suspend()
    fleet.run_for(STALL_S)
    process.resume()
    fleet.run_for(10.0)
    one.row(case, "restarts of the training", "", max(a.attempt for a in fleet.agents.values()) - attempt)
    one.row(case, "lines in the journal", "", len(notes(one)) - told)
    one.row(case, WRONGLY, "", wrongly_lost(one))


def notes(one: Lab) -> list[Any]:
    return [entry for entry in read(one.run.directory) if entry.get("event") == "Noted"]


def take_over(one: Lab) -> bool:
    fleet = one.fleet
    fleet.run_for(3.0)
    attempt = max(agent.attempt for agent in fleet.agents.values())
    before = {agent.name: agent.connections for agent in one.fleet.healthy}
    began = time.monotonic()
    one.run.kill()
    one.run.start()

    def back() -> bool:
        return all(
            agent.greeted == 2 and agent.connection is not None and agent.connections > before[agent.name]
            for agent in one.fleet.healthy
        )

    done = waited(one, "all back", back)
    one.row("take-over", "last agent back", "s", None if done is None else time.monotonic() - began)
    fleet.run_for(10.0)
    attempts = max(agent.attempt for agent in fleet.agents.values()) - attempt
    one.row("take-over", "restarts of the training", "", attempts)
    one.row("take-over", WRONGLY, "", wrongly_lost(one))
    return done is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SIZES} nodes, for the shape")
    parser.add_argument("--nodes", type=int, nargs="*", help=f"sizes; {SIZES} unless said otherwise")
    parser.add_argument("--crowd", action="store_true", help="only the heartbeats under a crowd of strangers")
    parser.add_argument("--no-saves", action="store_true", help="agents tell of no checkpoints")
    parser.add_argument("--keep", type=Path, help="leave the supervisors' logs and run directories here")
    arguments = parser.parse_args()
    sizes = arguments.nodes or (QUICK_SIZES if arguments.quick else SIZES)
    about = {**common.machine(), "heartbeat_s": HEARTBEAT_S, "ranks_per_node": 8, "quick": arguments.quick}
    rows: list[Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="jurymast-bench-") as temporary:
        for nodes in sizes:
            folder = (arguments.keep or Path(temporary)) / f"{nodes}-nodes"
            with supervised(folder, nodes, max(32, nodes // SPARE_SHARE)) as run:
                run.fleet.saves = not arguments.no_saves
                one = Lab(run)
                through = phases(one, quick=arguments.quick, only_crowd=arguments.crowd)
            rows += one.rows
            targets.append(Target(f"{nodes} nodes: got through", float(through), 1.0, "higher"))
            lost = [row.median or 0.0 for row in one.rows if row.metric == WRONGLY]
            targets.append(Target(f"{nodes} nodes: {WRONGLY}", max(lost) if lost else None, 0.0, "lower"))
    common.print_report("scale", rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
