"""An agent's temporary directory: its own while it lives, removed by the next agent once it was killed."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jurymast.agent.node import own_temporary_directory


def test_a_killed_agents_directory_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "jurymast-agent-not-one").mkdir()
    first, first_lock = own_temporary_directory()
    (first / "pymp-x").mkdir()
    second, second_lock = own_temporary_directory()
    assert first.exists()
    assert first.stat().st_mode & 0o777 == 0o700
    os.close(first_lock)  # as the kernel does when the agent is killed
    third, third_lock = own_temporary_directory()
    assert not first.exists()
    assert second.exists()
    assert third != second
    assert (tmp_path / "jurymast-agent-not-one").exists()
    os.close(second_lock)
    os.close(third_lock)


def test_agents_that_start_at_once_leave_each_other_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor(8) as agents:
        made = list(agents.map(lambda _: own_temporary_directory(), range(200)))
    for own, lock in made:
        assert (own / "lock").exists()
        os.close(lock)
