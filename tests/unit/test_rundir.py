"""The run directory: who may read it, and that a file in it is whole or absent."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jurymast import foreign, rundir
from jurymast.core.state.settings import Budget, RunPlan, Settings
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory, write_atomically
from support.hanging import hanging
from support.waiting import wait_until

NOBODY = 65534


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "runs" / "run-1")
    made.create()
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_only_the_user_may_enter_and_read(tmp_path: Path, umask: int) -> None:
    """Nor can anybody put another run into its place."""
    before = os.umask(umask)
    try:
        directory = RunDirectory(tmp_path / "new" / "runs" / "run-1")
        directory.create()
        write_atomically(directory.root / "any", b"x")
    finally:
        os.umask(before)
    entries = list((tmp_path / "new").rglob("*"))
    assert {mode(path) for path in entries if path.is_dir()} == {0o700}
    assert {mode(path) for path in entries if path.is_file()} == {0o600}
    assert directory.secret_file in entries


def test_each_run_has_a_secret_of_its_own(tmp_path: Path) -> None:
    made = [RunDirectory(tmp_path / f"run-{n}") for n in range(3)]
    for directory in made:
        directory.create()
    found = {directory.secret() for directory in made}
    assert len(found) == 3
    assert {len(secret) for secret in found} == {32}


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o602, 0o610])
def test_a_secret_that_others_could_touch_is_refused(directory: RunDirectory, bits: int) -> None:
    directory.secret_file.chmod(bits)
    with pytest.raises(RunDirectoryError, match="other users can read") as caught:
        directory.secret()
    assert "chmod 600" in caught.value.hint
    directory.secret_file.chmod(0o600)
    assert len(directory.secret()) == 32


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_secret_that_another_user_has_put_there_is_refused(directory: RunDirectory, tmp_path: Path) -> None:
    """Who swapped it knows it; so does whoever wrote what a link leads to."""
    os.chown(directory.secret_file, NOBODY, NOBODY)
    with pytest.raises(RunDirectoryError, match="or own it"):
        directory.secret()
    os.chown(directory.secret_file, 0, 0)
    elsewhere = tmp_path / "known"
    directory.secret_file.rename(elsewhere)
    directory.secret_file.symlink_to(elsewhere)
    with pytest.raises(RunDirectoryError, match="cannot read"):
        directory.secret()


def test_a_missing_or_damaged_secret_is_told(directory: RunDirectory) -> None:
    directory.secret_file.write_text("not hexadecimal")
    with pytest.raises(RunDirectoryError, match="secret"):
        directory.secret()
    directory.secret_file.unlink()
    with pytest.raises(RunDirectoryError, match="secret"):
        directory.secret()


def test_a_run_never_takes_over_a_directory_that_exists(directory: RunDirectory) -> None:
    secret = directory.secret()
    with pytest.raises(RunDirectoryError, match="exists") as caught:
        directory.create()
    assert "--runs" in caught.value.hint
    assert directory.secret() == secret


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot create"):
        RunDirectory(tmp_path / "file" / "run-1").create()


def test_a_plan_comes_back_as_it_was(directory: RunDirectory) -> None:
    plan = RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="slurm", active=32, spares=2,
        ranks_per_node=8, script="train.py", arguments=("--lr", "1e-3"), exclude=("n3",),
        settings=Settings(hang_s=0.0, application=Budget(count=1, window_s=60.0)),
    )  # fmt: skip
    directory.save_plan(plan)
    assert directory.plan() == plan
    directory.plan_file.write_text('{"run": "r"}')
    with pytest.raises(RunDirectoryError):
        directory.plan()


def test_a_failed_write_leaves_the_old_content_and_nothing_else(directory: RunDirectory) -> None:
    """The file may grow to 1000 bytes, as on a disk that is full then."""
    write_atomically(directory.plan_file, b"old")
    before = sorted(directory.root.iterdir())
    code = """
import resource, sys
from pathlib import Path
from jurymast.rundir import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path(sys.argv[1]), b"new" * 1000)
except OSError as error:
    print("refused:", error.strerror)
