"""Fixtures for tests that start processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.worker import link
from support.waiting import wait_until


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
    # Of what a test beside this one does not use any more its resource tracker removes the file in a moment.
    wait_until("end of new semaphores that no process has", lambda: not _abandoned(_semaphores() - before))


def _semaphores() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.")}


def _abandoned(names: set[str]) -> set[str]:
    """Those that no process has mapped: what lives is a test's that runs beside this one."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:  # it has ended, or is another user's
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names
