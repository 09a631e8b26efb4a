"""Another user of the machine besets a run's processes: it trains on, and its supervisor can be replaced."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from jurymast.core.state import events as ev
from jurymast.wire import endpoint
from support.runs import SCRIPTS, RunUnderTest, local_run, processes_of, result, wait_gone
from support.waiting import wait_until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.geteuid() != 0, reason="to overhear others, and to be another user, needs root"),
]

TRAIN = ("--steps", "300", "--step-time", "0.05", "--save-every", "10 steps")
STREAM_BYTES = 1 << 16
ROUNDS = 30


@contextmanager
def overhearing() -> Iterator[dict[tuple[int, int], bytes]]:
    """What is sent on this machine meanwhile, by ports (from, to): the first bytes of each connection."""
    heard: dict[tuple[int, int], bytes] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as wire:
        wire.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    packet = wire.recv(1 << 16)
                    segment = packet[(packet[0] & 15) * 4 :]
                    ports = struct.unpack(">HH", segment[:4])
                    if len(said := heard.get(ports, b"")) < STREAM_BYTES:
                        heard[ports] = said + segment[(segment[12] >> 4) * 4 :]

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            over.set()
            thread.join()


@contextmanager
def beset(ports: set[int], streams: list[bytes]) -> Iterator[Callable[[], int]]:
    """By another user; yields how many rounds that one has made."""
    command = [sys.executable, str(SCRIPTS / "hostile_neighbour.py"), *map(str, sorted(ports))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write("".join(f"{stream.hex()}\n" for stream in streams))
        process.stdin.close()
        rounds = [0]

        def count() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                rounds[0] = int(line)

        counting = threading.Thread(target=count)
        counting.start()
        try:
            yield lambda: rounds[0]
        finally:
            process.kill()
            counting.join()


def ports_of(run: RunUnderTest) -> set[int]:
    """Where its processes listen; but torch's store, for which nobody has to prove anything, is not ours."""
    found = set()
    for process in processes_of(run.directory.root):
        with suppress(psutil.NoSuchProcess):
            if {"jurymast.supervisor", "jurymast.agent"} & set(process.cmdline()):
                listening = (c for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
                found |= {one.laddr[1] for one in listening}
    return found


def supervisors(run: RunUnderTest) -> list[ev.Event]:
    return [event for event in run.events() if isinstance(event, ev.SupervisorStarted)]


def test_a_run_trains_on_whatever_its_neighbours_say_and_repeat(
    tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    out = tmp_path / "out.json"
    with overhearing() as heard, local_run(
        tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
        arguments=(*TRAIN, "--out", str(out)),
    ) as run:  # fmt: skip
        run.wait_step(5)
        ports = ports_of(run)
        streams = [said for (_, to), said in list(heard.items()) if to in ports and said]
        assert len(ports) >= 3, "the supervisor, and two keepers"
        assert len(streams) >= 3
        with beset(ports, streams) as rounds:
            wait_until("a siege", lambda: rounds() >= ROUNDS)
            place = endpoint.find(run.directory.epochs)
            assert place is not None
            os.kill(place.pid, signal.SIGKILL)
            wait_until("another supervisor", lambda: len(supervisors(run)) > 1)
        with beset(ports_of(run), streams) as rounds:
            wait_until("a siege", lambda: rounds() >= ROUNDS)
            state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert state.incidents == [], run.story()
    assert result(out)["sha256"] == trained_plainly(*TRAIN)
