"""Authenticated messages over TCP: JSON objects, every frame sealed with a key of this connection.

Both sides prove that they know the run's secret before anything is parsed, and every frame carries an
HMAC over its sequence number, so nothing can be forged, replayed or reordered on a shared network.
The content is not hidden: nothing secret is sent.

    server -> client   MAGIC, 32 random bytes
    client -> server   32 random bytes, HMAC("client", both nonces)
    server -> client   HMAC("server", both nonces)
    then frames        u32 length, 16 bytes of HMAC(direction key, u64 sequence + payload), payload
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Coroutine, Sequence
from typing import Any

from jurymast.errors import AuthenticationError, ProtocolError

MAGIC = b"jurymast/1\n"
NONCE_BYTES = 32
TAG_BYTES = 16
HEAD_BYTES = 4 + TAG_BYTES
READ_BYTES = 65536
FRAME_BYTES_MAX = 4 * 1024 * 1024
HANDSHAKE_LIMIT_S = 5.0

Message = dict[str, Any]


def digest(secret: bytes, *parts: bytes) -> bytes:
    """What only somebody who knows the secret can make of these parts."""
    return hmac.digest(secret, b"|".join(parts), "sha256")


class Channel:
    """One authenticated connection. `receive` raises ConnectionError at its end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send_key: bytes, receive_key: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._unread = bytearray()

    @property
    def local_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. A dead connection shows at `receive`."""
        payload = json.dumps(message, separators=(",", ":")).encode()
        tag = hmac.digest(self._send_key, struct.pack(">Q", self._sent) + payload, "sha256")[:TAG_BYTES]
        self._sent += 1
        if not self._writer.is_closing():
            self._writer.write(struct.pack(">I", len(payload)) + tag + payload)

    async def receive(self) -> Message:
        while (frame := self._frame()) is None:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("the other side closed the connection")
            self._unread += data
        return self._opened(*frame)

    def _frame(self) -> tuple[bytes, bytes] | None:
        """Seal and payload of the next frame; None until all of it is here."""
        if len(self._unread) < HEAD_BYTES:
            return None
        (length,) = struct.unpack_from(">I", self._unread)
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(f"frame of {length} bytes from {self.peer_address}")
        end = HEAD_BYTES + length
        if len(self._unread) < end:
            return None
        tag, payload = bytes(self._unread[4:HEAD_BYTES]), bytes(self._unread[HEAD_BYTES:end])
        del self._unread[:end]
        return tag, payload

    def _opened(self, tag: bytes, payload: bytes) -> Message:
        expected = hmac.digest(self._receive_key, struct.pack(">Q", self._received) + payload, "sha256")
        if not hmac.compare_digest(expected[:TAG_BYTES], tag):
            raise AuthenticationError(f"a frame from {self.peer_address} is not sealed with this run's key")
        self._received += 1
        try:
            message = json.loads(payload)
        except ValueError as error:
            raise ProtocolError(f"a message from {self.peer_address} is not JSON") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"a message from {self.peer_address} is not an object")
        return message

    async def drain(self) -> None:
        """Wait until what was sent has left this process, or the other side has: that shows at `receive`."""
        try:
            await self._writer.drain()
        except OSError:
            pass

    def close(self) -> None:
        self._writer.close()


def _tune(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Channel:
    """Server side of the handshake. Raises AuthenticationError, ConnectionError or TimeoutError."""
    _tune(writer)
    ours = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + ours)
    answer = await _exactly(reader, 2 * NONCE_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, digest(secret, b"client", ours, theirs)):
        raise AuthenticationError("a connection did not prove that it knows the run's secret")
    writer.write(digest(secret, b"server", ours, theirs))
    to_server, to_client = (digest(secret, way, ours, theirs) for way in (b"to-server", b"to-client"))
    return Channel(reader, writer, to_client, to_server)


async def connect(host: str, port: int, secret: bytes, limit_s: float = HANDSHAKE_LIMIT_S) -> Channel:
    """Connect and authenticate within `limit_s`. Raises OSError, TimeoutError or AuthenticationError."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), limit_s)
    try:
        _tune(writer)
        hello = await asyncio.wait_for(_exactly(reader, len(MAGIC) + NONCE_BYTES), limit_s)
        if not hello.startswith(MAGIC):
            raise ProtocolError(f"{host}:{port} does not speak {MAGIC.decode().strip()}")
        theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        writer.write(ours + digest(secret, b"client", theirs, ours))
        proof = await asyncio.wait_for(_exactly(reader, NONCE_BYTES), limit_s)
        if not hmac.compare_digest(proof, digest(secret, b"server", theirs, ours)):
            raise AuthenticationError(f"{host}:{port} does not know the run's secret")
    except BaseException:
        writer.close()
        raise
    to_server, to_client = (digest(secret, way, theirs, ours) for way in (b"to-server", b"to-client"))
    return Channel(reader, writer, to_server, to_client)


async def connect_any(targets: Sequence[tuple[str, int]], secret: bytes, limit_s: float) -> Channel | None:
    """The first of `targets` (host, port) that answers, all tried at once; None when none does in time."""
    return await first_of([connect(host, port, secret, limit_s) for host, port in targets])


async def first_of(ways: Sequence[Coroutine[Any, Any, Channel | None]]) -> Channel | None:
    """The first connection that one of these comes to, all gone at once; None when none does."""
    tries = [asyncio.ensure_future(way) for way in ways]
    found: Channel | None = None
    try:
        for done in asyncio.as_completed(tries):
            try:
                found = await done
            except (OSError, asyncio.TimeoutError, AuthenticationError, ProtocolError):
                continue
            if found is not None:
                return found
        return None
    finally:
        for task in tries:
            task.cancel()
        for result in await asyncio.gather(*tries, return_exceptions=True):
            if isinstance(result, Channel) and result is not found:
                result.close()


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the other side closed the connection during the handshake") from error
