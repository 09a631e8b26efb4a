"""The connections of a process group. gloo has no abort: a collective that waits for a rank that is gone, or
stands still, ends once its connections are cut."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each as a copy that the caller closes."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy
            else:
                copy.close()


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening() -> tuple[int, ...]:
    """The ports at which this process listens."""
    ports = set()
    for one in _sockets():
        with one, suppress(OSError):
            if _listens(one):
                ports.add(int(one.getsockname()[1]))
    return tuple(sorted(ports))


def cut(ports: Collection[int]) -> None:
    """Cut this process's connections to or from these ports, and to those at which it listens itself. Never a
    listener: gloo ends the process if one fails."""
    wanted = {*ports, *listening()}
    for one in _sockets():
        with one, suppress(OSError):
            if not _listens(one) and {one.getsockname()[1], one.getpeername()[1]} & wanted:
                one.shutdown(socket.SHUT_RDWR)
