"""At which of this machine's addresses to listen: only at those that others are told."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import psutil

# Connections that the kernel holds until somebody takes them; net.core.somaxconn has the last word.
BACKLOG = 4096
ANY = "0.0.0.0"
# A port that is free at one address may be taken at another.
PORTS_TRIED = 50
# For processes of a node: at which address other nodes reach it.
ADDRESS_VARIABLE = "JURYMAST_ADDRESS"


def interface_of(address: str) -> str:
    """Name of the network interface that has `address`, or ""."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return ""


def is_up(address: str) -> bool:
    """Whether `address` is one of a network interface that works."""
    status = psutil.net_if_stats().get(interface_of(address))
    return status is not None and status.isup


def listen_at(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at `address`; at all addresses when that one has gone with its interface: others
    are told another as soon as there is one. Raises OSError."""
    return socket.create_server((address if is_up(address) else ANY, port), backlog=BACKLOG)


def listen_at_each(addresses: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen at each of `addresses` that is there, on one port; at all addresses when none is.
    Raises OSError."""
    for _ in range(PORTS_TRIED):
        try:
            return _listen_at_each(addresses)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_at_each(addresses)


def _listen_at_each(addresses: Sequence[str]) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    with ExitStack() as opened:
        for address in dict.fromkeys(addresses):
            port = listeners[0].getsockname()[1] if listeners else 0
            try:
                listener = socket.create_server((address, port), backlog=BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # else it has gone with its interface
                    raise
            else:
                listeners.append(opened.enter_context(listener))
        opened.pop_all()
    return listeners or [socket.create_server((ANY, 0), backlog=BACKLOG)]
