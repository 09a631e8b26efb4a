"""Authenticated messages over TCP: JSON in frames, each sealed with a key of its connection.

Both sides prove that they know the run's secret before anything is parsed, and every frame carries an
HMAC over its sequence number, so nothing can be forged, replayed or reordered on a shared network.
The content is not hidden: nothing secret is sent. See `wire.protocol`.

asyncio's streams would need a future and a task's turn for each message, and its transports some more calls
for each message and several turns of the loop for each connection. A supervisor of thousands of agents would
spend most of its time on these.

`ask` sends a person's request to a run's supervisor: cancel, restart, replace a node, rollback, save.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from jurymast import background
from jurymast.core.state.messages import Accepted, Ask, Condition, Declined, Unreadable, encode, read_answer
from jurymast.errors import AuthenticationError, JurymastError, OtherProtocolError, ProtocolError
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, protocol
from jurymast.wire.addresses import plain
from jurymast.wire.endpoint import Endpoint, find
from jurymast.wire.handshakes import TURN_EVERY_S, Handshakes, Proven
from jurymast.wire.protocol import FRAME_BYTES_MAX, HANDSHAKE_LIMIT_S, Frames, Handshake

BUFFER_BYTES = 256 * 1024
# Bytes that are held until somebody takes them; few, because a stranger may have sent them.
WAITING_BYTES = 16 * 1024
# Bytes that may wait for the other side, which is some large messages. Who takes none of them for so long has
# stopped, and would cost more and more memory.
UNSENT_BYTES_MAX = 64 * 1024 * 1024
# Each connection's bytes arrive here and are copied before those of the next connection are read.
_ARRIVING = memoryview(bytearray(BUFFER_BYTES))


class ConnectionClosed(ConnectionError):
    """The other side has closed the connection, or its process has ended, without a reset."""


class Connection:
    """A TCP connection. `unread` has the bytes that have arrived and nobody has taken; `on_bytes`, if it is
    set, is called for more. `closed`: its user has closed it and hears nothing more."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket, in the running loop."""
        self.unread = bytearray()
        self.on_bytes: Callable[[], None] | None = None
        self.closed = False
        self._sock = sock
        self._unsent = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._ended: Exception | None = None
        self._sent = asyncio.Event()
        self._sent.set()
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer_address = _address(sock.getpeername)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    # What the loop calls.

    def _read(self) -> None:
        room = _ARRIVING if self.on_bytes is not None else _ARRIVING[:WAITING_BYTES]
        try:
            count = self._sock.recv_into(room)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        if not count:
            self._end(None)
            return
        self.unread += _ARRIVING[:count]
        if self.on_bytes is not None:
            self.on_bytes()
        else:
            self._wake()

    def _write_more(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)
            self._sent.set()
            if self.closed:
                self._end(None)

    def _break(self, error: OSError) -> None:
        self._end(error if isinstance(error, ConnectionError) else ConnectionError(str(error)))

    def _end(self, why: Exception | None) -> None:
        if self._ended is not None:
            return
        why = why or ConnectionClosed("the other side closed the connection")
        self._ended = why.with_traceback(None)  # a traceback would keep this connection alive
        self._unsent.clear()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._sent.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # What its user calls.

    async def more(self) -> None:
        """Wait until more bytes are in `unread`. Raises ConnectionError once the connection has ended, or the
        error that it was aborted with."""
        had = len(self.unread)
        while len(self.unread) == had:
            if self._ended is not None:
                raise copy(self._ended)  # a raised error refers to the frames it passes, and they to us
            await self._news()

    async def end(self) -> Exception:
        """Wait until the connection ends; return why it ended."""
        while self._ended is None:
            await self._news()
        return self._ended

    async def _news(self) -> None:
        self._waiting = self._loop.create_future()
        await self._waiting

    async def exactly(self, count: int) -> bytes:
        """Wait for `count` bytes and take them. Raises what `more` raises."""
        while len(self.unread) < count:
            await self.more()
        taken = bytes(self.unread[:count])
        del self.unread[:count]
        return taken

    def write(self, data: bytes) -> None:
        """Queue bytes for sending; never blocks. `more` raises if the connection is dead, also because the
        other side has not taken `UNSENT_BYTES_MAX`."""
        if self.closed or self._ended is not None:
            return
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > UNSENT_BYTES_MAX:
                self._give_up()
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._break(error)
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._sent.clear()
            self._loop.add_writer(self._sock, self._write_more)

    def _give_up(self) -> None:
        why = f"{self.peer_address} has not taken {len(self._unsent) >> 20} MiB that were sent to it"
        log.warning("closing a connection: %s", why)
        self._end(ConnectionError(why))

    async def drain(self) -> None:
        """Wait until everything written has left this process, or the connection has ended."""
        await self._sent.wait()

    def close(self) -> None:
        """Close once everything written has left."""
        self.closed = True
        if self._unsent and self._ended is None:
            self._loop.remove_reader(self._sock)
        else:
            self._end(None)

    def abort(self, why: Exception | None = None) -> None:
        """Close at once; whoever waits for the connection gets `why`."""
        self.closed = True
        self._end(why)

    @property
    def local_address(self) -> str:
        return _address(self._sock.getsockname)


