"""Servers that speak the wire protocol in a test's own loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from jurymast.wire.channel import Connection, Listener


@asynccontextmanager
async def served(serve: Callable[[Connection], Coroutine[Any, Any, None]]) -> AsyncIterator[int]:
    """Port of a server on the loopback interface; at the end its connections are closed."""
    came: list[tuple[Connection, asyncio.Task[None]]] = []

    def take(come: Connection) -> None:
        came.append((come, asyncio.ensure_future(serve(come))))

    door = Listener(take, socket.create_server(("127.0.0.1", 0)))
    try:
        yield door.port
    finally:
        door.close()
        for connection, _ in came:
            connection.close()
        await asyncio.gather(*(task for _, task in came))
