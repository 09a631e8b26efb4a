"""Runs slow or blocking work outside the agent's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function as asyncio.to_thread does, but in a new daemon thread: one that waits for a dead disk
    blocks nothing else, not even the agent's end. If the caller is cancelled, the thread continues and its
    result is dropped.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    name = getattr(function, "__name__", "keeper")
    threading.Thread(target=_work, args=(future, function, arguments), name=name, daemon=True).start()
    answer = asyncio.wrap_future(future)
    # An exception refers to the frames that it passed; without this they would keep it and its buffers alive.
    del future
    return await answer


def _work(future: Future[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:  # any error is for the caller
        future.set_exception(error)
        del future  # as above
    else:
        future.set_result(result)
