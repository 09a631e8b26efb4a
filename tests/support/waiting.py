"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
POLL_S = 0.05
ASK_POLL_S = 0.5  # where a look starts processes
# For what is sure to come: on a busy machine that may take minutes.
LIMIT_S = 240.0


def wait_until(
    what: str, condition: Callable[[], Result], limit_s: float = LIMIT_S, poll_s: float = POLL_S
) -> Result:
    """The first true value of `condition`; AssertionError says `what` did not happen within `limit_s`."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"within {limit_s} s: no {what}")
        time.sleep(poll_s)
    return value
