"""torch's store, which a rendezvous of ranks, or of test processes, needs."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore

# Before this release only torch's older server takes a socket that listens already.
TAKES_SOCKETS = "2.8"


def store_at(host: str, port: int, limit_s: float, served: int | None = None) -> TCPStore:
    """The store at this port. `served`: the descriptor of the socket that listens there, where it is to be
    served from now on. Raises RuntimeError."""
    return TCPStore(
        host, port, is_master=served is not None, master_listen_fd=served, wait_for_workers=False,
        timeout=timedelta(seconds=limit_s), use_libuv=torch.__version__ >= TAKES_SOCKETS,
    )  # fmt: skip
