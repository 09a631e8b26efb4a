"""How long a command waits for storage that hangs. The call itself cannot be ended, so the command is."""

from __future__ import annotations

import os
import threading

from jurymast import foreign
from jurymast.errors import RunDirectoryError

# Longer than a busy file server takes, and not yet so long that somebody gives up on the terminal.
LIMIT_S = 30.0
LOOK_EVERY_S = 0.5

_follows = threading.Event()


def follow_on() -> None:
    """From now on this command follows a run: it says that the storage hangs, and waits for it."""
    _follows.set()


def begin(limit_s: float | None = None) -> threading.Event:
    """Watch the calls of this process until the event is set."""
    over = threading.Event()
    _follows.clear()
    limit_s = LIMIT_S if limit_s is None else limit_s
    threading.Thread(target=_watch, args=(over, limit_s), name="patience", daemon=True).start()
    return over


def _watch(over: threading.Event, limit_s: float) -> None:
    told = ""
    while not over.wait(min(LOOK_EVERY_S, limit_s)):
        path, waited_s = foreign.unanswered()
        if waited_s < limit_s:
            told = ""
        elif not _follows.is_set():
            _say(f"error: {path}: its storage has not responded for {limit_s:g} s")
            os._exit(RunDirectoryError.exit_code)  # anything more polite would wait for the thread that hangs
        elif not told:
            told = path
            _say(f"note: {path}: its storage has not responded for {limit_s:g} s; waiting for it")


def _say(text: str) -> None:
    """On stderr, past Python's buffers: the thread that hangs may hold their locks."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    os.write(2, f"jurymast: {plain}\n".encode(errors="replace"))
