"""Processes that are forked ahead of the ranks that they become."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from jurymast.processes import process_state
from support.waiting import wait_until

# A server that forks `count` processes ahead, and hands out orders by the lines of its stdin. Each process
# that becomes a rank writes its id, what it was told and its open pipes to stdout.
SERVER = """
import json, os, sys
from jurymast.worker.ready import Ready, wait_for_order

def pipes():
    names = (os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2
             and os.path.exists(f"/proc/self/fd/{fd}"))
    return sum(name.startswith("pipe:") for name in names)

server, ready = os.getpid(), Ready(2)
while ready.lacks:
    pipe, ours = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        order = wait_for_order(pipe, server)
        ready.leave()
        os.write(1, f"{os.getpid()} {len(order['what'])} {pipes()}\\n".encode())
        os._exit(0)
    os.close(pipe)
    ready.add(pid, ours)
    os.write(1, f"{pid}\\n".encode())
for line in sys.stdin:
    taken = ready.take({"what": "x" * int(line)})
    if taken:
        os.waitpid(taken, 0)
    os.write(1, f"taken {taken}\\n".encode())
"""


class Forking:
    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids = [int(self.line()), int(self.line())]

    def line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def order(self, size: int) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(f"{size}\n")
        self.server.stdin.flush()

    def close(self) -> None:
        self.server.communicate()


def test_each_order_is_carried_out_by_a_process_that_was_there_and_the_next_by_none() -> None:
    """Also one that a pipe does not hold; and no rank keeps the pipes of others open."""
    forking = Forking()
    for pid, size in zip(forking.pids, (3, 300_000), strict=True):
        forking.order(size)
        assert forking.line() == f"{pid} {size} 0"
        assert forking.line() == f"taken {pid}"
    forking.order(1)
    assert forking.line() == "taken 0"
    forking.close()


def test_one_that_has_ended_is_passed_over() -> None:
    forking = Forking()
    os.kill(forking.pids[0], signal.SIGKILL)
    wait_until("its end", lambda: process_state(forking.pids[0])[0] == "Z")
    forking.order(3)
    assert forking.line() == f"{forking.pids[1]} 3 0"
    forking.close()


def test_they_end_with_their_server() -> None:
    forking = Forking()
    forking.server.kill()
    forking.close()
    # Who has adopted them may not look.
    wait_until("their end", lambda: all(process_state(pid)[0] in {"", "Z", "X"} for pid in forking.pids))
