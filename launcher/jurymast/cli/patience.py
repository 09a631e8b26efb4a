"""How long a command waits for storage that hangs. The call itself cannot be interrupted, so the command
ends."""

from __future__ import annotations

import os
import threading

from jurymast import foreign
from jurymast.errors import RunDirectoryError

# Longer than a busy file server takes, and short enough that a user at the terminal waits for it.
LIMIT_S = 30.0
LOOK_EVERY_S = 0.5

_follows = threading.Event()


def follow_on() -> None:
    """Declare that this command follows a run: from now on it reports storage that hangs, and waits for
    it."""
    _follows.set()


def begin() -> threading.Event:
    """Watch this process's calls until the returned event is set."""
    over = threading.Event()
    _follows.clear()
    threading.Thread(target=_watch, args=(over, LIMIT_S), name="patience", daemon=True).start()
    return over


def _watch(over: threading.Event, limit_s: float) -> None:
    told = ""
    while not over.wait(min(LOOK_EVERY_S, limit_s)):
        path, waited_s = foreign.unanswered()
        if waited_s < limit_s:
            told = ""
        elif not _follows.is_set():
            _say(f"error: {path}: its storage has not answered for {limit_s:g} s")
            os._exit(RunDirectoryError.exit_code)  # a normal exit would wait for the thread that hangs
        elif not told:
            told = path
            _say(f"note: {path}: its storage has not answered for {limit_s:g} s; waiting for it")


def _say(text: str) -> None:
    """Print on stderr without Python's buffers, whose locks the thread that hangs may hold."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    os.write(2, f"jurymast: {plain}\n".encode(errors="replace"))
