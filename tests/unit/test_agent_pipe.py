"""The torchrun host's line to its agent."""

from __future__ import annotations

import socket
import subprocess
import sys

from jurymast.core.state import messages as msg
from jurymast.core.state.host_messages import read_host

LIMIT_S = 90.0
# In a process of its own: it ends with its agent.
HOST = """
import os, sys
from jurymast.worker.agent_pipe import AgentPipe
pipe = AgentPipe(int(sys.argv[1]))
while not (pipe.stop_asked(3) and pipe._launches.qsize() == 2):
    os.sched_yield()
print(pipe.next_launch(4000).attempt, flush=True)
"""


def launch(attempt: int) -> msg.Launch:
    return msg.Launch(
        attempt=attempt, rank=0, world=1, master_address="a", master_port=1, mtbf_s=0.0, cold=False, saved=0,
        environment={},
    )  # fmt: skip


def test_a_launch_that_was_stopped_already_is_answered_with_a_word_that_the_host_waits() -> None:
    """Else the agent thinks that its ranks are about to start, and kills the host to be rid of them."""
    ours, theirs = socket.socketpair()
    with ours:
        for order in (launch(3), msg.Stop(attempt=3), launch(4)):
            ours.sendall(msg.encode(order) + b"\n")
        with theirs:
            done = subprocess.run(
                [sys.executable, "-c", HOST, str(theirs.fileno())], pass_fds=[theirs.fileno()], text=True,
                capture_output=True, timeout=LIMIT_S, check=True,
            )  # fmt: skip
        words = ours.recv(4096).splitlines()
    assert done.stdout == "4\n"
    assert [read_host(word) for word in words] == [msg.Ready(store_port=4000)] * 2
