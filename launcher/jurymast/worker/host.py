"""The torchrun host: torch's own elastic agent, fed by our rendezvous, one process a node.

A fork of the server, on active and spare nodes alike: it waits in the rendezvous, then has the server start
ranks, watches them and stops them. What happens after a failure the supervisor decides.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from jurymast.worker.agent_pipe import FD_VARIABLE


def main(plan: dict[str, Any], server: socket.socket, agent: int) -> None:
    """Never returns. `server` is the line to the server of the ranks, `agent` the descriptor of the line to
    the agent; the signals that Slurm sends to everything are ignored already."""
    os.environ[FD_VARIABLE] = str(agent)
    from jurymast.worker.elastic import serve

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    serve(plan, server)
