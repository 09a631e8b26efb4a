"""Fetching an image's bytes from this node's copies, or other nodes', as `core.keeper.gathering` decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER
from jurymast.core.keeper import gathering as core
from jurymast.core.keeper.copies import Image as Key
from jurymast.core.keeper.gathering import Finding
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper import parity
from jurymast.keeper.copies import Copies, Copy, Group
from jurymast.keeper.fetch import Filling, Peer
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.keeper.threads import in_thread
from jurymast.wire.shield import Access


def peer_of(source: msg.Source) -> Peer:
    return Peer(source.node, source.hosts, source.port)


@dataclass(frozen=True)
class Gathering:
    """For the agent's loop; the work is done in threads. `distrust` is told of copies here that are bad."""

    copies: Copies
    access: Access
    node: str
    distrust: Callable[[Copy, str], None]

    async def manifest(
        self, key: Key, sources: Sequence[msg.Source], passed_over: list[str], group: Group = ()
    ) -> tuple[Manifest, int] | None:
        """(the image's manifest, capacity of the buffer it has somewhere, or 0), from whoever has it; with a
        `group`, that of the group's XOR."""
        here = self.copies.manifest(key, group)
        if here is not None:
            return here
        finding = Finding(self.node, key[2], sources)
        while (source := finding.next()) is not None:
            try:
                return await in_thread(peer_of(source).manifest, self.access, key, group)
            except (OSError, AuthenticationError, ProtocolError, BadImage) as error:
                passed_over.append(f"{source.node}: {error or type(error).__name__}")
        return None

    async def fill(self, filling: Filling, key: Key, sources: Sequence[msg.Source]) -> None:
        """Until nothing is missing or nobody is left to ask. A common part may be of another rank's image:
        whether it is the same shows in its hashes."""
        gathering = core.Gathering(self.node, sources, of_xor=bool(filling.group))
        while not filling.stop.is_set() and (fetch := gathering.next(filling.lacking)) is not None:
            source = fetch.source
            theirs = (key[0], key[1], source.rank)
            match fetch:
                case core.Rebuild():
                    await parity.rebuild(self, filling, key, source)
                case core.FromHere():
                    await self._from_here(filling, theirs, source.part)
                case core.FromPeer():
                    peer = peer_of(source)
                    await in_thread(filling.from_peer, peer, self.access, theirs, source.part, PEER)

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
