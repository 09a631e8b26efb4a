"""Images from one node to another: the agent's data server, which sends manifests and byte ranges of the
images that its node holds, and the client, which assembles an image or a part of one, block by block.

A block counts if its hash is right, no matter who sent it. So if a source dies or sends wrong bytes, the next
source has to send only the blocks that are still missing. `wire.stream` has the connections.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import xxhash

from jurymast.core.state.images import ALL, ImageId, parts_of
from jurymast.core.state.message import Unreadable, kind_of, reader
from jurymast.core.state.messages import Source
from jurymast.errors import AuthenticationError, ProtocolError, never
from jurymast.foreign import open_own, reading_own
from jurymast.keeper.copies import CopyTable, StoredCopy, trusted
from jurymast.keeper.manifest import BadImage, Block, Manifest, blocks_of, hash_block
from jurymast.keeper.memory import ImageBuffer
from jurymast.reading import conclusive
from jurymast.wire import addresses, stream
from jurymast.wire.handshakes import TURN_EVERY_S, Handshakes, Proven
from jurymast.wire.protocol import Access, agreed, keeper_of
from jurymast.wire.stream import Stream

# ---- messages


class ImageName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's image of a state."""

    step: int
    attempt: int
    rank: int


class ToKeeper(msgspec.Struct, frozen=True, kw_only=True, tag_field="get", tag=kind_of):
    """A keeper's request for an image; `ways`: how the bytes may be protected, see `wire.protocol`."""

    image: ImageName
    ways: tuple[str, ...] = ()


class GetManifest(ToKeeper, frozen=True, kw_only=True):
    """Request the image's manifest; answered by ManifestFollows and the manifest."""


class GetBytes(ToKeeper, frozen=True, kw_only=True):
    """Request `length` bytes of the image from `at` on; answered by BytesFollow and these bytes."""

    at: int
    length: int


class Check(ToKeeper, frozen=True, kw_only=True):
    """Wrong bytes of the image arrived: verify it there. Answered by Doubted."""


