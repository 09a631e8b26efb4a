"""Servers that speak the wire protocol in a test's own loop."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from jurymast.wire.channel import Listener
from jurymast.wire.handshakes import TURN_EVERY_S, Handshakes, Proven
from jurymast.wire.protocol import SUPERVISOR

LIMIT_S = 60.0


def first_proven(handshakes: Handshakes) -> Proven:
    """The first connection that is proven there, in a test without a loop."""
    end = time.monotonic() + LIMIT_S
    while not (proven := handshakes.turn()):
        left_s = end - time.monotonic()
        assert left_s > 0, f"nobody has proved anything within {LIMIT_S:g} s"
        select.select([handshakes], [], [], min(left_s, TURN_EVERY_S))
    return proven[0]


@asynccontextmanager
async def served(
    serve: Callable[[Proven], Coroutine[Any, Any, None]], secret: bytes | Handshakes
) -> AsyncIterator[int]:
    """Port of a server on the loopback interface; at the end its connections are closed."""
    proven: list[tuple[Proven, asyncio.Task[None]]] = []
    handshakes = secret if isinstance(secret, Handshakes) else Handshakes(secret, SUPERVISOR)
    listener = socket.create_server(("127.0.0.1", 0))
    handshakes.listen(listener)
    accepting = Listener(handshakes, lambda one: proven.append((one, asyncio.ensure_future(serve(one)))))
    try:
        yield int(listener.getsockname()[1])
    finally:
        accepting.close()
        for one, _ in proven:
            with suppress(OSError):  # closed already
                one.sock.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(*(task for _, task in proven))
