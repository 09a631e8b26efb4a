"""Asking a run's supervisor by hand: cancel, restart, drain, rollback, save."""

from __future__ import annotations

import asyncio
import contextlib

from jurymast.errors import JurymastError
from jurymast.rundir import RunDirectory
from jurymast.wire import channel
from jurymast.wire.channel import Channel
from jurymast.wire.endpoint import Endpoint, find
from jurymast.wire.messages import Message

ASK_LIMIT_S = 5.0
_UNREACHED = (OSError, asyncio.TimeoutError, JurymastError, ValueError)


def ask(
    directory: RunDirectory, what: str, *, by: str, node: str = "", step: int | None = None
) -> Message | None:
    """The supervisor's answer, {"ok": bool, "why": text when refused}; None when no supervisor answers.

    Raises RunDirectoryError when the run's secret cannot be read.
    """
    place = find(directory.epochs)
    secret = directory.secret()
    if place is None:
        return None
    request: Message = {"say": "ask", "what": what, "by": by, "node": node}
    if step is not None:
        request["step"] = step
    return asyncio.run(_ask(place, secret, request))


async def _ask(place: Endpoint, secret: bytes, request: Message) -> Message | None:
    connection = await _reach(place, secret)
    if connection is None:
        return None
    try:
        connection.send(request)
        return await asyncio.wait_for(connection.receive(), ASK_LIMIT_S)
    except _UNREACHED:
        return None
    finally:
        connection.close()


async def _reach(place: Endpoint, secret: bytes) -> Channel | None:
    """The first of the endpoint's hosts that proves to be the supervisor; all are tried at once."""
    attempts = [
        asyncio.ensure_future(channel.connect(host, place.port, secret, ASK_LIMIT_S)) for host in place.hosts
    ]
    chosen: Channel | None = None
    for attempt in asyncio.as_completed(attempts):
        with contextlib.suppress(*_UNREACHED):
            chosen = await attempt
            break
    for other in attempts:
        other.cancel()
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, Channel) and result is not chosen:
            result.close()
    return chosen
