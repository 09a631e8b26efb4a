"""Sends a person's requests to a run's supervisor: cancel, restart, replace a node, rollback, save."""

from __future__ import annotations

import asyncio

from jurymast.core.messages import Accepted, Ask, Condition, Declined, Strange, read_answer
from jurymast.errors import JurymastError
from jurymast.rundir import RunDirectory
from jurymast.wire import channel
from jurymast.wire.endpoint import Endpoint, find

ASK_LIMIT_S = 5.0
Answered = Accepted | Declined | Condition


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
    targets = [(host, place.port) for host in place.hosts]
    connection = await channel.connect_any(targets, secret, read_answer, ASK_LIMIT_S)
    if connection is None:
        return None
    try:
        connection.send(request)
        answer = await asyncio.wait_for(connection.receive(), ASK_LIMIT_S)
        return None if isinstance(answer, Strange) else answer
    except (OSError, asyncio.TimeoutError, JurymastError):
        return None
    finally:
        connection.close()
