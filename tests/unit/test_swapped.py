"""What has another user's name, or another kind, by the time that it is used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast import foreign
from jurymast.keeper.copies import local_copies, remove_local_copies
from jurymast.rundir import RunDirectory
from jurymast.script.output import Output, relayed
from jurymast.script.srun import parse
from jurymast.storage import local
from jurymast.storage.local import LocalDirectory
from jurymast.storage.orders import Job
from jurymast.worker.rank import _opened_log
from support.commands import RUN, Place, swapped
from support.images import simple_images, to_local
from support.stories import Story
from support.waiting import wait_until

MALLORY, ADA = 65533, 65534
as_others = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


# A node's own disk, where the directory that all share is not sticky: all may rename what is in it.


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is root's alone
        Path(folder).chmod(0o777)
        yield Path(folder)


@contextmanager
def as_ada() -> Iterator[None]:
    os.seteuid(ADA)
    try:
        yield
    finally:
        os.seteuid(0)


def by_somebody(work: Callable[[], object]) -> None:
    """What any user may do."""
    os.seteuid(0)
    os.seteuid(MALLORY)
    try:
        work()
    finally:
        os.seteuid(0)
        os.seteuid(ADA)


@pytest.fixture
def run(disk: Path) -> Path:
    """A run directory, which has the same name as the run's images on a node's disk."""
    with as_ada():
        run = disk / "runs" / "run"
        (run / "checkpoints" / "step-00000010").mkdir(parents=True)
        (run / "checkpoints" / "step-00000010" / "data").write_bytes(b"weeks of training")
        (run.parent / "run" / "step-00000001.a0001").mkdir()
        (run.parent / "run" / "step-00000001.a0001" / "data").write_bytes(b"x")
        run.parent.chmod(0o700)
    return run


@as_others
@pytest.mark.parametrize("way", ["renamed", "a link"])
def test_what_is_put_where_a_run_had_its_images_is_not_removed_at_its_end(
    disk: Path, run: Path, way: str
) -> None:
    """Not even if it belongs to the same user."""
    images = disk / "jurymast-ada"
    with as_ada():
        assert local_copies(images / "run") == []
        if way == "renamed":
            by_somebody(lambda: run.parent.rename(images))
        else:
            by_somebody(lambda: images.symlink_to(run.parent))
        remove_local_copies(images / "run")
        assert (images / "run" / "checkpoints" / "step-00000010" / "data").exists()


@as_others
def test_images_of_a_run_are_removed_at_its_end(disk: Path) -> None:
    place = disk / "jurymast-ada" / "run"
    with as_ada():
        local.write(to_local(place, simple_images(disk / "i")), Job(100.0))
        assert len(local_copies(place)) == 1
        remove_local_copies(place)
        assert list(place.parent.iterdir()) == []


@as_others
def test_a_directory_that_is_swapped_during_a_write_loses_nothing(
    disk: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is old or unfinished is removed before a write: from the directory that was looked at."""
    images, moved = disk / "jurymast-ada", disk / "moved"
    sweep = LocalDirectory.sweep

    def swap() -> None:
        images.rename(moved)
        images.symlink_to(run.parent)

    def sweep_after_a_swap(directory: LocalDirectory) -> None:
        by_somebody(swap)
        sweep(directory)

    monkeypatch.setattr(LocalDirectory, "sweep", sweep_after_a_swap)
    with as_ada():
        local.write(to_local(images / "run", simple_images(disk / "i")), Job(100.0))
        assert (run / "step-00000001.a0001" / "data").exists()
        assert len(local_copies(moved / "run")) == 1


# Logs of ranks, which others may have put there in a run directory that is not closed, and programs in one
# that is.

WAYS = ["a pipe", "a directory", "a device", "a link to a pipe"]


def put(path: Path, way: str) -> None:
    path.unlink(missing_ok=True)
    if way == "a directory":
        path.mkdir()
    elif way == "a device":
        path.symlink_to("/dev/zero")
    elif way == "a pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to("pipe")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def logs_of(run: RunDirectory, attempt: int, ranks: int) -> list[Path]:
    paths = [run.rank_log(attempt, rank) for rank in range(ranks)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for rank, path in enumerate(paths):
        path.write_text(f"rank {rank}\n")
    run.save_attempt(attempt)
    return paths


@pytest.mark.parametrize("way", WAYS)
def test_a_log_that_is_none_hides_no_other(place: Place, way: str) -> None:
    run = place.story(swapped())
    logs = logs_of(run, 2, 3)
    put(logs[1], way)
    run.submission.mkdir(exist_ok=True)
    (run.submission / "job-7.log").write_text("agent\n")
    (run.submission / "job-8.log").symlink_to("nowhere")
    for words in (["logs", RUN], ["logs", RUN, "--follow"]):
        done = place.run(*words)
        assert (done.returncode, done.stdout) == (0, "[r0] rank 0\n[r2] rank 2\n")
        assert str(logs[1]) in done.stderr
    assert place.good("logs", RUN, "--job").endswith("agent\n")
    assert place.run("logs", RUN, "--rank", "1").returncode == 73
    for words in (["status", RUN], ["report", RUN]):
        place.good(*words)


@pytest.mark.parametrize("way", WAYS)
def test_a_log_that_is_none_ends_no_relay_of_the_others(
    tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = RunDirectory(tmp_path / "run")
    job.create()
    job.save_plan(Story(active=3).plan)
    logs = logs_of(job, 1, 3)
    put(logs[0], way)
    srun = parse(["-o", f"{tmp_path}/out", "x"])
    assert srun is not None
    output, out = Output(srun, {}), tmp_path / "out"
    with relayed(job, output, after=0):
        wait_until("the others", lambda: out.exists() and out.read_bytes() == b"rank 1\nrank 2\n")
    output.close()
    assert capfd.readouterr().err.count(f"{logs[0]} is not printed here") == 1


@pytest.mark.parametrize("way", [*WAYS, "a link to a file", "another's", "others may write"])
def test_nothing_is_written_through_what_stands_in_a_log_s_place(tmp_path: Path, way: str) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    other.write_bytes(b"precious")
    if way == "a link to a file":
        path.symlink_to(other)
    elif way in WAYS:
        put(path, way)
    else:
        path.touch()
        path.chmod(0o666)
        if way == "another's":
            if os.geteuid():
                pytest.skip("becoming another user needs root")
            os.chown(path, MALLORY, -1)
    with pytest.raises(OSError):
        foreign.writing(path)
    if way in (*WAYS, "a link to a file"):
        with pytest.raises(OSError):
            _opened_log(str(path))
    assert other.read_bytes() == b"precious"


@pytest.mark.parametrize("open_log", [foreign.writing, _opened_log])
def test_a_log_goes_on_where_it_ended(tmp_path: Path, open_log: Callable[[str], int]) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        descriptor = open_log(str(path))
        os.write(descriptor, b"line\n")
        os.close(descriptor)
    assert path.read_bytes() == 2 * b"line\n"
    assert path.stat().st_mode & 0o777 == 0o600
