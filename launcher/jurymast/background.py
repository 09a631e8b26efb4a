"""Tasks that run in the background of an event loop. No error of one may vanish: whoever waits for what it
was to do would wait for ever. `tests/unit/test_background.py` checks that agents and supervisors start tasks
only here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("jurymast.background")

Result = TypeVar("Result")
Failed = Callable[[BaseException], None]


def logged(error: BaseException) -> None:
    """Write the error with its stack to the log; nothing else depends on the task."""
    log.error("a background task failed", exc_info=error)


def to_its_awaiter(error: BaseException) -> None:
    """Do nothing: the function that started the task awaits it, and gets the error there."""


def start(work: Coroutine[Any, Any, Result], failed: Failed = logged) -> asyncio.Task[Result]:
    """Run `work` in the background. If it raises an error, other than by being cancelled, `failed` gets it.

    The caller keeps the returned task, because the loop refers to it only weakly.
    """
    task = asyncio.get_running_loop().create_task(work)

    def ended(task: asyncio.Task[Result]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task.add_done_callback(ended)
    return task
