"""Sends a person's requests to a run's supervisor: cancel, restart, replace a node, rollback, save."""

from __future__ import annotations

import asyncio
import contextlib

from jurymast.core.messages import Accepted, Answer, Ask, Condition, Declined, Strange, read_answer
from jurymast.errors import JurymastError
from jurymast.rundir import RunDirectory
from jurymast.wire import channel
from jurymast.wire.channel import Channel
from jurymast.wire.endpoint import Endpoint, find

ASK_LIMIT_S = 5.0
Answered = Accepted | Declined | Condition
_UNREACHED = (OSError, asyncio.TimeoutError, JurymastError, ValueError)


def ask(
    directory: RunDirectory, what: str, *, by: str, node: str = "", step: int | None = None
) -> Answered | None:
    """Return the supervisor's answer; None if no supervisor answers, or none that this version understands.
    Raises RunDirectoryError if the run's secret cannot be read."""
    place = find(directory.epochs)
    secret = directory.secret()
    if place is None:
        return None
    return asyncio.run(_ask(place, secret, Ask(what=what, by=by, node=node, step=step)))


async def _ask(place: Endpoint, secret: bytes, request: Ask) -> Answered | None:
    connection = await _reach(place, secret)
    if connection is None:
        return None
    try:
        connection.send(request)
        answer = await asyncio.wait_for(connection.receive(), ASK_LIMIT_S)
        return None if isinstance(answer, Strange) else answer
    except _UNREACHED:
        return None
    finally:
        connection.close()


async def _reach(place: Endpoint, secret: bytes) -> Channel[Answer] | None:
    """Connect to all of the endpoint's hosts at once, and return the first that proves to be the
    supervisor."""
    attempts = [
        asyncio.ensure_future(channel.connect(host, place.port, secret, read_answer, ASK_LIMIT_S))
        for host in place.hosts
    ]
    chosen: Channel[Answer] | None = None
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
