"""Chooses the addresses to listen at: only those that others are told."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import psutil

# Connections that the kernel holds until they are accepted; net.core.somaxconn limits this.
BACKLOG = 4096
ANY, ANY_V6 = "0.0.0.0", "::"
MAPPED = "::ffff:"
# A port that is free at one address may be taken at another.
PORTS_TRIED = 50
# Tells processes of a node the address at which other nodes reach it.
ADDRESS_VARIABLE = "JURYMAST_ADDRESS"


def plain(address: str) -> str:
    """`address` as others are to be told it. A socket for both kinds has IPv4 addresses in IPv6's form
    (::ffff:10.0.0.1), at which nobody can listen."""
    return address.removeprefix(MAPPED) if "." in address else address


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
    return _listen(address, port) if is_up(address) else listen_at_all(port)


def listen_at_all(port: int = 0) -> socket.socket:
    """Return a socket that listens at all addresses of this machine, of both kinds. Raises OSError."""
    if not socket.has_dualstack_ipv6():
        return _listen(ANY, port)
    try:
        return socket.create_server(
            (ANY_V6, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        return _listen(ANY, port)  # IPv6 is turned off


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


def listens_at_all(listener: socket.socket) -> bool:
    return listener.getsockname()[0] in (ANY, ANY_V6)


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
                listener = _listen(address, port)
            except OSError as error:
                if error.errno not in (
                    errno.EADDRNOTAVAIL,
                    errno.EAFNOSUPPORT,
                ):  # otherwise the address is gone with its interface
                    raise
            else:
                listeners.append(opened.enter_context(listener))
        opened.pop_all()
    return listeners or [listen_at_all()]