class FromKeeper(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer", tag=kind_of):
    """A keeper's answer."""


class ManifestFollows(FromKeeper, frozen=True, kw_only=True):
    """This many bytes follow, protected in this way. `capacity`: bytes of the buffer that contains the image,
    or 0."""

    length: int
    way: str
    capacity: int


class BytesFollow(FromKeeper, frozen=True, kw_only=True):
    """This many bytes follow, protected in this way."""

    length: int
    way: str


class Doubted(FromKeeper, frozen=True, kw_only=True):
    """The image will be verified again."""


class NotServed(FromKeeper, frozen=True, kw_only=True):
    """Nothing follows."""

    why: str


Request = GetManifest | GetBytes | Check | Unreadable
Served = ManifestFollows | BytesFollow | Doubted | NotServed | Unreadable

read_request: Callable[[bytes], Request] = reader(GetManifest | GetBytes | Check)
read_served: Callable[[bytes], Served] = reader(ManifestFollows | BytesFollow | Doubted | NotServed)


class KeeperLink(Protocol):
    """A connection to another keeper: see `wire.stream.Stream`."""

    def send(self, message: msgspec.Struct) -> None: ...
    def send_bytes(self, data: bytes | memoryview, way: str) -> None: ...
    def send_file(self, descriptor: int, at: int, length: int, way: str) -> None: ...
    def receive(self) -> Any: ...
    def receive_pieces(self, target: memoryview, way: str) -> Iterator[memoryview]: ...


# ---- the client

STREAMS = 2
# Requests under way on one connection: the other side sends the next block while this one is hashed.
AHEAD = 2
MANIFEST_BYTES_MAX = 64 << 20  # 19 bytes for each 16 MiB of an image
Answer = TypeVar("Answer", bound=FromKeeper)
BROKEN = (OSError, AuthenticationError, ProtocolError, BadImage)


def connect(source: Source, access: Access) -> Stream[Served]:
    """Connect to the data server of the source's node. Raises OSError, AuthenticationError or
    ProtocolError."""
    whom = keeper_of(source.node)
    failure: Exception = ConnectionError("it has no address")
    for host in source.hosts:
        try:
            return stream.connect(host, source.port, access.secret, whom, read_served)
        except (OSError, AuthenticationError, ProtocolError) as error:
            failure = error
    raise failure


def manifest_of(connection: KeeperLink, ways: tuple[str, ...], key: ImageId) -> tuple[Manifest, int]:
    """Return (the image's manifest, the capacity of its buffer there or 0). Raises `BROKEN`."""
    connection.send(GetManifest(image=_named(key), ways=ways))
    answer = _answer(connection, ManifestFollows, ways)
    if not 0 < answer.length <= MANIFEST_BYTES_MAX:
        raise ProtocolError(f"a manifest of {answer.length} bytes")
    data = bytearray(answer.length)
    for _ in connection.receive_pieces(memoryview(data), answer.way):
        pass
    return trusted(bytes(data), key), answer.capacity


@dataclass
class ImageFetch:
    """An image that is being assembled in `buffer`, from one source at a time; `stop` makes it give up soon.
    `got` counts bytes by tier; `passed_over` says why sources did not serve, one line for each.
    """

    manifest: Manifest
    buffer: ImageBuffer
    part: str = ALL
    missing: list[Block] = field(init=False)
    got: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.missing = blocks_of(self.manifest, self.part)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def lacking(self) -> set[str]:
        """Return the parts that are not complete."""
        return {block.part for block in self.missing}

    def keep(self, part: str, tier: str) -> bool:
        """Count blocks of `part` that are in the buffer already. Return False if one is corrupt."""
        wanted = self.wanted(part)
        good = [block for block in wanted if hash_block(self.view(block)) == block.hash]
        return self.take(good, tier) == len(wanted)

    def view(self, block: Block) -> memoryview:
        """Return the block's place in the buffer."""
        return self.buffer[block.at : block.at + block.length]

    def from_copy(self, name: str, copy: StoredCopy, part: str, tier: str) -> str:
        """Take missing blocks from a copy on this node. Return what is damaged in it, or "". A copy that did
        not serve is noted by its `name`, whatever the reason."""
        wanted = self.wanted(part)
        good: list[Block] = []
        why, unable = "", False
        try:
            with nullcontext() if copy.memory is not None else reading_own(copy.path) as file:
                for block in wanted:
                    if self.stop.is_set():
                        break
                    view = self.view(block)
                    if copy.memory is not None:
                        self.buffer.copy(copy.memory, block.at, block.at + block.length)
                    elif file is None or file.seek(block.at) + file.readinto(view) < block.at + block.length:
                        raise EOFError("the file is shorter than its image")
                    if hash_block(view) == block.hash:
                        good.append(block)
        except (OSError, EOFError) as error:
            why = text_of(error)
            unable = not conclusive(error) and not isinstance(error, FileNotFoundError)
        if self.take(good, tier) == len(wanted) or self.stop.is_set():
            return ""
        why = why or f"{len(wanted) - len(good)} of {len(wanted)} blocks are corrupt"
        self.passed_over.append(f"{name}: {why}")
        return "" if unable else why

    def pull(
        self,
        connection: KeeperLink,
        ways: tuple[str, ...],
        key: ImageId,
        queue: deque[Block],
        good: list[Block],
    ) -> list[str]:
        """Fetch blocks of the image `key` from the queue until it is empty; that may be another rank's image
        if they are of the common part. Return why some are corrupt."""
        asked: deque[Block] = deque()
        reasons = []
        while not self.stop.is_set():
            while len(asked) < AHEAD and queue:
                try:
                    block = queue.popleft()
                except IndexError:
                    break  # the other stream was faster
                connection.send(GetBytes(image=_named(key), at=block.at, length=block.length, ways=ways))
                asked.append(block)
            if not asked:
                break
            block = asked.popleft()
            answer = _answer(connection, BytesFollow, ways)
            if answer.length != block.length:
                raise ProtocolError("an answer of another length than asked for")
            if _receive(connection, self.view(block), answer.way) == block.hash:
                good.append(block)
            else:
                reasons.append(f"the block at {block.at} of the {block.part} part is corrupt")
        if reasons and not asked:
            connection.send(Check(image=_named(key)))  # is it corrupt there, or only in transit?
            _answer(connection, Doubted, ways)
        return reasons

    def wanted(self, part: str) -> list[Block]:
        return [block for block in self.missing if block.part in parts_of(part)]

    def take(self, good: Sequence[Block], tier: str) -> int:
        """Count these blocks, which are in the buffer now; return how many."""
        taken = set(good)
        self.missing = [block for block in self.missing if block not in taken]
        if good:
            self.got[tier] = self.got.get(tier, 0) + sum(block.length for block in good)
        return len(good)


def _receive(connection: KeeperLink, target: memoryview, way: str) -> str:
    """Fill `target`. Return its hash, made piece by piece while the bytes are in the processor's cache."""
    hasher = xxhash.xxh3_64()
    for piece in connection.receive_pieces(target, way):
        hasher.update(piece)
    return str(hasher.hexdigest())


def _answer(connection: KeeperLink, kind: type[Answer], ways: tuple[str, ...]) -> Answer:
    """Receive an answer of this kind. Raises ProtocolError for any other."""
    answer = connection.receive()
    if isinstance(answer, ManifestFollows | BytesFollow) and answer.way not in ways:
        raise ProtocolError(f"an answer protected by {answer.way}, which was not offered")
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, NotServed):
        raise ProtocolError(answer.why)
    what = answer if isinstance(answer, Unreadable) else type(answer).__name__
    raise ProtocolError(f"an answer to another request: {what}")


def _named(key: ImageId) -> ImageName:
    step, attempt, rank = key
    return ImageName(step=step, attempt=attempt, rank=rank)


