"""Heavy or stuck work beside the agent's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Like asyncio.to_thread, in a daemon thread of its own: one that a dead disk holds makes nothing else
    wait, not even the agent's end. When the caller is cancelled the thread goes on; its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # whatever it is, it belongs to the caller
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, result, failure)
        except RuntimeError:
            pass  # the loop is closed: nobody waits
        finally:
            # A failure knows this frame: without this they would hold each other, and the buffers they name.
            result = failure = None

    threading.Thread(target=work, name=getattr(function, "__name__", "keeper"), daemon=True).start()
    return await future
