"""The bytes of one TCP connection: waited for during the handshake, handed on as they come afterwards.

asyncio's streams do the same with a future and a task's turn for each message, which is most of what a
message costs a supervisor that hears thousands of agents.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from jurymast.wire.addresses import BACKLOG

BUFFER_BYTES = 256 * 1024
# So many at a time while nobody takes them as they come: it may be a stranger who sends them.
WAITING_BYTES = 16 * 1024
# Every connection's bytes arrive here and are copied out before the next one's do.
# Connections taken before others are heard again: thousands at a time would take longer than a heartbeat.
ACCEPTED_AT_ONCE = 16
_ARRIVING = memoryview(bytearray(BUFFER_BYTES))


class ConnectionClosed(ConnectionError):
    """In order, by the other side or at its process's end: no reset."""


class Connection(asyncio.BufferedProtocol):
    """`unread`: what has arrived and nobody has taken; `on_bytes`, once it is set, is called for more.
    `closed`: by its user, who wants to hear nothing more."""

    def __init__(self, come: Callable[[Connection], None] | None = None) -> None:
        self.unread = bytearray()
        self.on_bytes: Callable[[], None] | None = None
        self.closed = False
        self._come = come
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._ended: ConnectionError | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        plug = transport.get_extra_info("socket")
        if plug.family in (socket.AF_INET, socket.AF_INET6):
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._come is not None:
            self._come(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _ARRIVING if self.on_bytes is not None else _ARRIVING[:WAITING_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.unread += _ARRIVING[:nbytes]
        if self.on_bytes is not None:
            self.on_bytes()
        else:
            self._wake()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        why = "the other side closed the connection"
        self._ended = exc if isinstance(exc, ConnectionError) else ConnectionClosed(why)
        self._writable.set()
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # What its user calls.

    async def more(self) -> None:
        """Wait for bytes that add to `unread`. Raises ConnectionError at the connection's end."""
        had = len(self.unread)
        while len(self.unread) == had:
            if self._ended is not None:
                raise self._ended
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    async def end(self) -> ConnectionError:
        """Wait for the connection's end; why it ended."""
        while self._ended is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._ended

    async def exactly(self, count: int) -> bytes:
        """Raises ConnectionError."""
        while len(self.unread) < count:
            await self.more()
        taken = bytes(self.unread[:count])
        del self.unread[:count]
        return taken

    def write(self, data: bytes) -> None:
        """Queue bytes; never blocks. A dead connection shows at `more`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until what was written has left this process, or the connection has ended."""
        await self._writable.wait()

    def close(self) -> None:
        """Once what was written has left."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def local_address(self) -> str:
        return self._address("sockname")

    @property
    def peer_address(self) -> str:
        return self._address("peername")

    def _address(self, name: str) -> str:
        known = self._transport.get_extra_info(name) if self._transport is not None else None
        return str(known[0]) if known else "somewhere"


async def connect(host: str, port: int) -> Connection:
    """Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


async def listen(come: Callable[[Connection], None], listener: socket.socket) -> asyncio.Server:
    """Call `come` for everybody who connects; of a crowd a few at a time, so that those who are here already
    have their turn in between."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(come), sock=listener, backlog=ACCEPTED_AT_ONCE)
    listener.listen(BACKLOG)  # asyncio takes one number for both
    return server
