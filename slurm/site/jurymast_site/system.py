"""What the site's programs share: the log, running a program with a time limit, and root's own files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import syslog
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND_LIMIT_S = 10.0


class Failed(Exception):
    """A program could not be run, or failed; the message is one line."""


def run(
    command: Sequence[str],
    *,
    limit_s: float = COMMAND_LIMIT_S,
    given: bytes = b"",
    codes: Sequence[int] = (0,),
) -> str:
    """Return the standard output of a program whose exit code is one of `codes` (empty: any). Raises
    Failed."""
    try:
        done = subprocess.run(list(command), input=given, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} did not end within {limit_s:g} s") from None
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    if codes and done.returncode not in codes:
        words = done.stderr.decode(errors="replace").split()
        raise Failed(f"{command[0]}: exit code {done.returncode}: {' '.join(words)[:300]}")
    return done.stdout.decode(errors="replace")


class Log:
    """Writes lines to syslog, and to the site's own file if there is one. Users' texts are made harmless."""

    def __init__(self, program: str, path: str) -> None:
        self._program = program
        self._path = path
        syslog.openlog(program, syslog.LOG_PID, syslog.LOG_DAEMON)

    def alert(self, text: str) -> None:
        """Log what needs attention: many sites page people for syslog's priority `alert`."""
        self.say(f"ALERT: {text}", syslog.LOG_ALERT)

    def say(self, text: str, priority: int = syslog.LOG_NOTICE) -> None:
        line = clean(text)
        syslog.syslog(priority, line)
        if self._path:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            # O_NONBLOCK: opening a pipe must not wait for a process at its other end.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                descriptor = os.open(self._path, flags, 0o640)
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    status = os.fstat(descriptor)
                    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                        return  # nor may it be a link to another file of root's
                    file.write(f"{stamp} {self._program}[{os.getpid()}]: {line}\n")
            except OSError:
                pass  # syslog has it


def clean(text: str) -> str:
    """The text on one line, printable and cut short, whatever a user wrote."""
    return "".join(c if c.isprintable() else "?" for c in text)[:600]


def load_state(path: Path) -> dict[str, Any]:
    """Read one of root's own JSON files; empty if it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def save_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write one of root's own JSON files, so that a power cut does not take it back. Raises OSError."""
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def state_directory(path: Path) -> Path:
    """Return root's own directory, closed to others; makes it if it is missing. Raises Failed."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    if path.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Failed(f"{path}: must belong to root, and be writable by root alone")
    return path
