"""What a keeper needs of its node and of the network, besides an event loop: there are two of each, the real
one in `real_io` and the simulator's. Files on the node's own disk are read as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jurymast.core.state.messages import Room, Source
from jurymast.keeper.copies import CopyTable, StoredCopy
from jurymast.keeper.manifest import RankRecord
from jurymast.keeper.memory import ImageBuffer
from jurymast.keeper.transfer import KeeperLink

Result = TypeVar("Result")


class KeeperIo(Protocol):
    """The world of one keeper. `records`: the words of this node's ranks; `ways`: how images from other nodes
    may be protected, see `wire.protocol`."""

    node: str
    ways: tuple[str, ...]
    records: list[RankRecord]

    @property
    def page_path(self) -> str:
        """The path at which ranks open the page of these words."""

    @property
    def port(self) -> int: ...

    def serve(self, copies: CopyTable, doubt: Callable[[StoredCopy], None]) -> None:
        """Serve these copies to other keepers; `doubt` is called, in any thread, with a copy from which one
        received wrong bytes."""

    def listen_at(self, address: str) -> None:
        """Serve at this address as well. Raises OSError."""

    def room(self) -> Room:
        """Return how much memory the node can give. Reads files."""

    def make(self, capacity: int, number: int) -> ImageBuffer:
        """Make a buffer. Raises OSError."""

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that takes time, or may never return: it must hold up nothing else."""

    async def with_keeper(self, source: Source, talk: Callable[[KeeperLink], Result]) -> Result:
        """Call `talk` likewise, with a connection to the keeper of the source's node. Raises what `talk` and
        `transfer.connect` raise."""

    def close(self) -> None:
        """Serve nobody any more, and give the page back."""
