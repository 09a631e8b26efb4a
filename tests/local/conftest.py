"""Fixtures for tests that start processes on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.worker import link
from support.cgroups import new_cgroup
from support.semaphores import abandoned, semaphores
from support.waiting import wait_until


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that is no rank of a run: nothing of the environment reaches a Checkpointer."""
    for name in [name for name in os.environ if name.startswith("JURYMAST_")]:
        monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(link, "_current", None)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist  # most tests do without

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of this test's own below the one it is in, without a limit yet."""
    with new_cgroup() as place:
        yield place


@pytest.fixture(autouse=True)
def _no_semaphores_left() -> Iterator[None]:
    """Killed with SIGKILL or not: a run leaves no file of a semaphore in /dev/shm."""
    before = semaphores()
    yield
    # Of what a test beside this one does not use any more its resource tracker removes the file in a moment.
    wait_until("end of new semaphores that no process has", lambda: not abandoned(semaphores() - before))
