"""Fixtures for tests that start processes on this machine."""

from __future__ import annotations

import os

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
