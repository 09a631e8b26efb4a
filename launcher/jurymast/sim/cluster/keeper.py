"""A node's simulated keeper: the real `KeeperMachine` over simulated memory, hashes and transfers. It loses
everything with its agent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jurymast.core.keeper import effects as core
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import SLOTS, SlotState, round_up
from jurymast.core.keeper.machine import KeeperMachine
from jurymast.core.keeper.restores import Filled, Found, usable, whom_to_ask
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.images import ALL, COMMON, MEMORY, OWN, PEER, ImageId, StateId, parts_of
from jurymast.core.state.messages import Room
from jurymast.keeper.manifest import RestoreStatus
from jurymast.sim.cluster.world import Steps, Token

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent

SIZE_BYTES, COMMON_BYTES, MANIFEST_BYTES = 100_000_000, 60_000_000, 1000
SLOT_BYTES = round_up(SIZE_BYTES + MANIFEST_BYTES)
HASH_S, COPY_S, MEMORY_S = (0.002, 0.08), (0.01, 0.25), (0.001, 0.03)
UNREACHABLE_S = 3.0
WRONG = "wrong bytes"


class SimImage(core.KeptCopy):
    """What a keeper holds. `token`: its content."""

    def __init__(self, image: ImageId, world: int, tier: str, part: str, buffer: int, token: Token) -> None:
        super().__init__(report(image, world, tier, part, token), buffer)
        self.token = token
        self.corrupt = False
        self.held_at = 0.0

    @property
    def key(self) -> StateId:
        return self.image.state

    @property
    def rank(self) -> int:
        return self.image.rank

    @property
    def world(self) -> int:
        return self.report.world

    def give_back(self) -> None:
        pass  # a loan

    def has(self, part: str) -> bool:
        return self.part in (ALL, part)


def report(image: ImageId, world: int, tier: str, part: str, token: Token) -> msg.CopyReport:
    common_id = "-".join(map(str, token.history))
    return msg.CopyReport(
        tier=tier, step=image.step, attempt=image.attempt, rank=image.rank, world=world, part=part,
        size_bytes=SIZE_BYTES, common_bytes=COMMON_BYTES, common_id=common_id,
    )  # fmt: skip


@dataclass
class _SimWork:
    """Work. `token`: the content of the image that was found; `base`: what the buffer already contains."""

    key: StateId = StateId(0, 0)
    world: int = 0
    token: Token | None = None
    base: SimImage | None = None
    stop: bool = False
    why: list[str] = field(default_factory=list)


class SimKeeper:
    """`room`: this many images of other nodes' ranks fit into this node's memory in addition to its own."""

    def __init__(self, agent: SimAgent, room: int) -> None:
        self.agent, self.world = agent, agent.world
        count = agent.cluster.ranks_per_node
        self.machine = KeeperMachine(agent.site.name, count)
        self.bytes = SLOT_BYTES * ((SLOTS + 1) * count + room)
        self.port = agent.cluster.new_port()
        agent.cluster.keepers[agent.site.name, self.port] = self
        self.held: list[SimImage] = []
        self._wanted = False
        self._published: set[tuple[int, int]] = set()  # local rank and slot
        self.status: dict[int, RestoreStatus] = {}  # by local rank
        self.found: dict[int, SimImage] = {}
        self._allocated: dict[int, int] = {}  # by buffer
        self._capacity: dict[int, int] = {}
        self._written: dict[int, SimImage] = {}  # by buffer
        self._going: dict[int, _SimWork] = {}
        self._due: deque[do.Effect] = deque()
        self._acting = False

    def of(self, key: StateId, rank: int) -> list[SimImage]:
        """Return the copies of this image, or of a part of it."""
        return [image for image in self.held if image.image == (*key, rank)]

    async def lend(self, step: int, attempt: int, rank: int) -> SimImage | None:
        """Return what storage gets: the image, or its own part if its common part is here as well."""
        key = StateId(step, attempt)
        mine = [one for one in self.of(key, rank) if not one.corrupt]
        for one in sorted(mine, key=lambda one: one.part != ALL):
            alike = [other for other in self.held if other.key == key and other.has(COMMON)]
            alike = [other for other in alike if other.report.common_id == one.report.common_id]
            if one.part == ALL or (one.part == OWN and any(not other.corrupt for other in alike)):
                return one
        for image in [image for image in self.held if image.key == key and image.corrupt]:
            self.doubt(image)  # the writer reads it
        return None

    def inventory(self) -> tuple[msg.CopyReport, ...]:
        return self.machine.inventory()

    def room(self) -> Room:
        return Room(self.bytes, "memory.max")

    def listen_at(self, address: str) -> None:
        pass  # it does from the beginning

    async def close(self) -> None:
        self.ended()

    def ended(self) -> None:
        """Nobody reaches it any more, and what it held is lost."""
        self.agent.cluster.keepers.pop((self.agent.site.name, self.port), None)
        self.agent.cluster.oracle.lost(self)

    # ---- the memory that ranks share with it

    def wants(self) -> None:
        """The node's ranks, like all others, have restored and ask for memory."""
        self._wanted = True

    def free(self, local: int) -> list[int]:
        """Return the slots that a rank may write to."""
        slots = self.machine.ranks[local].slots
        return [
            slot.number
            for slot in slots
            if slot.state is SlotState.FREE and (local, slot.number) not in self._published
        ]

    def save(self, local: int, key: StateId, token: Token, world: int, stall_s: float) -> None:
        """A rank saves; its agent is told."""
        mine, number = self.machine.ranks[local], self.free(local)[0]
        buffer = mine.slots[number].buffer
        assert buffer is not None
        image = SimImage(ImageId(*key, mine.rank), world, MEMORY, ALL, buffer.number, token)
        self._written[buffer.number] = image
        self._published.add((local, number))
        said = within.Image(local_rank=local, slot=number, step=key.step, stall_s=stall_s)
        self.agent.rank_said(said)

    # ---- events

    def launch(self, attempt: int, ranks: list[int], world: int, restore: msg.Restore | None) -> None:
        self._wanted = False
        self.act(self.machine.on_launch(attempt, ranks, world, restore, self.world.now))

    def look(self) -> None:
        for local in range(len(self.machine.ranks)) if self._wanted else ():
            self.act(self.machine.on_memory_wanted(local, SIZE_BYTES + MANIFEST_BYTES))
        for local, slot in sorted(self._published):
            self.image_published(local, slot, 0.0)

    def image_published(self, local_rank: int, slot: int, stall_s: float) -> None:
        if (local_rank, slot) in self._published:
            self._published.discard((local_rank, slot))
            self.act(self.machine.on_image_published(local_rank, slot, stall_s))
        else:  # seen before it was told
            self.machine.on_stall_told(local_rank, slot, stall_s)

    def obey(self, order: msg.KeeperOrder) -> None:
        oracle = self.agent.cluster.oracle
        effects = self.machine.on_order(order)
        if isinstance(order, msg.Committed):
            oracle.may_go(self, self.machine.holding.committed)
        self.act(effects)

    def doubt(self, image: SimImage) -> None:
        self.world.after(0.02, self.agent.process, self._doubted, image)

    def _doubted(self, image: SimImage) -> None:
        if image.corrupt:
            self.act(self.machine.on_copy_distrusted(image, "its hash does not match"))

    # ---- effects

    def act(self, effects: list[do.Effect]) -> None:
        self._due += effects
        if self._acting:
            return
        self._acting = True
        try:
            while self._due and self.agent.process.alive:
                self.world.happens(self._due[0])
                self._one(self._due.popleft())
        finally:
            self._acting = False
        self.machine.check()

    def _later(self, seconds: tuple[float, float], then: Callable[[], None]) -> None:
        self.world.after(self.world.between(*seconds), self.agent.process, then)

    def _one(self, effect: do.Effect) -> None:
        machine = self.machine
        match effect:
            case do.Tell():
                self.agent.say(effect.message)
            case do.Measure():
                self._later(
                    MEMORY_S, lambda: self.act(machine.on_memory_measured(self._room(), self._allocated))
                )
            case do.Make():
                self._capacity |= dict.fromkeys(effect.buffers, effect.capacity)
                self._allocated |= dict.fromkeys(effect.buffers, 0)
                self.act(machine.on_buffers_made())
            case do.Reserve(buffer):
                self._allocated[buffer] = taken = self._capacity[buffer]
                self._later(MEMORY_S, lambda: self.act(machine.on_buffer_reserved(buffer, taken)))
            case do.Unmake(buffer):
                del self._allocated[buffer], self._capacity[buffer]
            case do.Serve():
                assert isinstance(effect.copy, SimImage)
                effect.copy.held_at = self.world.now
                self.held.append(effect.copy)
                self.agent.cluster.oracle.held(self, effect.copy)
            case do.Unserve():
                assert isinstance(effect.copy, SimImage)
                self.held.remove(effect.copy)
            case do.AwaitReaders(buffer):
                self.act(machine.on_buffer_unread(buffer))
            case do.FindImage():
                self.world.go(self.agent.process, self._find(effect))
            case do.Verify():
                self._later(HASH_S, lambda: self._verify(effect))
            case do.Fetch():
                self.world.go(self.agent.process, self._fetch(effect))
            case do.Hurry():
                self._of(effect.number).stop = True
            case do.EndWork():
                self._going.pop(effect.number, None)
            case _:
                self._for_ranks(effect)

    def _for_ranks(self, effect: do.Effect) -> None:
        match effect:
            case do.Begin(local):
                self.status[local] = RestoreStatus.PENDING
                self.found.pop(local, None)
            case do.Elsewhere(local):
                self.status[local] = RestoreStatus.ELSEWHERE
            case do.FailRestore(local):
                self.status[local] = RestoreStatus.FAILED
            case do.SlotReady(local):
                copy = self.machine.ranks[local].restored
                assert isinstance(copy, SimImage)
                self.status[local], self.found[local] = RestoreStatus.READY, copy
            case do.Withdraw(local, slot, buffer):
                if (local, slot) not in self._published:
                    self.act(self.machine.on_slot_withdrawn(local, slot, buffer))
            case do.Hash(local, slot, buffer):
                image = self._written[buffer]
                self._later(
                    HASH_S, lambda: self.act(self.machine.on_image_hashed(local, slot, buffer, image))
                )
            case _:
                pass

    def _room(self) -> Room:
        return Room(self.bytes - sum(self._allocated.values()), "memory.max")

    def _of(self, number: int) -> _SimWork:
        return self._going.setdefault(number, _SimWork())

    # ---- work

    def known(self, image: ImageId) -> tuple[Token, int] | None:
        """Return an image's token and world."""
        return next(((one.token, one.world) for one in self.held if one.image == image), None)

    def _find(self, effect: do.FindImage) -> Steps[None]:
        """Look for the image, on this node or the first source that knows it."""
        going, why = self._of(effect.number), list[str]()
        image = effect.image
        known = self.known(image)
        sources = whom_to_ask(self.agent.site.name, image.rank, effect.sources)
        while known is None and not going.stop and (source := next(sources, None)) is not None:
            other, trouble = yield from self._ask(source)
            known = other.known(image) if other is not None else None
            if known is None:
                why.append(f"{source.node}: {trouble or 'not held'}")
        found = None
        if known is not None:
            going.key, (going.token, going.world) = image.state, known
            found = report(image, going.world, PEER, ALL, going.token)
        self.act(self.machine.on_source_found(effect.number, Found(found, SLOT_BYTES, tuple(why))))

    def _verify(self, effect: do.Verify) -> None:
        copy, going = effect.copy, self._of(effect.number)
        assert isinstance(copy, SimImage)
        intact = copy in self.held and not copy.corrupt
        going.key, going.world = copy.key, copy.world
        going.token = copy.token
        going.base = copy if intact else None
        self.act(self.machine.on_copy_verified(effect.number, intact))

    def _fetch(self, effect: do.Fetch) -> Steps[None]:
        going, rank = self._of(effect.number), effect.image.rank
        base, copy = going.base, None
        here = {part for part in (OWN, COMMON) if base is not None and base.has(part)}
        self._take(effect.buffer, effect.start, effect.end)
        if (yield from self._gather(going, rank, set(parts_of(effect.part)) - here, effect.sources)):
            assert going.token is not None
            copy = SimImage(effect.image, going.world, effect.tier, effect.part, effect.buffer, going.token)
            copy.corrupt = base is not None and base.corrupt
        self._fetched(effect, going, copy, MANIFEST_BYTES if effect.behind else 0)

    def _take(self, buffer: int, start: int, end: int) -> None:
        self._allocated[buffer] = min(self._capacity[buffer], max(self._allocated[buffer], end - start))

    def _fetched(self, effect: do.Fetch, going: _SimWork, copy: SimImage | None, behind: int) -> None:
        allocated = self._allocated[effect.buffer]
        fetched = Filled(copy, behind, {PEER: SIZE_BYTES}, tuple(going.why), allocated=allocated)
        self.act(self.machine.on_image_fetched(effect.number, fetched, self.world.now))

    # ---- transfers

    def _ask(self, source: msg.Source) -> Steps[tuple[SimKeeper | None, str]]:
        """Ask another keeper, or this one; returns it, or None and the trouble if it does not answer."""
        cluster, now = self.agent.cluster, self.world.now
        other = cluster.keepers.get((source.hosts[0], source.port))
        host, here = cluster.sites[source.hosts[0]], self.agent.site.name
        stopped = host.stopped_until > now or (other is not None and other.agent.process.until > now)
        if stopped or not host.up or not cluster.network.joins(here, host.name):
            yield now + UNREACHABLE_S
            return None, "timed out"
        if other is None or not other.agent.process.alive:
            yield now + 0.01
            return None, "connection refused"
        yield now + self.world.between(*COPY_S)
        if other.agent.process.alive and cluster.network.joins(here, host.name):
            return other, ""
        return None, "the connection broke"

    def _gather(
        self, going: _SimWork, rank: int, lacking: set[str], sources: Sequence[msg.Source]
    ) -> Steps[bool]:
        """Fetch these parts of a rank's image, from one source after another; returns whether all are
        here."""
        for source in usable(sources, lambda: lacking):
            if going.stop:
                break
            wanted = lacking & set(parts_of(source.part))
            other, trouble = yield from self._ask(source)
            got, trouble = self._read(other, source, going, rank, wanted, trouble)
            if got < wanted:
                going.why.append(f"{source.node}: {trouble or 'not held'}")
            lacking.difference_update(got)
        yield self.world.now + self.world.between(*MEMORY_S)
        return not lacking

    def _read(
        self, other: SimKeeper | None, source: msg.Source, going: _SimWork, rank: int, wanted: set[str],
        why: str,
    ) -> tuple[set[str], str]:  # fmt: skip
        """Return what the other keeper gives of these parts, from `source.rank`'s image, and the trouble."""
        some: set[str] = set()
        for image in other.of(going.key, source.rank) if other is not None else ():
            theirs = {part for part in wanted if image.has(part) and (part == COMMON or rank == image.rank)}
            if theirs and (image.corrupt or image.token != going.token) and other is not None:
                other.doubt(image)
                why = WRONG
            else:
                some |= theirs
        return some, why


def whole(images: Iterable[SimImage], key: StateId, world: int) -> bool:
    """Return whether these images give every rank's image of a state."""
    good = [image for image in images if image.key == key and not image.corrupt]
    own = {image.rank for image in good if image.has(OWN)}
    return any(image.has(COMMON) for image in good) and len(own) >= world