"""
    command = [sys.executable, "-c", code, str(directory.plan_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("refused:")
    assert directory.plan_file.read_bytes() == b"old"
    assert sorted(directory.root.iterdir()) == before


def test_a_write_that_fails_again_and_again_says_the_same(tmp_path: Path) -> None:
    """Whoever tells a problem when it begins would else tell it every few seconds."""
    said = set()
    for _ in range(3):
        with pytest.raises(FileNotFoundError) as failed:
            write_atomically(tmp_path / "gone" / "metrics.prom", b"x")
        said.add(str(failed.value))
    assert said == {f"[Errno 2] No such file or directory: '{tmp_path}/gone/metrics.prom'"}


def test_a_write_that_cannot_take_its_place_leaves_nothing(directory: RunDirectory) -> None:
    (directory.root / "taken").mkdir()
    before = sorted(directory.root.iterdir())
    with pytest.raises(OSError, match="taken"):
        write_atomically(directory.root / "taken", b"x")
    assert sorted(directory.root.iterdir()) == before


def test_a_file_system_that_syncs_no_directories_is_written_to(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other failure to do so is one."""
    sync, code = os.fsync, errno.EINVAL

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    directory.save_attempt(3)
    assert directory.newest_attempt() == 3
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        directory.save_attempt(4)


def test_who_waits_for_a_write_is_known(directory: RunDirectory) -> None:
    """As for what is read: `cli.patience` and a restore's watch tell of it."""
    writer = threading.Thread(target=write_atomically, args=(directory.root / "a", b"1"), daemon=True)
    with hanging(directory.root):  # the name in it would be on disk
        writer.start()
        wait_until("the wait", lambda: foreign.unanswered()[0] == str(directory.root))
    writer.join(60)
    assert foreign.unanswered() == ("", 0.0)


def test_what_a_write_waits_for_is_its_file(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    rename = os.rename

    def renamed(*paths: str) -> None:
        asked.append(foreign.unanswered()[0])
        rename(*paths)

    monkeypatch.setattr(os, "rename", renamed)
    write_atomically(directory.root / "a", b"1")
    assert asked == [str(directory.root / "a")]


def test_a_reader_never_sees_a_part(directory: RunDirectory) -> None:
    path = directory.root / "state"
    contents = [bytes([letter]) * size for letter, size in ((65, 300_000), (66, 10), (67, 70_000))]
    write_atomically(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for n in range(300):
            write_atomically(path, contents[n % 3], durable=False)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    thread.join()
    assert seen <= set(contents)
    assert len(list(directory.root.glob(".*"))) == 0


def test_the_newest_attempt_is_zero_until_there_is_one(directory: RunDirectory) -> None:
    directory.plan_file.touch()
    assert directory.newest_attempt() == 0
    write_atomically(directory.attempt_file, b"12")
    assert directory.newest_attempt() == 12


def test_a_newest_attempt_that_cannot_be_read_is_not_none(directory: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match=r"attempt cannot be read: No such file"):
        directory.newest_attempt()  # not even a plan is there: it is no run directory, or not mounted
    directory.attempt_file.write_bytes(b"\xff12")
    with pytest.raises(RunDirectoryError, match="attempt is damaged: no number") as raised:
        directory.newest_attempt()
    assert str(directory.root) in raised.value.hint
    directory.attempt_file.unlink()
    directory.attempt_file.mkdir()
    with pytest.raises(RunDirectoryError, match=r"attempt cannot be read: Is a directory"):
        directory.newest_attempt()


@pytest.mark.parametrize("when", ["at once", "while it is made", "later"])
def test_no_other_run_is_removed_in_the_place_of_one_that_could_not_be_made(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may rename what is in the runs directory may put another one there, which is the same user's."""
    runs, real = tmp_path / "runs", rundir.write_atomically
    other = RunDirectory(runs / "other")
    other.create()
    (other.checkpoints / "step-1").write_text("weeks of training")
    new = RunDirectory(runs / "new")

    def swap() -> None:
        new.root.rename(runs / "away")
        other.root.rename(new.root)

    def full(path: Path, data: bytes, **how: Any) -> None:
        if when == "while it is made":
            swap()
            raise OSError(errno.ENOSPC, "no space left")
        real(path, data, **how)

    def make_then_swap(path: Path, mode: int = 0o777) -> None:
        os.mkdir(path, mode)
        if path == new.root:
            swap()

    monkeypatch.setattr(rundir, "write_atomically", full)
    if when == "later":
        made = new.create()
        swap()
        new.unmake(made)
    else:
        with monkeypatch.context() as changed:
            if when == "at once":
                changed.setattr(Path, "mkdir", make_then_swap)
            with pytest.raises(RunDirectoryError, match="cannot create"):
                new.create()
    assert (new.checkpoints / "step-1").read_text() == "weeks of training"
    assert len(new.secret()) == 32
