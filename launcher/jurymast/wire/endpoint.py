"""Where the supervisor listens: one file per epoch in the run directory. The newest epoch rules.

Creating an epoch's file is the fence: only one process can create it, and a supervisor that sees a newer one
stops deciding.

Network file systems may cache the list of a directory for up to a minute, but not the contents of a file that
is opened anew by its name. So files with fixed names have the newest endpoint and the pulse as well.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import msgspec

from jurymast import foreign
from jurymast.core.agent.succession import PULSE_INTERVAL_S as PULSE_INTERVAL_S
from jurymast.core.state.messages import Endpoint as Endpoint
from jurymast.rundir import sync_directory, write_json

PULSE, NEWEST = "pulse", "newest.json"
DIGITS_MAX = 12  # digits of an epoch's number
CLAIMED, ANNOUNCED = ".claim", ".json"


def _file(epochs: Path, epoch: int, suffix: str) -> Path:
    return epochs / f"{epoch:06d}{suffix}"


def claim_epoch(epochs: Path) -> int:
    """Claim the next epoch; two claimants never get the same one. Raises OSError."""
    epoch = newest_epoch(epochs) + 1
    while not claim(epochs, epoch):
        epoch += 1
    return epoch


def claim(epochs: Path, epoch: int) -> bool:
    """Claim this epoch, unless another process has it; a power loss does not undo the claim. Raises
    OSError."""
    try:
        os.close(os.open(_file(epochs, epoch, CLAIMED), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    sync_directory(epochs)
    return True


def newest_epoch(epochs: Path) -> int:
    """Return the newest epoch claimed; 0 before the first. Raises OSError, also if the directory is missing,
    which does not mean that there is no epoch. A damaged pulse says nothing: the claims count alone."""
    beats, _, _ = _read(epochs / PULSE).partition(":")
    return max([*_listed(epochs, CLAIMED), _number(beats) or 0])


def _number(text: str) -> int | None:
    """Return the epoch's number in `text`, or None if there is none."""
    return int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else None


def _listed(epochs: Path, suffix: str) -> list[int]:
    """List the epochs that have such a file; the newest may be missing. Raises OSError."""
    names = (Path(name) for name in foreign.names(epochs))
    found = (_number(name.stem) for name in names if name.suffix == suffix)
    return [number for number in found if number is not None]


def announce(epochs: Path, endpoint: Endpoint) -> None:
    for path in (_file(epochs, endpoint.epoch, ANNOUNCED), epochs / NEWEST):
        write_json(path, asdict(endpoint))


def pulse(epochs: Path, epoch: int, count: int) -> None:
    """Show through the file system that this epoch's supervisor lives, beginning right after its claim.
    Raises OSError, also if the claim is missing: then this is another directory."""
    os.stat(_file(epochs, epoch, CLAIMED))
    text = f"{epoch}:{count}".encode()
    descriptor = foreign.writing(epochs / PULSE, 0)
    try:  # never empty in between: others read the newest epoch there
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    finally:
        os.close(descriptor)


def read_pulse(epochs: Path) -> str:
    """Return a text that changes as long as the newest epoch's supervisor lives. Raises OSError."""
    return f"{newest_epoch(epochs)}:{_read(epochs / PULSE)}"


def _read(path: Path) -> str:
    """Read a file; "" if it does not exist. Raises OSError."""
    try:
        return foreign.read(path, foreign.NOTE_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return ""


def find(epochs: Path) -> Endpoint | None:
    """Return the newest announced endpoint that can be read, or None."""
    newest = _endpoint(epochs / NEWEST)
    try:
        listed = sorted(_listed(epochs, ANNOUNCED), reverse=True)
    except OSError:
        return newest
    newer = (epoch for epoch in listed if newest is None or epoch > newest.epoch)
    found = (_endpoint(_file(epochs, epoch, ANNOUNCED)) for epoch in newer)
    return next((place for place in found if place is not None), newest)


def _endpoint(path: Path) -> Endpoint | None:
    try:
        return msgspec.convert(foreign.load(path, foreign.NOTE_BYTES_MAX), Endpoint)
    except (OSError, ValueError):
        return None
