"""An agent's temporary directory: its own while it lives, removed by the next agent once it was killed."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jurymast.agent.real_io import own_temporary_directory, remove_abandoned


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
    remove_abandoned()
    assert not first.exists()
    assert second.exists()
    assert third != second
    assert (tmp_path / "jurymast-agent-not-one").exists()
    os.close(second_lock)
    os.close(third_lock)


def starting() -> tuple[Path, int]:
    remove_abandoned()
    return own_temporary_directory()


def test_agents_that_start_at_once_leave_each_other_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor(8) as agents:
        made = list(agents.map(lambda _: starting(), range(200)))
    for own, lock in made:
        assert (own / "lock").exists()
        os.close(lock)


@pytest.mark.parametrize(
    ("mode", "owner", "there"), [(0o777, 0, False), (0o777, 65534, False), (0o1777, 0, True)]
)
def test_it_is_not_where_others_could_put_another_into_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, there: bool
) -> None:
    """Else they choose, by a link, which file of the user's a rank empties when it begins its answers."""
    if owner and os.geteuid() != 0:
        pytest.skip("making another user's files needs root")
    os.chown(tmp_path, owner or os.geteuid(), -1)
    tmp_path.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, lock = own_temporary_directory()
    assert own.parent == (tmp_path if there else Path("/tmp"))
    os.close(lock)
    monkeypatch.setattr(tempfile, "tempdir", str(own.parent))
    remove_abandoned()
    assert not own.exists()


NOBODY = 65534
DEPTH = 1200


@pytest.mark.skipif(os.geteuid() != 0, reason="making another user's files needs root")
def test_what_another_user_has_put_there_stays_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories that look like those of a killed agent: another user's, one that others can write to, a
    link to somewhere else, a pipe for a lock. One that is nested deeply, as ranks may have left it, goes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("theirs", "open", "pipe", "deep"):
        place = tmp_path / f"jurymast-agent-{name}"
        place.mkdir(mode=0o700)
        (place / "lock").touch()
    os.chown(tmp_path / "jurymast-agent-theirs", NOBODY, NOBODY)
    (tmp_path / "jurymast-agent-open").chmod(0o777)
    (tmp_path / "jurymast-agent-pipe/lock").unlink()
    os.mkfifo(tmp_path / "jurymast-agent-pipe/lock")
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "lock").touch()
    (tmp_path / "jurymast-agent-link").symlink_to(precious)
    nested(tmp_path / "jurymast-agent-deep")
    remove_abandoned()
    for name in ("theirs", "open", "link"):
        assert (tmp_path / f"jurymast-agent-{name}/lock").exists(), name
    assert not (tmp_path / "jurymast-agent-deep").exists()


def nested(place: Path) -> None:
    """More directories in each other than Python goes down."""
    above = os.open(place, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=above)
        below = os.open("d", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
