"""Chooses the addresses to listen at: only those that others are told."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import psutil

# Connections that the kernel holds until they are accepted; net.core.somaxconn limits this.
BACKLOG = 4096
ANY = "0.0.0.0"
# A port that is free at one address may be taken at another.
PORTS_TRIED = 50
# Tells processes of a node the address at which other nodes reach it.
ADDRESS_VARIABLE = "JURYMAST_ADDRESS"


def interface_of(address: str) -> str:
    """Return the name of the network interface that has `address`, or ""."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return ""


def is_up(address: str) -> bool:
    """Return whether `address` belongs to a network interface that is up."""
    status = psutil.net_if_stats().get(interface_of(address))
    return status is not None and status.isup


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `address`, or at all addresses if its interface is down: then others
    are told another address once there is one. Raises OSError."""
    return socket.create_server((address if is_up(address) else ANY, port), backlog=BACKLOG)


def listen_at_each(addresses: Sequence[str]) -> list[socket.socket]:
    """Return sockets that listen on one port at each of `addresses` that exists, or at all addresses if none
    does. Raises OSError."""
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
                if error.errno != errno.EADDRNOTAVAIL:  # otherwise the address is gone with its interface
                    raise
            else:
                listeners.append(opened.enter_context(listener))
        opened.pop_all()
    return listeners or [socket.create_server((ANY, 0), backlog=BACKLOG)]
