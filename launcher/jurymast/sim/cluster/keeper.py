"""A node's keeper, simulated: it holds images, copies others' when told to, refuses when memory is short, and
loses everything with its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, COMMON, MEMORY, OWN, PEER, Key, age
from jurymast.sim.cluster.storage import Token

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent

SLOTS = 2
SIZE_BYTES, COMMON_BYTES = 100_000_000, 60_000_000
HASH_S, COPY_S = (0.002, 0.08), (0.01, 0.25)
UNREACHABLE_S = 3.0


class Restored(Enum):
    PENDING = "pending"
    READY = "ready"
    ELSEWHERE = "elsewhere"
    FAILED = "failed"


@dataclass(eq=False)
class Image:
    """A part of one rank's image. `slot`: the local rank in whose memory it lies, if it does."""

    key: Key
    rank: int
    world: int
    token: Token
    tier: str
    part: str
    slot: int | None = None
    corrupt: bool = False
    stall_s: float = 0.0

    def has(self, part: str) -> bool:
        return self.part in (ALL, part)

    def said(self) -> msg.CopyReport:
        return msg.CopyReport(
            tier=self.tier, step=self.key[0], attempt=self.key[1], rank=self.rank, world=self.world,
            part=self.part, size_bytes=SIZE_BYTES, common_bytes=COMMON_BYTES,
            common_id="-".join(map(str, self.token.history)), stall_s=self.stall_s,
        )  # fmt: skip


