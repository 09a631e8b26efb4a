"""The demo's output: lines with the time since its start, and on a terminal one line that is overwritten."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

import click

from jurymast.report.layout import clean

# In a pipe or a log, one line of progress in this time is enough.
PROGRESS_EVERY_S = 5.0


class Screen:
    """Writes to `stream`. Colors and overwriting are used only on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._colours = self._terminal and "NO_COLOR" not in os.environ
        self._drawn = False
        self._progress_at = 0.0
        self._shown = ""
        self.began = time.time()
        # A pipe's encoding may be plain ASCII, and a character it lacks must not end the demo.
        self.unicode = "utf" in (getattr(stream, "encoding", "") or "").lower()

    def say(self, text: str, *, t: float | None = None, style: str = "") -> None:
        """Print a line that stays, about something that happened at `t` (seconds since the epoch)."""
        seconds = (time.time() if t is None else t) - self.began
        lead = click.style(f"[{seconds:5.1f} s]", dim=True) if self._colours else f"[{seconds:5.1f} s]"
        self.write(f"{lead} {self._styled(clean(text), style)}")

    def write(self, text: str) -> None:
        """Print a line without a time."""
        self._erase()
        self._stream.write(self._encodable(text) + "\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """Show the current state on the line that is overwritten."""
        now = time.monotonic()
        if self._terminal:
            self._erase()
            width = shutil.get_terminal_size((100, 24)).columns - 1
            self._stream.write(self._encodable(clean(text)[:width]))
            self._stream.flush()
            self._drawn = True
        elif now >= self._progress_at and text != self._shown:
            self._progress_at, self._shown = now + PROGRESS_EVERY_S, text
            self.say(text)

    def close(self) -> None:
        self._erase()

    def _styled(self, text: str, style: str) -> str:
        if not self._colours or not style:
            return text
        return click.style(text, fg=style, bold=style == "red")

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", "") or "ascii"
        return text.encode(encoding, errors="replace").decode(encoding, errors="replace")

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False


def can_open_a_browser() -> bool:
    """Return whether a browser window can open: there is a display, and a user at a terminal."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return False
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin")
