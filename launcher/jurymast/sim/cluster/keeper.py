"""A node's simulated keeper: the real `Keeper`, its world, and what ranks and the oracle see of it. It loses
everything with its agent. Images have the sizes of real ones, but of each block only some bytes exist."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import ROUND_BYTES, SLOTS, round_up
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.images import ALL, COMMON, OWN, StateId
from jurymast.keeper.copies import CopyTable, StoredCopy
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import (
    RANK_BYTES,
    Manifest,
    RankRecord,
    RestoreStatus,
    SlotWord,
    Word,
    blocks_of,
    is_intact,
)
from jurymast.keeper.memory import ImageBuffer
from jurymast.keeper.transfer import Answers
from jurymast.sim.cluster.world import Token
from jurymast.storage.orders import DamagedImage
from jurymast.wire.protocol import Access

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent
    from jurymast.sim.cluster.cluster import Cluster

Result = TypeVar("Result")

# Each part is one block. An image and its manifest fill a slot to the last byte.
COMMON_BYTES, MANIFEST_BYTES = 15_000_000, 1000
SIZE_BYTES = 12 * ROUND_BYTES - MANIFEST_BYTES
CELL_BYTES, TOKEN_BYTES = 16, 12
SLOT_BYTES = round_up(SIZE_BYTES + MANIFEST_BYTES)
THREAD_S, COPY_S = (0.001, 0.08), (0.01, 0.25)
UNREACHABLE_S = 3.0


class SimBuffer:
    """See `keeper.memory.MappedBuffer`. Bytes exist only from the places on where a block or a manifest
    begins."""

    def __init__(self, memory: SimKeeperIo, capacity: int, number: int) -> None:
        self._memory = memory
        self.capacity, self.number, self.descriptor = round_up(capacity), number, number
        self.readers = self.allocated = 0
        self.cells: dict[int, bytearray] = {}
        self.path = str(number)

    def __getitem__(self, span: slice) -> memoryview:
        cell = self.cells.setdefault(span.start, bytearray(CELL_BYTES))
        return memoryview(cell)[: span.stop - span.start]

    def write(self, at: int, data: bytes) -> None:
        self.cells[at] = bytearray(data)

    def copy(self, source: SimBuffer, start: int, end: int) -> None:
        for at in [at for at in source.cells if start <= at < end]:
            self[at : at + CELL_BYTES][:] = source.cells[at]

    def reserve(self, start: int, end: int) -> None:
        taken = min(self.capacity, max(self.allocated, end - start))
        self._memory.free_bytes -= taken - self.allocated
        self.allocated = taken

    def close(self) -> None:
        self._memory.free_bytes += self.allocated
        self.allocated = 0


class SimStream:
    """An end of a connection between keepers, where that which is asked answers at once. Its own end has no
    `answers`."""

    def __init__(self, answers: Answers | None, came: deque[Any]) -> None:
        self._answers, self._came = answers, came

    def send(self, message: Any) -> None:
        if self._answers is None:
            self._came.append(message)
        else:
            self._answers.to(SimStream(None, self._came), message)

    def send_bytes(self, data: bytes | memoryview, way: str) -> None:
        self._came.append(bytes(data))

    def send_file(self, descriptor: int, at: int, length: int, way: str) -> None:
        raise NotImplementedError

    def receive(self) -> Any:
        return self._came.popleft()

    def receive_pieces(self, target: memoryview, way: str) -> Iterator[memoryview]:
        target[:] = self._came.popleft()
        yield target


class SimKeeperIo:
    """See `keeper.io.KeeperIo`. `room`: this many images of other nodes' ranks fit into this node's memory in
    addition to its own."""

    def __init__(self, agent: SimAgent, room: int) -> None:
        count = agent.cluster.ranks_per_node
        self._agent, self.node = agent, agent.site.name
        self.ways = Access(b"").ways
        self.free_bytes = SLOT_BYTES * ((SLOTS + 1) * count + room)
        self.port = agent.cluster.new_port()
        page: Any = memoryview(bytearray(count * RANK_BYTES))
        self.records = [RankRecord(page, local) for local in range(count)]
        self.page_path = ""
        self.answers: Answers

    def serve(self, copies: CopyTable, doubt: Callable[[StoredCopy], None]) -> None:
        self.answers = Answers(copies, self.ways, doubt)

    def listen_at(self, address: str) -> None:
        pass  # it does from the beginning

    def room(self) -> msg.Room:
        return msg.Room(self.free_bytes, "memory.max")

    def make(self, capacity: int, number: int) -> SimBuffer:
        return SimBuffer(self, capacity, number)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        await asyncio.sleep(self._agent.world.between(*THREAD_S))
        return function(*arguments)

    async def with_keeper(self, source: msg.Source, talk: Callable[[SimStream], Result]) -> Result:
        return talk(SimStream((await self._reached(source)).io.answers, deque()))

    async def _reached(self, source: msg.Source) -> SimKeeper:
        """Wait as long as a transfer takes. Raises OSError if the other keeper cannot be reached."""
        cluster, now = self._agent.cluster, self._agent.world.now
        other = cluster.keepers.get((source.hosts[0], source.port))
        host = cluster.sites[source.hosts[0]]
        stopped = host.stopped_until > now or (other is not None and other.agent.process.until > now)
        if stopped or not host.up or not cluster.network.joins(self.node, host.name):
            await asyncio.sleep(UNREACHABLE_S)
            raise TimeoutError("timed out")
        if other is None or not other.agent.process.alive:
            await asyncio.sleep(0.01)
            raise ConnectionRefusedError("connection refused")
        await asyncio.sleep(self._agent.world.between(*COPY_S))
        if other.agent.process.alive and cluster.network.joins(self.node, host.name):
            return other
        raise ConnectionError("the connection broke")

    def close(self) -> None:
        self._agent.keeper.ended()


class SimImage:
    """What the oracle knows of a copy that is held, or was. `token`: its content, as it was saved."""

    def __init__(self, copy: StoredCopy, memory: ImageBuffer, token: Token, held_at: float) -> None:
        self.copy, self.memory, self.token, self.held_at = copy, memory, token, held_at
        self.key, self.rank, self.world = copy.image.state, copy.image.rank, copy.manifest.world
        self.tier, self.part = copy.tier, copy.part
        self.corrupt = not all(is_intact(memory, block) for block in blocks_of(copy.manifest, copy.part))

    def has(self, part: str) -> bool:
        return self.part in (ALL, part)

    def flip(self) -> None:
        """A bit of it turns."""
        at = 0 if self.part == COMMON else COMMON_BYTES
        self.memory[at : at + CELL_BYTES][-1] ^= 1
        self.corrupt = True


def whole(images: Iterable[SimImage], key: StateId, world: int) -> bool:
    """Return whether these images give every rank's image of a state."""
    good = [image for image in images if image.key == key and not image.corrupt]
    own = {image.rank for image in good if image.has(OWN)}
    return any(image.has(COMMON) for image in good) and len(own) >= world


