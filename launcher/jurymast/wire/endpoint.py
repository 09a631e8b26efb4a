"""Where the supervisor listens: one file an epoch in the run directory. The newest epoch rules.

Creating an epoch's file is the fence: only one process can create it, and a supervisor that sees a newer
one stops deciding.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from jurymast.core.agent.succession import PULSE_INTERVAL_S as PULSE_INTERVAL_S
from jurymast.core.endpoint import Endpoint as Endpoint
from jurymast.rundir import write_atomically


def claim_epoch(epochs: Path) -> int:
    """Take the next epoch; two claimants never get the same one. Raises OSError."""
    epoch = newest_epoch(epochs) + 1
    while not claim(epochs, epoch):
        epoch += 1
    return epoch


def claim(epochs: Path, epoch: int) -> bool:
    """Take this epoch, unless another has it. Raises OSError."""
    try:
        os.close(os.open(epochs / f"{epoch:06d}.claim", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def newest_epoch(epochs: Path) -> int:
    """The newest epoch claimed; 0 before the first. Raises OSError: not even a directory that is not there
    says that there is none."""
    claims = (Path(name) for name in os.listdir(epochs) if name.endswith(".claim"))
    return max((int(claim.stem) for claim in claims if claim.stem.isdecimal()), default=0)


def announce(epochs: Path, endpoint: Endpoint) -> None:
    write_atomically(epochs / f"{endpoint.epoch:06d}.json", json.dumps(asdict(endpoint)).encode())


def pulse(epochs: Path, epoch: int, count: int) -> None:
    """Say that this epoch's supervisor lives, to those whom the network does not reach."""
    path = epochs / f"{epoch:06d}.pulse"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, str(count).encode())
    finally:
        os.close(descriptor)


def read_pulse(epochs: Path) -> str:
    """Changes while the newest epoch's supervisor lives. Raises OSError."""
    epoch = newest_epoch(epochs)
    try:
        return f"{epoch}:{(epochs / f'{epoch:06d}.pulse').read_text()}"
    except OSError:
        return f"{epoch}:"


def find(epochs: Path) -> Endpoint | None:
    """The newest announced endpoint, or None."""
    for path in sorted(epochs.glob("*.json"), reverse=True):
        try:
            values = json.loads(path.read_bytes())
            values["hosts"] = tuple(values["hosts"])
            return Endpoint(**values)
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None
