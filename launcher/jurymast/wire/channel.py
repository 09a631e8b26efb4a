"""Authenticated messages over TCP: JSON, every frame sealed with a key of this connection.

Both sides prove that they know the run's secret before anything is parsed, and every frame carries an
HMAC over its sequence number, so nothing can be forged, replayed or reordered on a shared network.
The content is not hidden: nothing secret is sent.

    the handshake      see `wire.handshake`
    then frames        u32 length, 16 bytes of HMAC(direction key, u64 sequence + payload), payload
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from jurymast.core.messages import encode
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.wire import connection
from jurymast.wire.connection import Connection
from jurymast.wire.handshake import MAGIC, NONCE_BYTES, SUPERVISOR, Handshake
from jurymast.wire.seal import TAG_BYTES, Seal

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
    made = await asyncio.wait_for(connection.connect(host, port), limit_s)
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