def _address(ask: Callable[[], Any]) -> str:
    try:
        known = ask()
    except OSError:  # the connection has ended
        return "somewhere"
    return plain(str(known[0])) if known else "somewhere"


class Listener:
    """Calls `enter` for each connection whose other end has proved that it knows the secret, in the running
    loop."""

    def __init__(self, handshakes: Handshakes, enter: Callable[[Proven], None]) -> None:
        self._handshakes, self._enter = handshakes, enter
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(handshakes.fileno(), self._turn)
        self._timer = self._loop.call_later(TURN_EVERY_S, self._turn_again)

    def _turn(self) -> None:
        for proven in self._handshakes.turn():
            self._enter(proven)

    def _turn_again(self) -> None:
        self._timer = self._loop.call_later(TURN_EVERY_S, self._turn_again)
        self._turn()

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._handshakes.fileno())
        self._handshakes.close()


Hears = TypeVar("Hears")
log = logging.getLogger("jurymast.wire")


class Channel(Generic[Hears]):
    """One authenticated connection. `read` makes a message from a payload, and raises nothing; `receive`
    raises ConnectionError once the connection has ended."""

    def __init__(
        self, connection: Connection, send_key: bytes, receive_key: bytes, read: Callable[[bytes], Hears]
    ) -> None:
        self._connection = connection
        self._read = read
        self.peer_address = connection.peer_address
        self._frames = Frames(send_key, receive_key, self.peer_address)

    @classmethod
    def of(cls, proven: Proven, read: Callable[[bytes], Hears]) -> Channel[Hears]:
        """Return the server's end of a connection that was proven."""
        made = proven.shaking.made
        return cls(Connection(proven.sock), made(b"to-client"), made(b"to-server"), read)

    @property
    def local_address(self) -> str:
        return self._connection.local_address

    def send(self, *messages: msgspec.Struct) -> None:
        """Queue these messages for sending; never blocks. `receive` raises if the connection is dead."""
        payloads = [encode(message) for message in messages]
        frames = [self._frames.seal(one) for one in payloads if len(one) <= FRAME_BYTES_MAX]
        if len(frames) < len(payloads):
            # The other side would close the connection for it, and the next one, over which it is sent again.
            log.error("a message to %s is too long, and is not sent", self.peer_address)
        if frames:
            self._connection.write(frames[0] if len(frames) == 1 else b"".join(frames))

    async def receive(self) -> Hears:
        """Return the next message. Raises AuthenticationError, and ProtocolError for one that is too long."""
        while (payload := self._frames.open(self._connection.unread)) is None:
            await self._connection.more()
        return self._read(payload)

    async def listen(self, hear: Callable[[Hears], None]) -> Exception:
        """Pass every message to `hear` as it arrives; return why this ended. Raises what `hear` raises."""
        failure: Exception | None = None

        def take() -> None:
            nonlocal failure
            while not self._connection.closed:
                try:
                    if (payload := self._frames.open(self._connection.unread)) is None:
                        return
                except (AuthenticationError, ProtocolError) as error:
                    self._connection.abort(error)
                    return
                try:
                    hear(self._read(payload))
                except Exception as error:  # to be raised by `listen` below, not in the loop
                    failure = error
                    self._connection.abort()

        self._connection.on_bytes = take
        take()
        end = await self._connection.end()
        if failure is not None:
            raise failure
        return end

    async def drain(self) -> None:
        """Wait until everything sent has left this process, or the connection has ended; then `receive`
        raises."""
        await self._connection.drain()

    def close(self) -> None:
        self._connection.close()


