"""Ports for servers that bind them later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
# The kernel gives ports from here on to whoever connects to something.
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that neither the kernel nor another test process gives to anybody before the end of
    this process."""
    highest = max(int(_RANGE.read_text().split()[0]), _LOWEST + 1000)
    while True:
        port = random.randrange(_LOWEST, highest)
        # A name that one process can have, and that ends with it.
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0jurymast-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        _reserved.append(holder)
        return port
