"""Assembles an image, or a part of one, in a buffer, block by block, from all its sources.

A block counts if its hash is right, no matter who sent it. So if a source dies or sends wrong bytes, the next
source has to send only the blocks that are still missing.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import xxhash

from jurymast.core.checkpoints.copies import ALL, LOCAL, parts_of
from jurymast.core.keeper import messages as keepers
from jurymast.core.keeper.copies import Image as Key
from jurymast.core.message import Strange
from jurymast.core.messages import Source
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.foreign import open_own
from jurymast.keeper.copies import Group, trusted
from jurymast.keeper.manifest import BadImage, Block, Manifest, blocks_of, hash_block
from jurymast.keeper.memory import MappedBuffer
from jurymast.wire import stream
from jurymast.wire.handshake import keeper_of
from jurymast.wire.shield import Access
from jurymast.wire.stream import Stream

STREAMS = 2
# Requests under way on one connection: the other side sends the next block while this one is hashed.
AHEAD = 2
MANIFEST_BYTES_MAX = 1 << 30
Answer = TypeVar("Answer", bound=keepers.FromKeeper)
_BROKEN = (OSError, AuthenticationError, ProtocolError, BadImage)


def connect(source: Source, access: Access) -> Stream[keepers.Served]:
    """Connect to the data server of the source's node. Raises OSError, AuthenticationError or
    ProtocolError."""
    whom = keeper_of(source.node)
    failure: Exception = ConnectionError("it has no address")
    for host in source.hosts:
        try:
            return stream.connect(host, source.port, access.secret, whom, keepers.read_served)
        except (OSError, AuthenticationError, ProtocolError) as error:
            failure = error
    raise failure


def manifest_of(source: Source, access: Access, key: Key, group: Group = ()) -> tuple[Manifest, int]:
    """Return (the image's manifest, the capacity of its buffer there or 0); with a `group`, those of the
    group's XOR. Raises what `connect` raises, and BadImage."""
    with closing(connect(source, access)) as connection:
        connection.send(keepers.GetManifest(image=_named(key, group), ways=access.ways))
        answer = _answer(connection, keepers.ManifestFollows, access)
        if not 0 < answer.length <= MANIFEST_BYTES_MAX:
            raise ProtocolError(f"a manifest of {answer.length} bytes")
        data = bytearray(answer.length)
        for _ in connection.receive_pieces(memoryview(data), answer.way):
            pass
        return trusted(bytes(data), key), answer.capacity


@dataclass
class Filling:
    """An image that is being assembled in `buffer`, by one thread at a time; `stop` makes it give up soon.

    `origin` is the offset in the image at which the buffer begins, `group` that of the XOR if this is one.
    `got` counts bytes by tier; `passed_over` says why sources did not serve, one line for each.
    """

    manifest: Manifest
    buffer: MappedBuffer
    part: str = ALL
    missing: list[Block] = field(default_factory=list)
    got: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    origin: int = 0
    group: Group = ()

    def __post_init__(self) -> None:
        self.missing = self.missing or blocks_of(self.manifest, self.part)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def lacking(self) -> set[str]:
        """Return the parts that are not complete."""
        return {block.part for block in self.missing}

    def keep(self, part: str, tier: str, among: Sequence[Block] | None = None) -> bool:
        """Count blocks of `part`, or the blocks `among` it, that are in the buffer already. Return False if
        one is corrupt."""
        wanted = self.wanted(part) if among is None else among
        good = [block for block in wanted if hash_block(self.view(block)) == block.hash]
        return self._take(good, tier) == len(wanted)

    def view(self, block: Block) -> memoryview:
        """Return the block's place in the buffer."""
        return self.buffer.view(block.at - self.origin, block.at - self.origin + block.length)

    def from_file(self, name: str, path: Path | str, part: str, tier: str) -> str:
        """Take missing blocks from a file. Return why it did not serve, calling it `name`, or ""."""
        wanted = self.wanted(part)
        good: list[Block] = []
        why = ""
        try:
            # memory's path is a link that only this user's processes may follow
            descriptor = open_own(path) if tier == LOCAL else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for block in wanted:
                    if self.stop.is_set():
                        break
                    view = self.view(block)
                    _read(descriptor, block.at, view)
                    if hash_block(view) == block.hash:
                        good.append(block)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            why = _text(error)
        if self._take(good, tier) == len(wanted) or self.stop.is_set():
            return ""
        why = why or f"{len(wanted) - len(good)} of {len(wanted)} blocks are corrupt"
        self.passed_over.append(f"{name}: {why}")
        return why

    def from_peer(self, source: Source, access: Access, key: Key, part: str, tier: str) -> None:
        """Fetch missing blocks of `part` from the image `key` on the source's node, which for a common part
        may be another rank's. Returns once all are fetched or the connections have failed."""
        wanted = self.wanted(part)
        queue, good, reasons = deque(wanted), list[Block](), list[str]()

        def work() -> None:
            try:
                with closing(connect(source, access)) as connection:
                    reasons.extend(self._pull(connection, access, _named(key, self.group), queue, good))
            except _BROKEN as error:
                reasons.append(_text(error))

        threads = [
            threading.Thread(target=work, name="keeper-pull", daemon=True)
            for _ in range(min(STREAMS, len(wanted)) - 1)
        ]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if self._take(good, tier) < len(wanted):
            self.passed_over.append(f"{source.node}: {reasons[0] if reasons else 'interrupted'}")

    def _pull(
        self, connection: Stream[keepers.Served], access: Access, image: keepers.ImageName,
        queue: deque[Block], good: list[Block],
    ) -> list[str]:  # fmt: skip
        """Fetch blocks from the queue until it is empty. Return why some are corrupt."""
        asked: deque[Block] = deque()
        reasons = []
        ways = access.ways
        while not self.stop.is_set():
            while len(asked) < AHEAD and queue:
                try:
                    block = queue.popleft()
                except IndexError:
                    break  # the other stream was faster
                connection.send(keepers.GetBytes(image=image, at=block.at, length=block.length, ways=ways))
                asked.append(block)
            if not asked:
                break
            block = asked.popleft()
            answer = _answer(connection, keepers.BytesFollow, access)
            if answer.length != block.length:
                raise ProtocolError("an answer of another length than asked for")
            if _receive(connection, self.view(block), answer.way) == block.hash:
                good.append(block)
            else:
                reasons.append(f"the block at {block.at} of the {block.part} part is corrupt")
        if reasons and not asked:
            connection.send(keepers.Check(image=image))  # is it corrupt there, or only in transit?
            _answer(connection, keepers.Doubted, access)
        return reasons

    def wanted(self, part: str) -> list[Block]:
        return [block for block in self.missing if block.part in parts_of(part)]

    def _take(self, good: Sequence[Block], tier: str) -> int:
        taken = set(good)
        self.missing = [block for block in self.missing if block not in taken]
        if good:
            self.got[tier] = self.got.get(tier, 0) + sum(block.length for block in good)
        return len(good)


def _receive(connection: Stream[keepers.Served], target: memoryview, way: str) -> str:
    """Fill `target`. Return its hash, made piece by piece while the bytes are in the processor's cache."""
    hasher = xxhash.xxh3_64()
    for piece in connection.receive_pieces(target, way):
        hasher.update(piece)
    return str(hasher.hexdigest())


def _answer(connection: Stream[keepers.Served], kind: type[Answer], access: Access) -> Answer:
    """Receive an answer of this kind. Raises ProtocolError for any other."""
    answer = connection.receive()
    if isinstance(answer, keepers.ManifestFollows | keepers.BytesFollow) and answer.way not in access.ways:
        raise ProtocolError(f"an answer protected by {answer.way}, which was not offered")
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, keepers.NotServed):
        raise ProtocolError(answer.why)
    what = answer if isinstance(answer, Strange) else type(answer).__name__
    raise ProtocolError(f"an answer to another request: {what}")


def _named(key: Key, group: Group) -> keepers.ImageName:
    step, attempt, rank = key
    return keepers.ImageName(step=step, attempt=attempt, rank=rank, group=group)


def _read(descriptor: int, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], at + done)
        if not got:
            raise EOFError("the file is shorter than its image")
        done += got


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
