"""Slow or blocking work outside the agent's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Like asyncio.to_thread, in a daemon thread of its own: one that a dead disk holds makes nothing else
    wait, not even the agent's end. When the caller is cancelled the thread goes on; its result is dropped.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    name = getattr(function, "__name__", "keeper")
    threading.Thread(target=_work, args=(future, function, arguments), name=name, daemon=True).start()
    answer = asyncio.wrap_future(future)
    # A failure knows the frames that it came through: they must not hold it, and the buffers they name.
    del future
    return await answer


def _work(future: Future[Result], function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except BaseException as error:  # whatever it is, it belongs to the caller
        future.set_exception(error)
        del future  # as above
    else:
        future.set_result(result)
