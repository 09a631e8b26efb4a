"""The state file of a running cluster, and the lock that keeps two users of one cluster apart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from testcluster.control import Job
from testcluster.errors import ClusterError
from testcluster.machines import Machine
from testcluster.network import Network
from testcluster.settings import HOST_LOCK, Layout, Options

_VERSION = 1


@dataclass(frozen=True)
class Saved:
    """What the state file holds."""

    options: Options
    base: Path
    machines: dict[str, Machine]


def save(layout: Layout, saved: Saved) -> None:
    """Replace the state file in one step."""
    content = {
        "version": _VERSION,
        "options": saved.options.to_json(),
        "base": str(saved.base),
        "machines": {name: machine.to_json() for name, machine in saved.machines.items()},
    }
    partial = layout.state_file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(layout.state_file)


def load(layout: Layout) -> Saved | None:
    """The state file's content; None when there is none, or when another version left it."""
    try:
        content: dict[str, Any] = json.loads(layout.state_file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if content.get("version") != _VERSION:
        return None
    return Saved(
        options=Options.from_json(content["options"]),
        base=Path(content["base"]),
        machines={name: Machine.from_json(item) for name, item in content["machines"].items()},
    )


def stamp(layout: Layout) -> int | None:
    """Changes whenever the state file does (nanoseconds); None when there is none."""
    try:
        return layout.state_file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def host_lock() -> Iterator[None]:
    """Held while a cluster is made or purged: packages and the user belong to all clusters of this host."""
    with open(HOST_LOCK, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Lock:
    """Held from ``up`` to ``down`` by the process that uses the cluster; the kernel frees it if that dies."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.lock_file
        self._fd: int | None = None

    def take(self) -> None:
        """Take the lock, or say who has it."""
        if self._fd is not None:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode().strip() or "?"
            os.close(fd)
            raise ClusterError(
                f"the cluster in {self._path.parent} is in use by process {holder}:"
                " wait for it, or use another --dir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def free(self) -> None:
        """Free the lock; free already is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Running(Protocol):
    """What faults and inspections need of a cluster that is up. ``cluster.Cluster`` explains its parts."""

    layout: Layout
    prefix: str
    network: Network

    @property
    def saved(self) -> Saved: ...

    @property
    def nodes(self) -> list[str]: ...

    def machine(self, name: str) -> Machine: ...

    def disk_bytes(self, path: str) -> int: ...

    def exec(
        self, name: str, argv: Sequence[str], *, check: bool = True, root: bool = False
    ) -> subprocess.CompletedProcess[str]: ...

    def restart_slurmctld(self, *, crash: bool = False) -> None: ...

    def node_states(self) -> dict[str, str]: ...

    def squeue(self) -> list[Job]: ...
