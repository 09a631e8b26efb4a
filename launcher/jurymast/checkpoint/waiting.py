"""Reports a restore that waits for storage, which otherwise looks like one that reads much data."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jurymast import foreign
from jurymast.core import within
from jurymast.worker.link import Link

log = logging.getLogger("jurymast.checkpoint")

LOOK_EVERY_S = 0.5
# An event must fit into a pipe's atomic write.
PATH_CHARACTERS = 1000


@contextmanager
def telling_of_waits(link: Link, every_s: float = within.RESTORE_TOLD_S) -> Iterator[None]:
    """Within this block, report long waits of this process to the agent and in the rank's log."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, link, every_s), name="jurymast-waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, link: Link, every_s: float) -> None:
    told, told_s = "", 0.0
    while not over.wait(min(LOOK_EVERY_S, every_s / 2)):
        path, waited_s = foreign.unanswered()
        if path != told or waited_s < told_s:  # another call
            told, told_s = path, 0.0
        if waited_s >= told_s + every_s:
            told_s = waited_s
            log.warning("%s: its storage has not responded for %.0f s; waiting for it", path, waited_s)
            link.emit(within.RestoreWaits(path=_short(path), seconds=round(waited_s, 3)))


def _short(path: str) -> str:
    return path[:PATH_CHARACTERS].encode("ascii", "replace").decode()
