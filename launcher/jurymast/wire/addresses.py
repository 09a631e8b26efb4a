"""At which of this machine's addresses to listen: at the one that others are told, and at no other."""

from __future__ import annotations

import socket

import psutil

# Connections that the kernel holds until somebody takes them; net.core.somaxconn has the last word.
BACKLOG = 4096
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
    return socket.create_server((address if is_up(address) else "", port), backlog=BACKLOG)
