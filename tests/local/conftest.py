"""Fixtures for tests that start processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from jurymast.worker import link


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that is no rank of a run: nothing of the environment reaches a Checkpointer."""
    for name in [name for name in os.environ if name.startswith("JURYMAST_")]:
        monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(link, "_current", None)


@pytest.fixture(autouse=True)
def _no_semaphores_left() -> Iterator[None]:
    """Killed with SIGKILL or not: a run leaves no file of a semaphore in /dev/shm."""
    before = _semaphores()
    yield
    assert _semaphores() - before == set()


def _semaphores() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.")}
