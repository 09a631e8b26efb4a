"""The agent's data server: manifests and byte ranges of the images that this node holds."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from jurymast.core.keeper import messages as keepers
from jurymast.core.keeper.copies import Image as Key
from jurymast.core.message import Strange
from jurymast.errors import AuthenticationError, ProtocolError, never
from jurymast.foreign import open_own
from jurymast.keeper.copies import CopyTable, StoredCopy
from jurymast.keeper.memory import MappedBuffer
from jurymast.wire import addresses, stream
from jurymast.wire.handshake import keeper_of
from jurymast.wire.shield import Access, agreed
from jurymast.wire.stream import Stream

Peer = Stream[keepers.Request]

# Connections that have not yet proved that they know the run's secret; each takes a thread.
UNPROVEN_MAX = 128
# Pause after a connection could not be accepted.
REST_S = 0.05
NOT_HELD = keepers.NotServed(why="not held (any more)")


class ImageServer:
    """Serves each connection in its own thread; `port` is the same at all addresses.

    `doubt` is called, in such a thread, with a copy from which a peer received wrong bytes.
    """

    def __init__(
        self, copies: CopyTable, access: Access, node: str, doubt: Callable[[StoredCopy], None]
    ) -> None:
        self._copies = copies
        self._doubt = doubt
        self._access = access
        self._who = keeper_of(node)
        self.port = 0
        self._listeners: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unproven: dict[socket.socket, None] = {}  # oldest first
        self._closed = threading.Event()

    def listen_at(self, address: str) -> None:
        """Listen at this address as well. Raises OSError."""
        if address in self._listeners or any(
            one.getsockname()[0] == addresses.ANY for one in self._listeners.values()
        ):
            return
        listener = self._listeners[address] = addresses.listen_at(address, self.port)
        self.port = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), name="keeper-accept", daemon=True).start()

    def close(self) -> None:
        """Stop at once; transfers under way fail for the other side."""
        with self._lock:
            self._closed.set()
            for connection in [*self._listeners.values(), *self._connections]:
                _shut(connection)
        for listener in self._listeners.values():
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._closed.wait(REST_S):
                    return
                continue  # the connection is gone already, or no descriptor is left for it
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._connections.add(connection)
                self._unproven[connection] = None
                if len(self._unproven) > UNPROVEN_MAX:
                    # The oldest, probably a stranger: agents prove themselves within milliseconds.
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    _shut(oldest)
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="keeper-serve", daemon=True
                ).start()
            except RuntimeError:  # no more threads can be started now
                self._gone(connection)
                self._closed.wait(REST_S)

    def _serve(self, connection: socket.socket) -> None:
        try:
            peer = stream.accept(connection, self._access.secret, self._who, keepers.read_request)
            with self._lock:
                self._unproven.pop(connection, None)
            while True:
                self._answer(peer, peer.receive())
        except (OSError, EOFError, AuthenticationError, ProtocolError):
            pass  # the other side is done, or notices: only blocks received whole and verified count there
        finally:
            self._gone(connection)

    def _gone(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._unproven.pop(connection, None)
        connection.close()

    def _answer(self, peer: Peer, request: keepers.Request) -> None:
        match request:
            case keepers.GetManifest() | keepers.GetBytes():
                here = self._access.ways
                if (way := agreed(request.ways, here)) is None:
                    asked = ", ".join(request.ways) or "nothing"
                    why = f"there is no common way to protect bytes: {asked} there, {', '.join(here)} here"
                    peer.send(keepers.NotServed(why=why))
                elif isinstance(request, keepers.GetManifest):
                    self._send_manifest(peer, request.image, way)
                else:
                    self._send_bytes(peer, request, way)
            case keepers.Check():
                for copy in self._copies.find(_key(request.image), group=request.image.group):
                    self._doubt(copy)
                peer.send(keepers.Doubted())
            case Strange():
                peer.send(keepers.NotServed(why=f"not a request: {request}"))
            case _:
                never(request)

    def _send_bytes(self, peer: Peer, request: keepers.GetBytes, way: str) -> None:
        image, at, length = request.image, request.at, request.length
        held = self._copies.acquire(_key(image), at, length, image.group)
        if held is None:
            peer.send(NOT_HELD)
            return
        try:
            _send_from(peer, held, at, length, way)
        finally:
            self._copies.release(held)

    def _send_manifest(self, peer: Peer, image: keepers.ImageName, way: str) -> None:
        key, group = _key(image), image.group
        known, held = self._copies.manifest(key, group), self._copies.find(key, group=group)
        if known is None:
            peer.send(NOT_HELD)
            return
        manifest, capacity = known
        data = held[0].manifest_bytes if held else manifest.to_bytes()
        peer.send(keepers.ManifestFollows(length=len(data), way=way, capacity=capacity))
        peer.send_bytes(data, way)  # too large for a message


def _key(image: keepers.ImageName) -> Key:
    return image.step, image.attempt, image.rank


def _send_from(peer: Peer, copy: StoredCopy, at: int, length: int, way: str) -> None:
    if isinstance(copy.place, MappedBuffer):
        peer.send(keepers.BytesFollow(length=length, way=way))
        with copy.place.view(at, at + length) as view:
            peer.send_bytes(view, way)
        return
    try:
        descriptor = open_own(copy.place)
    except OSError as error:
        peer.send(keepers.NotServed(why=f"{copy.place}: {error.strerror or error}"))
        return
    try:
        peer.send(keepers.BytesFollow(length=length, way=way))
        peer.send_file(descriptor, at, length, way)
    finally:
        os.close(descriptor)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
    except OSError:
        pass  # not connected any more
