"""Bulk bytes between agents: blocking sockets, the handshake and sealed messages of `wire.channel`.

    client -> server   a message
    server -> client   a message, then as many plain bytes as it announced

The plain bytes are neither sealed nor hidden: whoever receives them checks them against hashes that came
in a sealed message, or that such a message vouches for.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from jurymast.core.message import encode
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.wire.channel import (
    FRAME_BYTES_MAX,
    HANDSHAKE_LIMIT_S,
    MAGIC,
    NONCE_BYTES,
    digest,
)
from jurymast.wire.seal import TAG_BYTES, Seal

SILENT_LIMIT_S = 10.0
CONNECT_LIMIT_S = 3.0

Hears = TypeVar("Hears")


class Stream(Generic[Hears]):
    """One authenticated connection; `read` makes a message of what the other side has sealed. Every call
    raises OSError at its end, TimeoutError when the other side neither sends nor takes a byte for
    `SILENT_LIMIT_S`."""

    def __init__(
        self,
        connection: socket.socket,
        send_key: bytes,
        receive_key: bytes,
        read: Callable[[bytes], Hears],
    ) -> None:
        self._connection = connection
        self._read = read
        self._sealing = Seal(send_key)
        self._opening = Seal(receive_key)

    def send(self, message: msgspec.Struct) -> None:
        payload = encode(message)
        _send(self._connection, struct.pack(">I", len(payload)) + self._sealing.tag(payload) + payload)

    def receive(self) -> Hears:
        """Raises AuthenticationError, ProtocolError."""
        head = _receive(self._connection, 4 + TAG_BYTES)
        (length,) = struct.unpack(">I", head[:4])
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(f"frame of {length} bytes")
        payload = _receive(self._connection, length)
        if not self._opening.fits(payload, head[4:]):
            raise AuthenticationError("a frame is not sealed with this run's key")
        return self._read(payload)

    def send_bytes(self, data: bytes) -> None:
        _send(self._connection, data)

    def send_file(self, descriptor: int, at: int, length: int) -> None:
        """Straight from the file's pages. Raises EOFError when the file is shorter."""
        end = at + length
        while at < end:
            try:
                sent = os.sendfile(self._connection.fileno(), descriptor, at, end - at)
            except BlockingIOError as error:
                raise _silent() from error
            if not sent:
                raise EOFError("the file is shorter than announced")
            at += sent

    def receive_into(self, target: memoryview) -> None:
        _receive_into(self._connection, target)

    def receive_pieces(self, target: memoryview, piece_bytes: int) -> Iterator[memoryview]:
        """Fill `target`; each piece of it as soon as it is there. Waking up once a piece instead of once a
        packet makes a transfer some percent faster."""
        self._wake_at(piece_bytes)
        for at in range(0, len(target), piece_bytes):
            if len(target) - at < 2 * piece_bytes:
                self._wake_at(1)  # of what is still to come so many bytes may never be there at once
            piece = target[at : at + piece_bytes]
            _receive_into(self._connection, piece)
            yield piece

    def _wake_at(self, count: int) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        except OSError:
            pass  # the other side has gone already
        self._connection.close()


def accept(connection: socket.socket, secret: bytes, read: Callable[[bytes], Hears]) -> Stream[Hears]:
    """Server side of the handshake. Raises AuthenticationError or OSError; `connection` stays the caller's
    then."""
    end = time.monotonic() + HANDSHAKE_LIMIT_S
    _tune(connection, HANDSHAKE_LIMIT_S)
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(connection, MAGIC + ours)
    answer = _receive(connection, 2 * NONCE_BYTES, end)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, digest(secret, b"client", ours, theirs)):
        raise AuthenticationError("a connection did not prove that it knows the run's secret")
    _send(connection, digest(secret, b"server", ours, theirs))
    to_server, to_client = (digest(secret, way, ours, theirs) for way in (b"to-server", b"to-client"))
    _tune(connection, SILENT_LIMIT_S)
    return Stream(connection, to_client, to_server, read)


def connect(
    host: str, port: int, secret: bytes, read: Callable[[bytes], Hears], limit_s: float = CONNECT_LIMIT_S
) -> Stream[Hears]:
    """Connect and authenticate. Raises OSError, AuthenticationError or ProtocolError."""
    connection = socket.create_connection((host, port), limit_s)
    end = time.monotonic() + limit_s
    try:
        _tune(connection, limit_s)
        hello = _receive(connection, len(MAGIC) + NONCE_BYTES, end)
        if not hello.startswith(MAGIC):
            raise ProtocolError(f"{host}:{port} does not speak {MAGIC.decode().strip()}")
        theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        _send(connection, ours + digest(secret, b"client", theirs, ours))
        proof = _receive(connection, NONCE_BYTES, end)
        if not hmac.compare_digest(proof, digest(secret, b"server", theirs, ours)):
            raise AuthenticationError(f"{host}:{port} does not know the run's secret")
        _tune(connection, SILENT_LIMIT_S)
    except BaseException:
        connection.close()
        raise
    to_server, to_client = (digest(secret, way, theirs, ours) for way in (b"to-server", b"to-client"))
    return Stream(connection, to_server, to_client, read)


def _tune(connection: socket.socket, silent_s: float) -> None:
    """Blocking calls that the kernel itself ends: Python's own time limits would make every read two calls,
    and sendfile knows nothing of them."""
    connection.settimeout(None)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, direction, _time(silent_s))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _time(seconds: float) -> bytes:
    # Zero would be no limit at all.
    return struct.pack("ll", *divmod(max(1, int(seconds * 1_000_000)), 1_000_000))


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except BlockingIOError as error:
        raise _silent() from error


def _receive(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    """`end`: all of it by then (time.monotonic), however many bytes come now and then."""
    data = bytearray(count)
    _receive_into(connection, memoryview(data), end)
    return bytes(data)


def _receive_into(connection: socket.socket, target: memoryview, end: float | None = None) -> None:
    done = 0
    while done < len(target):
        if end is not None:
            if (left_s := end - time.monotonic()) <= 0:
                raise TimeoutError("the handshake takes too long")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(left_s))
        try:
            got = connection.recv_into(target[done:], len(target) - done, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise _silent() from error
        if not got:
            raise ConnectionResetError("the other side closed the connection")
        done += got


def _silent() -> TimeoutError:
    return TimeoutError(f"not a byte for {SILENT_LIMIT_S:g} s")