class SimKeeper:
    """As `jurymast.keeper` does it. `room`: so many images of other nodes' ranks."""

    def __init__(self, agent: SimAgent, room: int) -> None:
        self.agent, self.room = agent, room
        self.held: list[Image] = []
        self.ranks: list[int] = []  # by local rank
        self.taking: list[tuple[int, Key]] = []
        self.status: dict[int, Restored] = {}
        self.found: dict[int, Image] = {}
        self.attempt = 0
        self._void: set[Key] = set()
        self._committed = (0, -1)
        self._running: set[tuple[Key, int, str]] = set()
        self._round = 0  # restores of earlier attempts are over

    def inventory(self) -> tuple[msg.CopyReport, ...]:
        return tuple(image.said() for image in self.held)

    def of(self, key: Key, rank: int) -> list[Image]:
        return [image for image in self.held if image.key == key and image.rank == rank]

    # ---- an attempt

    def launch(self, order: msg.Launch, ranks_per_node: int) -> None:
        self.attempt, self._round = order.attempt, self._round + 1
        self._void.clear()
        restore = order.restore
        self._give_up_for(restore)
        first = order.rank * ranks_per_node
        self.ranks = list(range(first, first + ranks_per_node))
        for image in self.held:
            if image.slot is not None and image.rank != self.ranks[image.slot]:
                image.slot = None
        self.taking.clear()
        self.found.clear()
        world = order.world * ranks_per_node
        for local, rank in enumerate(self.ranks):
            if restore is not None and rank in restore.ranks:
                self.status[local] = Restored.PENDING
                self._bring(local, rank, world, restore, list(restore.ranks[rank]), {}, [], self._round)
            else:
                self.status[local] = Restored.ELSEWHERE

    def _give_up_for(self, restore: msg.Restore | None) -> None:
        wanted = {self._committed} if restore is not None else set()
        self._committed = (restore.attempt, restore.step) if restore is not None else (0, -1)
        wanted.add(self._committed)
        if restore is None:
            self._running.clear()
        for image in list(self.held):
            unused = age(image.key) not in wanted
            if (image.tier == MEMORY and unused) or (image.tier == PEER and restore is None):
                self.drop(image, say=restore is not None)

    def _bring(
        self, local: int, rank: int, world: int, restore: msg.Restore, sources: list[msg.Source],
        parts: dict[str, Image], why: list[str], number: int,
    ) -> None:  # fmt: skip
        """One part after the other, from the first source that gives it."""
        if number != self._round:
            return
        key = (restore.step, restore.attempt)
        for image in self.of(key, rank):
            if image.corrupt:
                self.drop(image, why="blocks are corrupt in memory")
                why.append("blocks are corrupt")
            else:
                parts |= {part: image for part in (OWN, COMMON) if image.has(part)}
        lacking = next((part for part in (OWN, COMMON) if part not in parts), None)
        if lacking is None:
            self._ready(local, rank, world, key, parts[OWN], why)
            return
        source = next((one for one in sources if one.part in (ALL, lacking)), None)
        if source is None:
            self.status[local] = Restored.FAILED
            text = "; ".join(why) or "nobody has all of it"
            failed = msg.Unrestorable(attempt=self.attempt, rank=rank, step=key[0], of=key[1], why=text)
            self.agent.say(failed)
            return
        rest = [one for one in sources if one is not source]

        def got(image: Image | None, trouble: str) -> None:
            if image is None:
                why.append(f"{source.node}: {trouble}")
                self._bring(local, rank, world, restore, rest, parts, why, number)
            else:
                for part in (OWN, COMMON):
                    if image.has(part) and (part == COMMON or image.rank == rank):
                        parts.setdefault(part, image)
                self._bring(local, rank, world, restore, sources, parts, why, number)

        self.fetch(source, key, lacking, got)

    def _ready(self, local: int, rank: int, world: int, key: Key, own: Image, why: list[str]) -> None:
        whole = next((i for i in self.of(key, rank) if i.part == ALL), None)
        for image in list(self.held):
            if image.slot == local and image is not whole:
                self.drop(image)
        if whole is None or whole.tier == PEER:
            for image in self.of(key, rank):
                self.drop(image)
            whole = Image(key, rank, world, own.token, MEMORY, ALL)
            self.hold(whole)
        whole.slot = local
        self.status[local], self.found[local] = Restored.READY, whole
        tiers = {PEER: SIZE_BYTES}
        prefetched = msg.Prefetched(
            step=key[0], attempt=key[1], rank=rank, tiers=tiers, seconds=0.1, passed_over=tuple(why)
        )
        self.agent.say(prefetched)

    def fetch(
        self, source: msg.Source, key: Key, part: str, got: Callable[[Image | None, str], None]
    ) -> None:
        """From another keeper; its image, or None and the trouble."""
        cluster, world = self.agent.cluster, self.agent.world
        other = cluster.keepers.get((source.hosts[0], source.port))
        host = cluster.sites[source.hosts[0]]
        here = self.agent.site.name

        def arrived() -> None:
            image = None
            if other is not None and other.agent.process.alive and cluster.network.joins(here, host.name):
                found = [i for i in other.of(key, source.rank) if i.has(part)]
                image = found[0] if found else None
            if image is not None and image.corrupt and other is not None:
                other.doubt(image)
                got(None, "wrong bytes")
            else:
                got(image, "it is not there")

        joined = cluster.network.joins(here, host.name) and host.up and host.stopped_until <= world.now
        if not joined:
            world.after(UNREACHABLE_S, self.agent.process, got, None, "timed out")
        elif other is None or not other.agent.process.alive:
            world.after(0.01, self.agent.process, got, None, "connection refused")
        else:
            world.after(world.between(*COPY_S), self.agent.process, arrived)

    # ---- what ranks save

    def free(self, local: int) -> bool:
        used = sum(image.slot == local for image in self.held) + sum(one == local for one, _ in self.taking)
        return used < SLOTS

    def save(self, local: int, key: Key, token: Token, world: int, stall_s: float) -> None:
        image = Image(key, self.ranks[local], world, token, MEMORY, ALL, slot=local, stall_s=stall_s)
        entry = (local, key)
        self.taking.append(entry)
        self.agent.world.after(
            self.agent.world.between(*HASH_S), self.agent.process, self._hashed, image, entry, self._round
        )

    def _hashed(self, image: Image, entry: tuple[int, Key], number: int) -> None:
        if number != self._round:
            return
        self.taking.remove(entry)
        counts = image.key[1] == self.attempt and image.key not in self._void
        if counts and age(image.key) >= self._committed:
            self.hold(image)

    # ---- what is held

    def hold(self, image: Image) -> None:
        self.held.append(image)
        self.agent.cluster.oracle.held(self, image)
        self.agent.say(msg.Held(copies=(image.said(),)))

    def drop(self, image: Image, why: str = "", *, say: bool = True) -> None:
        if image in self.held:
            self.held.remove(image)
            if say:
                self.agent.say(msg.Dropped(copy=image.said(), why=why))

    def doubt(self, image: Image) -> None:
        self.agent.world.after(0.02, self.agent.process, self._doubted, image)

    def _doubted(self, image: Image) -> None:
        if image.corrupt:
            self.drop(image, "its hash does not match")

    # ---- orders

    def obey(self, order: msg.KeeperOrder) -> None:
        match order:
            case msg.Committed():
                self._committed = max(self._committed, (order.attempt, order.step))
                self.agent.cluster.oracle.may_go(self, self._committed)
                self._drop_where(lambda image: age(image.key) < self._committed)
            case msg.Void():
                key = (order.step, order.attempt)
                self._void.add(key)
                self._drop_where(lambda image: image.key == key)
            case msg.Forget():
                key, ranks = (order.step, order.attempt), order.ranks
                self.agent.cluster.oracle.forgotten(self, key, ranks)
                self._drop_where(lambda i: i.key == key and i.tier == PEER and i.rank in ranks)
            case msg.ForgetNewer():
                step = order.step
                self._drop_where(lambda image: image.key[0] > step)
                if self._committed[1] > step:
                    self._committed = (0, -1)
            case msg.Replicate():
                self._replicate(order)

    def _drop_where(self, gone: Callable[[Image], bool]) -> None:
        for image in [image for image in self.held if gone(image)]:
            self.drop(image, say=False)

    def _replicate(self, order: msg.Replicate) -> None:
        key, rank = (order.step, order.attempt), order.rank
        if order.group:  # here no node has memory for parity
            self.agent.say(msg.Refused(why="memory is short", group=order.group))
            self._unreplicated(order, "memory is short")
            return
        here = [image for image in self.of(key, rank) if image.has(order.part)]
        if here:
            self.agent.say(msg.Held(copies=tuple(image.said() for image in here)))
        elif (key, rank, order.part) not in self._running:
            if sum(image.tier == PEER for image in self.held) + len(self._running) >= self.room:
                self.agent.say(msg.Refused(why="memory is short"))
                self._unreplicated(order, "memory is short")
                return
            self._running.add((key, rank, order.part))
            self._copy(order, list(order.sources), [], None)

    def _unreplicated(self, order: msg.Replicate, why: str) -> None:
        said = msg.Unreplicated(
            step=order.step, attempt=order.attempt, rank=order.rank, part=order.part, why=why,
            group=order.group,
        )  # fmt: skip
        self.agent.say(said)

    def _copy(
        self, order: msg.Replicate, sources: Sequence[msg.Source], why: list[str], own: Image | None
    ) -> None:
        key, rank = (order.step, order.attempt), order.rank
        name = (key, rank, order.part)
        if name not in self._running:
            return
        need = COMMON if own is not None and own.part == OWN and order.part == ALL else OWN
        fits = [s for s in sources if s.part in (ALL, need) and (need == COMMON or s.rank == rank)]
        if not fits:
            self._running.discard(name)
            self._unreplicated(order, "; ".join(why) or "nobody has it")
            return

        def got(image: Image | None, trouble: str) -> None:
            if image is None:
                why.append(f"{fits[0].node}: {trouble}")
                self._copy(order, [one for one in sources if one is not fits[0]], why, own)
            elif need == OWN and order.part == ALL and image.part == OWN:
                self._copy(order, sources, why, image)
            elif name in self._running:
                self._running.discard(name)
                token = own.token if own is not None else image.token
                if age(key) >= self._committed:
                    self.hold(Image(key, rank, image.world, token, PEER, order.part))

        self.fetch(fits[0], key, need, got)


def whole(images: Iterable[Image], key: Key, world: int) -> bool:
    """Whether these give every rank's image of a state."""
    own: set[int] = set()
    common = False
    for image in images:
        if image.key == key and not image.corrupt:
            common = common or image.has(COMMON)
            if image.has(OWN):
                own.add(image.rank)
    return common and len(own) >= world
