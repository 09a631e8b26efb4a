"""Where an image's bytes can be had, and fetching them from there: this node's copies, or other nodes'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER
from jurymast.core.keeper.copies import Image as Key
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper import parity
from jurymast.keeper.access import Access
from jurymast.keeper.copies import Copies, Copy, Group
from jurymast.keeper.fetch import Filling, Peer
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.keeper.threads import in_thread


@dataclass(frozen=True)
class Source:
    """`part` of an image can be had from `rank`'s image at `peer`; with a `group`, from the XOR of that part
    of all its ranks' images there, and from the others of its `members`: (rank, sources)."""

    peer: Peer
    part: str
    rank: int
    group: Group = ()
    members: tuple[tuple[int, tuple[Source, ...]], ...] = ()

    @classmethod
    def of(cls, told: msg.Source) -> Source:
        """As the supervisor spells it."""
        peer = Peer(told.node, told.hosts, told.port)
        return cls(peer, told.part, told.rank, tuple(sorted(told.group)), members_of(told.members))

    def of_rank(self, rank: int) -> Source:
        return replace(self, rank=rank, members=())


def sources_of(told: Sequence[msg.Source]) -> list[Source]:
    return [Source.of(one) for one in told]


def members_of(told: Sequence[msg.Member]) -> tuple[tuple[int, tuple[Source, ...]], ...]:
    """As the supervisor spells them. Nothing is made of one XOR to make another of it."""
    return tuple(
        (member.rank, tuple(Source.of(one) for one in member.sources if not one.group)) for member in told
    )


@dataclass(frozen=True)
class Gathering:
    """For the agent's loop; the work is done in threads. `distrust` is told of copies here that are bad."""

    copies: Copies
    access: Access
    node: str
    distrust: Callable[[Copy, str], None]

    async def manifest(
        self, key: Key, sources: Sequence[Source], passed_over: list[str], group: Group = ()
    ) -> tuple[Manifest, int] | None:
        """(the image's manifest, capacity of the buffer it has somewhere, or 0), from whoever has it; with a
        `group`, that of the group's XOR."""
        here = self.copies.manifest(key, group)
        if here is not None:
            return here
        tried = set()
        for source in sources:
            if source.rank == key[2] and source.peer.node != self.node and source.peer not in tried:
                tried.add(source.peer)
                try:
                    return await in_thread(source.peer.manifest, self.access, key, group)
                except (OSError, AuthenticationError, ProtocolError, BadImage) as error:
                    passed_over.append(f"{source.peer.node}: {error or type(error).__name__}")
        return None

    async def fill(self, filling: Filling, key: Key, sources: Sequence[Source]) -> None:
        """Until nothing is missing or nobody is left to ask. A common part may be of another rank's image:
        whether it is the same shows in its hashes."""
        for source in sources:
            if filling.complete or filling.stop.is_set():
                return
            theirs = (key[0], key[1], source.rank)
            part = source.part
            if not filling.wants(part):
                continue
            if source.group and not filling.group:
                await parity.rebuild(self, filling, key, source)
            elif source.peer.node == self.node:
                await self._from_here(filling, theirs, part)
            else:
                await in_thread(filling.from_peer, source.peer, self.access, theirs, part, PEER)

    async def _from_here(self, filling: Filling, key: Key, part: str) -> None:
        found = [copy for copy in self.copies.find(key, group=filling.group) if copy.part in (ALL, part)]
        if not found:
            filling.passed_over.append(f"{self.node}: not held here (any more)")
        for copy in found:
            if copy.place is filling.buffer or not self.copies.read(copy):
                continue
            tier = LOCAL if copy.tier == LOCAL else MEMORY
            name = f"{self.node}, {tier}"
            try:
                why = await in_thread(filling.from_file, name, copy.path, part, tier)
            finally:
                self.copies.release(copy)
            if why:
                self.distrust(copy, why)
