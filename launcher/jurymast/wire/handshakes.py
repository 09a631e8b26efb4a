"""The server's side of all handshakes, of every server that listens: supervisors and keepers.

Until the other end has proved that it knows the run's secret, a connection costs a few system calls: no task,
no thread, no buffer. So thousands of strangers a second delay nobody. `core.admission` decides who may wait.

An event loop or a thread waits until `fileno` is readable, and calls `turn`; it calls `turn` once in
`TURN_EVERY_S` in any case.
"""

from __future__ import annotations

import errno
import logging
import math
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from jurymast.core.judges.admission import Admission
from jurymast.errors import AuthenticationError
from jurymast.wire import protocol
from jurymast.wire.addresses import BACKLOG, plain
from jurymast.wire.protocol import Handshake

log = logging.getLogger("jurymast.wire")

# Handshakes under way at once, besides one for each node: after a takeover all nodes connect at once.
STRANGERS_MAX = 256
# Connections accepted before others are read again: accepting thousands would take longer than a heartbeat.
ACCEPTED_AT_ONCE = 16
EVENTS_AT_ONCE = 64
TURN_EVERY_S = 1.0
# Seconds until a server that cannot accept, because all file descriptors are in use, tries again.
ACCEPT_AGAIN_S = 1.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# The first refusal is logged at once; then their number, at intervals of this many seconds.
LOGGED_EVERY_S = 60.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Proven:
    """A connection whose other end has proved that it knows the run's secret. Whoever gets it closes it."""

    sock: socket.socket
    address: str
    shaking: Handshake

    def close(self) -> None:
        self.sock.close()


class _Unproven:
    __slots__ = ("__weakref__", "address", "answer", "hello", "sock")

    def __init__(self, sock: socket.socket, address: str, hello: bytes) -> None:
        self.sock, self.address, self.hello, self.answer = sock, address, hello, b""


class Handshakes:
    """The handshakes of one server, as `who` (see `wire.protocol`), at any number of addresses.

    `listen`, `know` and `close` may be called from other threads than `turn`.
    """

    def __init__(self, secret: bytes, who: str, nodes: int = 0, known: Iterable[str] = ()) -> None:
        """`nodes`: how many may connect at once. `known`: addresses that are preferred from the start."""
        self._secret, self._who = secret, who
        # Strangers must not have all descriptors: this process needs them for its files, and for who is in.
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = min(nodes + STRANGERS_MAX, most // 2) if most > 0 else nodes + STRANGERS_MAX
        self._admission = Admission(waiting, protocol.HANDSHAKE_LIMIT_S, known)
        self._poll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        self._resting: dict[int, float] = {}  # listeners, and when they accept again
        self._unproven: dict[int, _Unproven] = {}  # by descriptor
        self._lock = threading.Lock()
        self._closed = False
        self._logged_at, self._not_logged = -math.inf, 0

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._poll.fileno()

    def listen(self, listener: socket.socket) -> None:
        """Take over a bound socket."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        with self._lock:
            self._listeners[listener.fileno()] = listener
            self._poll.register(listener, select.EPOLLIN)

    def know(self, addresses: Iterable[str]) -> None:
        """Prefer connections from these addresses from now on."""
        with self._lock:
            self._admission.know(addresses)

    def turn(self) -> list[Proven]:
        """Do what can be done now, and only so much that others have their turns soon. Return the connections
        that were proven."""
        proven: list[Proven] = []
        with self._lock:
            if self._closed:
                return []
            now = time.monotonic()
            for descriptor, _ in self._poll.poll(0, EVENTS_AT_ONCE):
                if (listener := self._listeners.get(descriptor)) is not None:
                    self._accept(listener, now)
                elif (one := self._unproven.get(descriptor)) is not None and (found := self._read(one)):
                    proven.append(found)
            for descriptor in self._admission.late(now):
                late = f"no proof of the run's secret within {protocol.HANDSHAKE_LIMIT_S:g} s"
                self._refuse(self._unproven[descriptor], TimeoutError(late))
            for descriptor in [found for found, until in self._resting.items() if until <= now]:
                del self._resting[descriptor]
                self._poll.register(descriptor, select.EPOLLIN)
        return proven

    def close(self) -> None:
        """Close the listeners and all connections that are not proven."""
        with self._lock:
            self._closed = True
            for listener in self._listeners.values():
                listener.close()
            for one in list(self._unproven.values()):
                self._end(one)
            self._poll.close()

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, place = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # other errors are of one connection, which has ended by now
                if error.errno in _EXHAUSTED:
                    log.warning("cannot accept connections: %s", error)
                    self._poll.unregister(listener)
                    self._resting[listener.fileno()] = now + ACCEPT_AGAIN_S
                    return
            else:
                self._begin(sock, plain(str(place[0])), now)

    def _begin(self, sock: socket.socket, address: str, now: float) -> None:
        descriptor = sock.fileno()
        for displaced in self._admission.connected(descriptor, address, now):
            if displaced == descriptor:
                _reset(sock)
                return
            self._end(self._unproven[displaced], reset=True)
        one = self._unproven[descriptor] = _Unproven(sock, address, protocol.hello())
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.send(one.hello)  # there is room for this and the proof in a new connection
            self._poll.register(descriptor, select.EPOLLIN)
        except OSError:  # it has ended by now
            self._end(one)

    def _read(self, one: _Unproven) -> Proven | None:
        try:
            got = one.sock.recv(protocol.ANSWER_BYTES - len(one.answer))
            one.answer += got
            if not got:
                self._end(one)
            if len(one.answer) < protocol.ANSWER_BYTES:
                return None
            shaking = Handshake.with_client(self._secret, self._who, one.hello, one.answer)
            one.sock.send(shaking.made(b"server"))
        except BlockingIOError:
            return None
        except OSError:  # an agent that connected faster elsewhere hangs up
            self._end(one)
            return None
        except AuthenticationError as error:
            self._refuse(one, error)
            return None
        self._admission.proved(one.sock.fileno())
        self._forget(one)
        return Proven(one.sock, one.address, shaking)

    def _refuse(self, one: _Unproven, error: Exception) -> None:
        self.log_refusal(one.address, error)
        self._end(one)

    def log_refusal(self, address: str, error: Exception) -> None:
        """Log, only now and then, that somebody was refused."""
        now = time.monotonic()
        if now - self._logged_at < LOGGED_EVERY_S:
            self._not_logged += 1
            return
        others = f"; {self._not_logged} more since the last message" if self._not_logged else ""
        why = f"{type(error).__name__}: {error}{others}"  # no error, whose stack a kept record would keep
        log.warning("refused a connection from %s: %s", address, why)
        self._logged_at, self._not_logged = now, 0

    def _end(self, one: _Unproven, *, reset: bool = False) -> None:
        self._admission.left(one.sock.fileno())
        self._forget(one)
        if reset:
            _reset(one.sock)
        else:
            one.sock.close()

    def _forget(self, one: _Unproven) -> None:
        del self._unproven[one.sock.fileno()]
        with suppress(OSError, ValueError):  # it was not registered yet
            self._poll.unregister(one.sock)


def _reset(sock: socket.socket) -> None:
    """Close at once, so that the other end knows that it may try again, and nothing is kept in the kernel."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()