class SimKeeper(Keeper):
    """Tells the oracle what is held, and checks the machine."""

    io: SimKeeperIo

    def __init__(self, agent: SimAgent, room: int) -> None:
        self.agent: SimAgent = agent
        self.cluster: Cluster = agent.cluster
        self._images: dict[do.KeptCopy, SimImage] = {}
        self._corrupt: list[StoredCopy] = []  # when the newest attempt began
        self.failed = agent.loop.failed
        super().__init__(SimKeeperIo(agent, room), agent.say)
        self.cluster.keepers[agent.site.name, self.port] = self

    @property
    def held(self) -> list[SimImage]:
        return [*self._images.values()]

    def ended(self) -> None:
        """Nobody reaches it any more, what it held is lost, and work that Python collects changes nothing."""
        self._closed = True
        self.cluster.keepers.pop((self.agent.site.name, self.port), None)
        self.cluster.oracle.lost(self)

    def obey(self, order: msg.KeeperOrder) -> None:
        if isinstance(order, msg.Committed):
            self.cluster.oracle.may_go(self, max(self.machine.holding.committed, (order.attempt, order.step)))
        super().obey(order)

    def act(self, effects: list[do.Effect]) -> None:
        super().act(effects)
        if effects and not self._acting:  # an event without effects has hardly changed anything
            self.machine.check()

    def _one(self, effect: do.Effect) -> None:
        self.agent.world.happens(effect)
        super()._one(effect)
        if isinstance(effect, do.Serve):
            copy = effect.copy
            assert isinstance(copy, StoredCopy)
            assert copy.memory is not None
            token = self._token(copy.memory, 0 if copy.part == COMMON else COMMON_BYTES)
            self._images[copy] = image = SimImage(copy, copy.memory, token, self.agent.world.now)
            self.cluster.oracle.held(self, image)
        elif isinstance(effect, do.Unserve):
            del self._images[effect.copy]

    def _token(self, buffer: ImageBuffer, at: int) -> Token:
        """Return the content of which a part begins here."""
        return self.cluster.tokens[bytes(buffer[at : at + TOKEN_BYTES])]

    def launch(self, attempt: int, ranks: list[int], world: int, restore: msg.Restore | None) -> None:
        self._corrupt = [image.copy for image in self.held if image.corrupt]
        super().launch(attempt, ranks, world, restore)

    def _show(self, effect: do.Show) -> str:
        why = super()._show(effect)
        if not why:
            self.cluster.oracle.size.shows(self, self.shown, self._corrupt)
        return why

    # ---- what ranks and writers do

    def wants(self) -> None:
        """The node's ranks, like all others, have restored and ask for memory."""
        for record in self.io.records:
            record[Word.WANT] = SIZE_BYTES + MANIFEST_BYTES

    def free(self, local: int) -> list[int]:
        """Return the slots that a rank may write to."""
        return [number for number in range(SLOTS) if self._words(local, number).writable]

    def save(self, local: int, key: StateId, token: Token, world: int, stall_s: float) -> None:
        """A rank saves; its agent is told."""
        rank, number = self.machine.ranks[local].rank, self.free(local)[0]
        words = self._words(local, number)
        name = xxhash.xxh3_128_digest(repr(token).encode())[:TOKEN_BYTES]
        self.cluster.tokens[name] = token
        behind = Manifest(key.step, key.attempt, rank, world, "", SIZE_BYTES, COMMON_BYTES).to_bytes()
        written = {0: name + b"same", COMMON_BYTES: name + rank.to_bytes(4, "big"), SIZE_BYTES: behind}
        for at, data in written.items():
            self.buffers[words[SlotWord.GENERATION]].write(at, data)
        words[SlotWord.STEP], words[SlotWord.IMAGE], words[SlotWord.MANIFEST] = (
            key.step, SIZE_BYTES, len(behind),
        )  # fmt: skip
        words[SlotWord.SEQ] = words[SlotWord.FREED] + 2
        said = within.Image(local_rank=local, slot=number, step=key.step, stall_s=stall_s)
        self.agent.rank_said(said)

    def status(self, local: int) -> RestoreStatus:
        return RestoreStatus(self.io.records[local][Word.RESTORE])

    def restored(self, local: int) -> list[tuple[StateId, Token]]:
        """Return what a rank finds in the slot that it restores, or in each image of another number of
        ranks."""
        record = self.io.records[local]
        if self.status(local) is RestoreStatus.COLLECTED:
            return [(image.copy.image.state, image.token) for image in self._shown()]
        buffer = self.buffers[self._words(local, record[Word.RESTORE_SLOT])[SlotWord.GENERATION]]
        size = record[Word.RESTORE_IMAGE]
        manifest = Manifest.from_bytes(bytes(buffer[size : size + record[Word.RESTORE_MANIFEST]]))
        return [(manifest.image.state, self._token(buffer, COMMON_BYTES))]

    def _shown(self) -> list[SimImage]:
        """Return the copies that ranks of another number read, as they are now."""
        found = []
        for copy in self.shown:
            assert copy.memory is not None
            token = self._token(copy.memory, 0 if copy.part == COMMON else COMMON_BYTES)
            found.append(SimImage(copy, copy.memory, token, self.agent.world.now))
        return found

    def read(self, loan: Loan) -> Token:
        """Return what a writer reads. Raises DamagedImage."""
        for block in blocks_of(loan.manifest):
            path = loan.common_path if block.part == COMMON and loan.common_path else loan.path
            if not is_intact(self.buffers[int(path)], block):
                raise DamagedImage("it is corrupt", loan.manifest.rank)
        return self._token(self.buffers[int(loan.path)], COMMON_BYTES)
