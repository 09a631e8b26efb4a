"""The keeper's real world: shared memory, threads, and sockets to other keepers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

from jurymast.core.state.messages import Room, Source
from jurymast.keeper import memory
from jurymast.keeper.copies import CopyTable, StoredCopy
from jurymast.keeper.manifest import RankRecord, create_page
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.transfer import ImageServer, KeeperLink, connect
from jurymast.wire.protocol import Access

Result = TypeVar("Result")


class RealKeeperIo:
    """See `io.KeeperIo`. `room` returns how much memory the node can give."""

    def __init__(
        self, access: Access, node: str, ranks_per_node: int, room: Callable[[], Room] = memory.room
    ) -> None:
        self.node, self.ways, self.room = node, access.ways, room
        self._access = access
        self._page_fd, page = create_page(ranks_per_node)
        self.records = [RankRecord(page, local) for local in range(ranks_per_node)]
        self._server: ImageServer

    @property
    def page_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._page_fd}"

    @property
    def port(self) -> int:
        return self._server.port

    def serve(self, copies: CopyTable, doubt: Callable[[StoredCopy], None]) -> None:
        self._server = ImageServer(copies, self._access, self.node, doubt)

    def listen_at(self, address: str) -> None:
        self._server.listen_at(address)

    def make(self, capacity: int, number: int) -> MappedBuffer:
        return MappedBuffer(capacity, number)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function as asyncio.to_thread does, but in a new daemon thread: one that waits for a dead
        disk blocks nothing else, not even the agent's end. If the caller is cancelled, the thread continues
        and its result is dropped."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        name = getattr(function, "__name__", "keeper")
        threading.Thread(target=_work, args=(future, function, arguments), name=name, daemon=True).start()
        answer = asyncio.wrap_future(future)
        # An exception refers to the frames that it passed; without this they would keep it and its buffers
        # alive.
        del future
        return await answer

    async def with_keeper(self, source: Source, talk: Callable[[KeeperLink], Result]) -> Result:
        def keeper_pull() -> Result:
            with closing(connect(source, self._access)) as connection:
                return talk(connection)

        return await self.in_thread(keeper_pull)

    def close(self) -> None:
        self._server.close()
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1


def _work(future: Future[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:  # any error is for the caller
        future.set_exception(error)
        del future  # as above
    else:
        future.set_result(result)