async def connect(
    host: str, port: int, secret: bytes, read: Callable[[bytes], Hears], limit_s: float = HANDSHAKE_LIMIT_S
) -> Channel[Hears]:
    """Connect and authenticate within `limit_s`. Raises OSError, TimeoutError or AuthenticationError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while True:
        try:
            return await _connected(host, port, secret, read, end)
        except ConnectionResetError:  # a server that strangers beset closes what it has no time for
            if loop.time() + protocol.CONNECT_AGAIN_S > end:
                raise
            await asyncio.sleep(protocol.CONNECT_AGAIN_S)


async def _connected(
    host: str, port: int, secret: bytes, read: Callable[[bytes], Hears], end: float
) -> Channel[Hears]:
    time = asyncio.get_running_loop().time
    made = Connection(await asyncio.wait_for(_plugged(host, port), end - time()))
    try:
        return await asyncio.wait_for(_shake(made, secret, f"{host}:{port}", read), end - time())
    except BaseException:
        made.close()
        raise


async def _shake(
    made: Connection, secret: bytes, place: str, read: Callable[[bytes], Hears]
) -> Channel[Hears]:  # fmt: skip
    first = await made.exactly(len(protocol.MAGIC))
    while first.startswith(protocol.NAME) and b"\n" not in first and len(first) < protocol.MAGIC_BYTES_MAX:
        first += await made.exactly(1)  # of a version with more digits, which may send less after it
    if first == protocol.MAGIC:
        first += await made.exactly(protocol.NONCE_BYTES)
    shaking, answer = Handshake.with_server(secret, protocol.SUPERVISOR, first, place)
    made.write(answer)
    shaking.check_server(await made.exactly(protocol.NONCE_BYTES), place)
    return Channel(made, shaking.made(b"to-server"), shaking.made(b"to-client"), read)


async def _plugged(host: str, port: int) -> socket.socket:
    """Return a socket connected to one of the host's addresses. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, number, _, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, number)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, place)
            return sock
        except OSError as error:
            failure = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise failure


async def connect_any(
    targets: Sequence[tuple[str, int]], secret: bytes, read: Callable[[bytes], Hears], limit_s: float,
    *, other: Callable[[OtherProtocolError], object] = lambda error: None,
) -> Channel[Hears] | None:  # fmt: skip
    """Try all `targets` (host, port) at once, and return the first connection; None if none answers in time.
    `other` is told of those that speak another version of the protocol."""
    tries = [
        background.start(connect(host, port, secret, read, limit_s), background.to_its_awaiter)
        for host, port in targets
    ]
    found: Channel[Hears] | None = None
    try:
        for done in asyncio.as_completed(tries):
            with suppress(OSError, ValueError, asyncio.TimeoutError, AuthenticationError, ProtocolError):
                try:
                    found = await done
                    break
                except OtherProtocolError as error:
                    other(error)
    finally:
        # Not awaited: a caller that is cancelled meanwhile would leave the found connection open.
        for task in tries:
            task.add_done_callback(partial(_close_others, found))
            task.cancel()
    return found


def _close_others(found: Channel[Hears] | None, task: asyncio.Future[Channel[Hears]]) -> None:
    if not task.cancelled() and task.exception() is None and task.result() is not found:
        task.result().close()


ASK_LIMIT_S = 5.0
Answered = Accepted | Declined | Condition


def ask(
    directory: RunDirectory, what: str, *, by: str, node: str = "", step: int | None = None
) -> Answered | None:
    """Return the supervisor's answer; None if no supervisor answers, or none that this version understands.
    One that hangs up may have been replaced: then its successor is asked.
    Raises OtherProtocolError if the supervisor speaks another version of the protocol, and RunDirectoryError
    if the run's secret cannot be read."""
    secret, request = directory.secret(), Ask(what=what, by=by, node=node, step=step)
    answer, asked = None, 0
    while answer is None and (place := find(directory.epochs)) is not None and place.epoch > asked:
        answer, asked = asyncio.run(_ask(place, secret, request)), place.epoch
    return answer


async def _ask(place: Endpoint, secret: bytes, request: Ask) -> Answered | None:
    targets = [(host, place.port) for host in place.hosts]
    refused = list[OtherProtocolError]()
    connection = await channel.connect_any(targets, secret, read_answer, ASK_LIMIT_S, other=refused.append)
    if connection is None:
        if refused:
            raise refused[0]
        return None
    try:
        connection.send(request)
        answer = await asyncio.wait_for(connection.receive(), ASK_LIMIT_S)
        return None if isinstance(answer, Unreadable) else answer
    except (OSError, asyncio.TimeoutError, JurymastError):
        return None
    finally:
        connection.close()
