"""Authenticated messages over TCP: JSON, every frame sealed with a key of this connection.

Both sides prove that they know the run's secret before anything is parsed, and every frame carries an
HMAC over its sequence number, so nothing can be forged, replayed or reordered on a shared network.
The content is not hidden: nothing secret is sent.

    the handshake      see `wire.handshake`
    then frames        u32 length, 16 bytes of HMAC(direction key, u64 sequence + payload), payload

asyncio's streams do the same with a future and a task's turn for each message, which is most of what a
message costs a supervisor that hears thousands of agents.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from jurymast.core.messages import encode
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.wire.addresses import BACKLOG
from jurymast.wire.handshake import MAGIC, NONCE_BYTES, SUPERVISOR, TAG_BYTES, Handshake, Seal

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


async def listen(come: Callable[[Connection], None], listener: socket.socket) -> asyncio.Server:
    """Call `come` for everybody who connects; of a crowd a few at a time, so that those who are here already
    have their turn in between."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(come), sock=listener, backlog=ACCEPTED_AT_ONCE)
    listener.listen(BACKLOG)  # asyncio takes one number for both
    return server


_LENGTH = struct.Struct(">I")
HEAD_BYTES = _LENGTH.size + TAG_BYTES
FRAME_BYTES_MAX = 4 * 1024 * 1024
HANDSHAKE_LIMIT_S = 5.0

Hears = TypeVar("Hears")


class Channel(Generic[Hears]):
    """One authenticated connection. `read` makes a message of what the other side has sealed, and raises
    nothing; `receive` raises ConnectionError at the connection's end."""

    def __init__(
        self, connection: Connection, send_key: bytes, receive_key: bytes, read: Callable[[bytes], Hears]
    ) -> None:
        self._connection = connection
        self._sealing = Seal(send_key)
        self._opening = Seal(receive_key)
        self._read = read
        self.peer_address = connection.peer_address

    @property
    def local_address(self) -> str:
        return self._connection.local_address

    def send(self, *messages: msgspec.Struct) -> None:
        """Queue messages, together; never blocks. A dead connection shows at `receive`."""
        self._connection.write(b"".join([self._frame(encode(message)) for message in messages]))

    def _frame(self, payload: bytes) -> bytes:
        return _LENGTH.pack(len(payload)) + self._sealing.tag(payload) + payload

    async def receive(self) -> Hears:
        """The next message. Raises AuthenticationError, and ProtocolError for one that is too long."""
        while (payload := self._payload()) is None:
            await self._connection.more()
        return self._read(payload)

    async def listen(self, hear: Callable[[Hears], None]) -> Exception:
        """Give every message to `hear` as soon as it is here; why that ended. Raises what `hear` raises."""
        why: Exception | None = None
        failure: Exception | None = None

        def take() -> None:
            nonlocal why, failure
            while not self._connection.closed:
                try:
                    if (payload := self._payload()) is None:
                        return
                    message = self._read(payload)
                except (AuthenticationError, ProtocolError) as error:
                    why = error
                    self._connection.abort()
                    return
                try:
                    hear(message)
                except Exception as error:  # for whoever waits below, not for asyncio's transport
                    failure = error
                    self._connection.abort()

        self._connection.on_bytes = take
        take()
        end = await self._connection.end()
        if failure is not None:
            raise failure
        return why or end

    def _payload(self) -> bytes | None:
        """Of the next frame, whose seal was checked; None until all of it is here."""
        unread = self._connection.unread
        if len(unread) < HEAD_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(unread)
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(f"frame of {length} bytes from {self.peer_address}")
        end = HEAD_BYTES + length
        if len(unread) < end:
            return None
        tag, payload = bytes(unread[4:HEAD_BYTES]), bytes(unread[HEAD_BYTES:end])
        del unread[:end]
        if not self._opening.fits(payload, tag):
            raise AuthenticationError(f"a frame from {self.peer_address} is not sealed with this run's key")
        return payload

    async def drain(self) -> None:
        """Wait until what was sent has left this process, or the other side has: that shows at `receive`."""
        await self._connection.drain()

    def close(self) -> None:
        self._connection.close()


async def accept(come: Connection, secret: bytes, read: Callable[[bytes], Hears]) -> Channel[Hears]:
    """Server side of the handshake. Raises AuthenticationError, ConnectionError or TimeoutError."""
    ours = secrets.token_bytes(NONCE_BYTES)
    come.write(MAGIC + ours)
    answer = await come.exactly(2 * NONCE_BYTES)
    shaking = Handshake(secret, SUPERVISOR, ours, answer[:NONCE_BYTES])
    if not shaking.proves(b"client", answer[NONCE_BYTES:]):
        raise AuthenticationError("a connection did not prove that it knows the run's secret")
    come.write(shaking.made(b"server"))
    return Channel(come, shaking.made(b"to-client"), shaking.made(b"to-server"), read)


async def connect(
    host: str, port: int, secret: bytes, read: Callable[[bytes], Hears], limit_s: float = HANDSHAKE_LIMIT_S
) -> Channel[Hears]:
    """Connect and authenticate within `limit_s`. Raises OSError, TimeoutError or AuthenticationError."""
    connecting = asyncio.get_running_loop().create_connection(Connection, host, port)
    _, made = await asyncio.wait_for(connecting, limit_s)
    try:
        hello = await asyncio.wait_for(made.exactly(len(MAGIC) + NONCE_BYTES), limit_s)
        if not hello.startswith(MAGIC):
            raise ProtocolError(f"{host}:{port} does not speak {MAGIC.decode().strip()}")
        ours = secrets.token_bytes(NONCE_BYTES)
        shaking = Handshake(secret, SUPERVISOR, hello[len(MAGIC) :], ours)
        made.write(ours + shaking.made(b"client"))
        if not shaking.proves(b"server", await asyncio.wait_for(made.exactly(NONCE_BYTES), limit_s)):
            raise AuthenticationError(f"{host}:{port} does not know the run's secret")
    except BaseException:
        made.close()
        raise
    return Channel(made, shaking.made(b"to-server"), shaking.made(b"to-client"), read)


async def connect_any(
    targets: Sequence[tuple[str, int]], secret: bytes, read: Callable[[bytes], Hears], limit_s: float
) -> Channel[Hears] | None:
    """The first of `targets` (host, port) that answers, all tried at once; None when none does in time."""
    return await first_of([connect(host, port, secret, read, limit_s) for host, port in targets])


async def first_of(
    ways: Sequence[Coroutine[Any, Any, Channel[Hears] | None]],
) -> Channel[Hears] | None:
    """The first connection that one of these comes to, all gone at once; None when none does."""
    tries = [asyncio.ensure_future(way) for way in ways]
    found: Channel[Hears] | None = None
    try:
        for done in asyncio.as_completed(tries):
            try:
                found = await done
            except (OSError, asyncio.TimeoutError, AuthenticationError, ProtocolError):
                continue
            if found is not None:
                break
    finally:
        # Nothing is waited for any more: who gives this up meanwhile would leave what was found open.
        for task in tries:
            task.add_done_callback(partial(_close_others, found))
            task.cancel()
    return found


def _close_others(found: Channel[Hears] | None, task: asyncio.Future[Channel[Hears] | None]) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    other = task.result()
    if other is not None and other is not found:
        other.close()