def text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


# ---- the server

NOT_HELD = NotServed(why="not held")


class Answers:
    """A keeper's answers. `doubt` is called with a copy from which another keeper received wrong bytes."""

    def __init__(self, copies: CopyTable, ways: tuple[str, ...], doubt: Callable[[StoredCopy], None]) -> None:
        self._copies, self._ways, self._doubt = copies, ways, doubt

    def to(self, peer: KeeperLink, request: Request) -> None:
        match request:
            case GetManifest() | GetBytes():
                here = self._ways
                if (way := agreed(request.ways, here)) is None:
                    asked = ", ".join(request.ways) or "nothing"
                    why = f"no common way to protect bytes: {asked} requested, {', '.join(here)} offered"
                    peer.send(NotServed(why=why))
                elif isinstance(request, GetManifest):
                    self._send_manifest(peer, request.image, way)
                else:
                    self._send_bytes(peer, request, way)
            case Check():
                for copy in self._copies.find(_key(request.image)):
                    self._doubt(copy)
                peer.send(Doubted())
            case Unreadable():
                peer.send(NotServed(why=f"not a request: {request}"))
            case _:
                never(request)

    def _send_bytes(self, peer: KeeperLink, request: GetBytes, way: str) -> None:
        image, at, length = request.image, request.at, request.length
        held = self._copies.acquire(_key(image), at, length)
        if held is None:
            peer.send(NOT_HELD)
            return
        try:
            _send_from(peer, held, at, length, way)
        finally:
            self._copies.release(held)

    def _send_manifest(self, peer: KeeperLink, image: ImageName, way: str) -> None:
        held = self._copies.find(_key(image))
        if not held:
            peer.send(NOT_HELD)
            return
        data, capacity = held[0].manifest_bytes, max(copy.capacity for copy in held)
        peer.send(ManifestFollows(length=len(data), way=way, capacity=capacity))
        peer.send_bytes(data, way)  # too large for a message


class ImageServer:
    """Answers each proven connection in its own thread; `port` is the same at all addresses."""

    def __init__(
        self, copies: CopyTable, access: Access, node: str, doubt: Callable[[StoredCopy], None]
    ) -> None:
        self._answers = Answers(copies, access.ways, doubt)
        self._handshakes = Handshakes(access.secret, keeper_of(node))
        self.port = 0
        self._listeners: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()

    def listen_at(self, address: str) -> None:
        """Listen at this address as well. Raises OSError."""
        if address in self._listeners or any(
            addresses.listens_at_all(one) for one in self._listeners.values()
        ):
            return
        first = not self._listeners
        listener = self._listeners[address] = addresses.listen_at(address, self.port)
        self.port = listener.getsockname()[1]
        self._handshakes.listen(listener)
        if first:
            threading.Thread(target=self._accept, name="keeper-accept", daemon=True).start()

    def close(self) -> None:
        """Stop at once; transfers under way fail for the other side."""
        with self._lock:
            self._closed.set()
            for connection in [*self._listeners.values(), *self._connections]:
                _shut(connection)  # wakes the thread that accepts, too, which closes them
        if not self._listeners:
            self._handshakes.close()

    def _accept(self) -> None:
        ready = select.poll()
        ready.register(self._handshakes.fileno(), select.POLLIN)
        while not self._closed.is_set():
            ready.poll(1000 * TURN_EVERY_S)
            for proven in self._handshakes.turn():
                self._begin(proven)
        self._handshakes.close()

    def _begin(self, proven: Proven) -> None:
        with self._lock:
            if self._closed.is_set():
                proven.close()
                return
            self._connections.add(proven.sock)
        try:
            threading.Thread(target=self._serve, args=(proven,), name="keeper-serve", daemon=True).start()
        except RuntimeError:  # no more threads can be started now
            self._gone(proven.sock)

    def _serve(self, proven: Proven) -> None:
        try:
            peer = stream.accepted(proven, read_request)
            while True:
                self._answers.to(peer, peer.receive())
        except (OSError, EOFError, AuthenticationError, ProtocolError):
            pass  # the other side is done, or notices: only blocks received whole and verified count there
        finally:
            self._gone(proven.sock)

    def _gone(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


def _key(image: ImageName) -> ImageId:
    return ImageId(image.step, image.attempt, image.rank)


def _send_from(peer: KeeperLink, copy: StoredCopy, at: int, length: int, way: str) -> None:
    if copy.memory is not None:
        peer.send(BytesFollow(length=length, way=way))
        with copy.memory[at : at + length] as view:
            peer.send_bytes(view, way)
        return
    try:
        descriptor = open_own(copy.path)
    except OSError as error:
        peer.send(NotServed(why=f"{copy.path}: {error.strerror or error}"))
        return
    try:
        peer.send(BytesFollow(length=length, way=way))
        peer.send_file(descriptor, at, length, way)
    finally:
        os.close(descriptor)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
    except OSError:
        pass  # not connected any more
