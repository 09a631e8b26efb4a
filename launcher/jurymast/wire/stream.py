"""Bulk bytes between agents: blocking sockets, the handshake and frames of `wire.protocol`.

    client -> server   a message
    server -> client   a message, then as many bytes as it announced, in pieces, each with a tag after it

The message says how the pieces are protected, and whether they are encrypted: see `wire.protocol`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from jurymast.core.state.message import encode
from jurymast.wire import protocol
from jurymast.wire.handshakes import Proven
from jurymast.wire.protocol import TAG_BYTES as PIECE_TAG_BYTES
from jurymast.wire.protocol import Frames, Handshake, Shield

SILENT_LIMIT_S = 10.0
CONNECT_LIMIT_S = 3.0
PIECE_BYTES = 512 << 10

Hears = TypeVar("Hears")


class Stream(Generic[Hears]):
    """One authenticated connection; `read` makes a message from a payload. Every call raises OSError once it
    has ended, and TimeoutError if the other side neither sends nor takes a byte for `SILENT_LIMIT_S`."""

    def __init__(
        self,
        connection: socket.socket,
        send_key: bytes,
        receive_key: bytes,
        bulk: Callable[[bytes], bytes],
        read: Callable[[bytes], Hears],
    ) -> None:
        """`bulk` makes the key for bytes that are protected in the given way."""
        self._connection = connection
        self._read = read
        self._frames = Frames(send_key, receive_key)
        self._bulk = bulk
        self._shields: dict[str, Shield] = {}
        self._buffer = memoryview(b"")

    def send(self, message: msgspec.Struct) -> None:
        _send(self._connection, self._frames.seal(encode(message)))

    def receive(self) -> Hears:
        """Return the next message. Raises AuthenticationError or ProtocolError."""
        unread = bytearray()
        while (payload := self._frames.open(unread)) is None:
            unread += _receive(self._connection, protocol.missing_bytes(unread))
        return self._read(payload)

    def send_bytes(self, data: bytes | memoryview, way: str) -> None:
        view = memoryview(data)
        for at in range(0, len(view), PIECE_BYTES):
            self._send_piece(view[at : at + PIECE_BYTES], way)

    def send_file(self, descriptor: int, at: int, length: int, way: str) -> None:
        """Send a part of a file, piece by piece while each is in the processor's cache. Raises EOFError if
        the file is shorter."""
        self._buffer = self._buffer or memoryview(bytearray(PIECE_BYTES))
        end = at + length
        while at < end:
            got = os.preadv(descriptor, [self._buffer[: min(PIECE_BYTES, end - at)]], at)
            if got < min(PIECE_BYTES, end - at):
                raise EOFError("the file is shorter than announced")
            self._send_piece(self._buffer[:got], way)
            at += got

    def _send_piece(self, piece: memoryview, way: str) -> None:
        sent, tag = self._shield(way).cover(piece)
        _send(self._connection, sent, socket.MSG_MORE)
        _send(self._connection, tag)

    def receive_pieces(self, target: memoryview, way: str) -> Iterator[memoryview]:
        """Fill `target`, and yield each piece once it is here and known to be unchanged. Waking up once per
        piece instead of once per packet makes a transfer some percent faster. Raises AuthenticationError."""
        self._wake_at(PIECE_BYTES)
        for at in range(0, len(target), PIECE_BYTES):
            if len(target) - at < 2 * PIECE_BYTES:
                self._wake_at(1)  # fewer than PIECE_BYTES may be left to come
            piece = target[at : at + PIECE_BYTES]
            _receive_into(self._connection, piece)
            self._shield(way).uncover(piece, _receive(self._connection, PIECE_TAG_BYTES))
            yield piece

    def _shield(self, way: str) -> Shield:
        if way not in self._shields:
            self._shields[way] = Shield(way, self._bulk(way.encode()))
        return self._shields[way]

    def _wake_at(self, count: int) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
        except OSError:
            pass  # the other side has gone already
        self._connection.close()


def accepted(proven: Proven, read: Callable[[bytes], Hears]) -> Stream[Hears]:
    """Return the server's end of a connection that was proven. Raises OSError; then the caller keeps it."""
    _tune(proven.sock, SILENT_LIMIT_S)
    made = proven.shaking.made
    return Stream(proven.sock, made(b"to-client"), made(b"to-server"), made, read)


def connect(
    host: str, port: int, secret: bytes, whom: str, read: Callable[[bytes], Hears],
    limit_s: float = CONNECT_LIMIT_S,
) -> Stream[Hears]:  # fmt: skip
    """Connect to `whom` and authenticate. Raises OSError, AuthenticationError or ProtocolError."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return _connected(host, port, secret, whom, read, end)
        except ConnectionResetError:  # a server that strangers beset closes what it has no time for
            if time.monotonic() + protocol.CONNECT_AGAIN_S > end:
                raise
            time.sleep(protocol.CONNECT_AGAIN_S)


def _connected(
    host: str, port: int, secret: bytes, whom: str, read: Callable[[bytes], Hears], end: float
) -> Stream[Hears]:
    connection = socket.create_connection((host, port), max(0.001, end - time.monotonic()))
    try:
        return _shaken(connection, secret, whom, f"{host}:{port}", read, end)
    except BaseException:
        connection.close()
        raise


def _shaken(
    connection: socket.socket, secret: bytes, whom: str, place: str, read: Callable[[bytes], Hears],
    end: float,
) -> Stream[Hears]:  # fmt: skip
    """Do the client's side of the handshake before `end` (time.monotonic)."""
    _tune(connection, max(0.001, end - time.monotonic()))
    first = _receive(connection, protocol.HELLO_BYTES, end)
    shaking, answer = Handshake.with_server(secret, whom, first, place)
    _send(connection, answer)
    shaking.check_server(_receive(connection, protocol.NONCE_BYTES, end), place)
    _tune(connection, SILENT_LIMIT_S)
    return Stream(connection, shaking.made(b"to-server"), shaking.made(b"to-client"), shaking.made, read)


def _tune(connection: socket.socket, silent_s: float) -> None:
    """Set the kernel's own time limits for blocking calls: Python's would make two calls of every read."""
    connection.settimeout(None)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, direction, _time(silent_s))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _time(seconds: float) -> bytes:
    # Zero would mean no limit.
    return struct.pack("ll", *divmod(max(1, int(seconds * 1_000_000)), 1_000_000))


def _send(connection: socket.socket, data: bytes | memoryview, flags: int = 0) -> None:
    try:
        connection.sendall(data, flags)
    except BlockingIOError as error:
        raise _silent() from error


def _receive(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    """Receive `count` bytes, all of them before `end` (time.monotonic) if that is given."""
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
            raise ConnectionAbortedError("the other side closed the connection")
        done += got


def _silent() -> TimeoutError:
    return TimeoutError(f"no byte for {SILENT_LIMIT_S:g} s")
