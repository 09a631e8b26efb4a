"""Collects a node's evidence when one of its ranks fails: out-of-memory kills, a full /dev/shm, the end of
the rank's log. The supervisor itself sees only an exit code."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.health.readings import memory_cgroups, oom_kills, where_kills_count

SHM = "/dev/shm"
# Logs are on shared storage, which may hang; the failure must be reported anyway.
LOG_LIMIT_S = 0.2
LOG_BYTES = 16_000
LOG_LINES = 3
LOG_CHARACTERS = 600
# A rank that dies of these (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV) may have logged why. Other signals come
# from other processes, and the end of the rank's log does not explain them.
CRASHES = frozenset({-4, -6, -7, -8, -11})
# Where a crash's own report begins: Python's fault handler, C++, NCCL's watchdog, assertions.
_TELLING = re.compile(
    r"fatal python error|terminate called|what\(\):|watchdog|assert|\berror\b", re.IGNORECASE
)


class Evidence:
    """Collects evidence. `kills_file` has the counter `oom_kill` of the agent's cgroup; None if there is
    none."""

    def __init__(self, kills_file: Path | None = None) -> None:
        self._kills_file = kills_file or where_kills_count(memory_cgroups())[1]
        self._before: int | None = None
        self.attempt_begins()

    def attempt_begins(self) -> None:
        """Ignore the kills so far, which are not of this attempt."""
        self._before = oom_kills(self._kills_file)

    def look(self, exit_code: int, log: Path | None = None) -> dict[str, Any]:
        """Return fields for the report of a failure with this exit code (negative for a signal)."""
        kills = oom_kills(self._kills_file)
        if kills is not None:
            kills = max(0, kills - (self._before or 0))
        found: dict[str, Any] = {"oom_kills": kills, "shm_used": round(used_share(SHM), 4)}
        if log is not None and exit_code != 0:
            found["log"] = end_of(log) if exit_code in CRASHES else last_line(log) if exit_code > 0 else ""
        return found


def used_share(path: str) -> float:
    """Return the used share of the file system at `path`, 0..1; 0.0 if it is unknown."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0.0
    return 1.0 - status.f_bavail / status.f_blocks if status.f_blocks else 0.0


def end_of(log: Path) -> str:
    """Return the end of a log, its lines joined with " | ": from the last line that reports an error, or
    else the last few lines. "" if there are none, or if storage does not answer."""
    lines = _last_lines(log)
    telling = [place for place, line in enumerate(lines) if _TELLING.search(line)]
    start = telling[-1] if telling else -LOG_LINES
    return " | ".join(lines[start:][:LOG_LINES])[:LOG_CHARACTERS]


def last_line(log: Path) -> str:
    """Return the last line of a log, where a program that ends with an exit code often says why."""
    return "".join(_last_lines(log)[-1:])[:LOG_CHARACTERS]


def _last_lines(log: Path) -> list[str]:
    """Return the last lines that are not empty; [] if storage does not answer."""
    read: list[str] = []

    def look() -> None:
        try:
            with foreign.reading(log) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                read.append(file.read(LOG_BYTES).decode(errors="replace"))
        except OSError:
            return

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(LOG_LIMIT_S)
    return [line.strip() for line in "".join(read).splitlines() if line.strip()]
