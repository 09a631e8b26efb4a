"""What cannot be read now is neither damaged nor absent, whoever reads it and from whatever tier."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jurymast import foreign, reading
from jurymast.agent.storage_processes import NodeStorage
from jurymast.checkpoint.directory import (
    MANIFEST,
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    hash_file,
)
from jurymast.checkpoint.group import is_inability
from jurymast.cluster.allocation import Allocation
from jurymast.core.checkpoints.copies import Copies, plan_restore
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.images import OBJECT, StateId
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.journal import replay
from jurymast.reading import Unable, patiently
from jurymast.rundir import RunDirectory
from jurymast.storage import shared
from jurymast.storage.object_store import ObjectStore, upload
from jurymast.storage.orders import Job, StorageFailure, Upload, WriteShared
from jurymast.supervisor.real_io import RealIo
from support.commands import swapped
from support.storage_faults import failing

NOW = [errno.ESTALE, errno.EIO, errno.ENOMEM, errno.EACCES, errno.ETIMEDOUT, errno.EMFILE]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES_S", (0.001,))


def save(directory: CheckpointDirectory, step: int, attempt: int = 1) -> None:
    place = directory.begin(step, attempt)
    (place / "file").write_bytes(b"content")
    records = (FileRecord("file", *hash_file(place / "file")),)
    directory.seal(place, CheckpointManifest(step, attempt, 1, "2.13.0", records, run=directory.run))
    directory.publish(place, step)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    found = CheckpointDirectory(tmp_path / "checkpoints", "run", patience_s=0.05)
    for step in (100, 2000):
        save(found, step)
    return found


# ---- the rule


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "too long"])
def test_what_is_no_ordinary_file_is_a_finding_about_what_is_stored(tmp_path: Path, kind: str) -> None:
    """To wait and try again would change nothing, and would keep an older checkpoint from being restored."""
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.write_bytes(b"too long")
    with pytest.raises(foreign.NotAFile) as error:
        foreign.read(path, 5)
    assert reading.conclusive(error.value)


@pytest.mark.parametrize("number", NOW)
def test_a_read_that_fails_once_is_tried_again(tmp_path: Path, number: int) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with failing("file", number, times=1) as hit:
        assert patiently(lambda: os.stat(tmp_path / "file").st_size, tmp_path) == 1
    assert len(hit) == 1


def test_a_read_that_keeps_failing_ends_with_what_it_failed_with(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with failing("file", errno.EIO) as hit, pytest.raises(Unable) as raised:
        patiently(lambda: os.stat(tmp_path / "file"), tmp_path, 0.02)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / "file"))
    assert len(hit) > 1


def test_what_is_absent_is_so_only_on_storage_that_is_there(tmp_path: Path) -> None:
    place = tmp_path / "mount"
    for empty in (False, True):  # no mount point, and one on which nothing is mounted
        if empty:
            place.mkdir()
        with pytest.raises(Unable, match="is its storage mounted"):
            patiently(lambda: os.stat(place / "file"), place, 0.0)
    (place / "other").touch()
    with pytest.raises(FileNotFoundError):
        patiently(lambda: os.stat(place / "file"), place, 60.0)


def test_memory_that_is_short_says_nothing_about_a_file(tmp_path: Path) -> None:
    def read() -> Any:
        raise MemoryError

    with pytest.raises(Unable, match="MemoryError"):
        patiently(read, tmp_path, 0.0)


@pytest.mark.parametrize(
    ("error", "unable"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("a value"), False),
        (foreign.NotAFile(errno.EINVAL, "it is not an ordinary file"), False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_rank_without_room_for_an_image_says_nothing_about_it(error: Exception, unable: bool) -> None:
    assert is_inability(error) is unable


# ---- the shared tier


@pytest.mark.parametrize("number", NOW)
@pytest.mark.parametrize("name", [MANIFEST, "file", "rollback.json", "verified"])
def test_a_checkpoint_that_cannot_be_read_is_no_worse_for_it(
    directory: CheckpointDirectory, number: int, name: str
) -> None:
    """Whichever of its files, or of those that say what it is worth, it is."""
    directory.mark(2000)
    with failing(name, number):
        with pytest.raises(Unable):
            directory.whole(2000)
        with pytest.raises(Unable):
            directory.sizes()
    with failing(name, number, times=1):
        assert directory.complete() == [2000, 100]


def test_files_that_cannot_be_read_are_not_damaged(directory: CheckpointDirectory) -> None:
    files = directory.manifest(2000).files
    with failing("step-00002000/file", errno.ESTALE), pytest.raises(Unable):
        directory.check_files(2000, files)
    (directory.path(2000) / "file").write_bytes(b"CONTENT")
    assert directory.check_files(2000, files) == ["file is corrupt: its hash does not match"]
    (directory.path(2000) / "file").unlink()
    assert directory.check_files(2000, files) == ["file: No such file or directory"]
    with pytest.raises(BadCheckpoint, match="file: No such file"):
        directory.check_sizes(2000, directory.manifest(2000))


def test_files_of_storage_that_is_not_mounted_here_are_not_damaged(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    """As on one node of several: the others see them."""
    files = directory.manifest(2000).files
    directory.root.rename(tmp_path / "elsewhere")
    directory.root.mkdir()
    with pytest.raises(Unable, match="is its storage mounted"):
        directory.check_files(2000, files)


@pytest.mark.parametrize("name", ["verified", "pinned"])
def test_retention_removes_nothing_while_it_does_not_know_what_counts(
    directory: CheckpointDirectory, name: str
) -> None:
    """A mark of damage that cannot be read would make the damaged checkpoint count as the one to keep, and a
    pin that cannot be read would not protect."""
    directory.mark(2000, "its file is corrupt")
    directory.pin(100)
    with failing(name, errno.EIO), pytest.raises(OSError):
        directory.retire(1)
    assert directory.steps() == [2000, 100]


def test_a_good_checkpoint_is_not_set_aside_because_it_could_not_be_read(
    directory: CheckpointDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the nodes that write the same step together."""
    monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
    order = WriteShared(
        root=str(directory.root), step=2000, attempt=2, world=1, images=(), lead=True, nonce="01", run="run",
        run_directory=str(tmp_path),
    )  # fmt: skip
    part = shared._Part(order, Job(10.0), None)  # type: ignore[arg-type]  # it has no images
    part._directory = CheckpointDirectory(directory.root, "run", patience_s=0.0)
    with failing(MANIFEST, errno.ESTALE), pytest.raises(StorageFailure, match="[Ss]tale"):
        part.take()
    assert sorted(name for name in os.listdir(directory.root) if name.startswith("step-")) == [
        "step-00000100",
        "step-00002000",
    ]
    assert directory.complete() == [2000, 100]


# ---- the object tier


class FailingStore:
    """What an object store's client does while the store answers 503, which `exists` takes for a no."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self.down = False

    def __getattr__(self, name: str) -> Any:
        if self.down and name in ("info", "ls", "cat_file"):
            return self._unavailable
        if self.down and name == "exists":
            return lambda path: False
        return getattr(self._files, name)

    def _unavailable(self, *_: Any, **__: Any) -> Any:
        raise ConnectionError("503 Slow Down")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    pytest.importorskip("fsspec")
    monkeypatch.setattr("jurymast.storage.object_store.PAUSES_S", (0.001,))
    return ObjectStore(f"file://{tmp_path}/bucket", "run", b"x" * 32)


def test_a_store_that_does_not_answer_has_not_lost_its_checkpoints(
    directory: CheckpointDirectory, store: ObjectStore
) -> None:
    store.upload(directory, 2000, Job(10.0))
    flaky = store._files = FailingStore(store._files)
    flaky.down = True
    with pytest.raises(StorageFailure, match="503"):
        store.steps()
    with pytest.raises(StorageFailure, match="503"):
        store.upload(directory, 2000, Job(10.0))
    with pytest.raises(StorageFailure, match="503"):
        store.remove(2000)
    flaky.down = False
    assert store.steps() == [2000]


def test_the_store_keeps_the_newest_and_what_is_pinned(
    directory: CheckpointDirectory, store: ObjectStore
) -> None:
    for step in (2100, 2200, 2300):
        save(directory, step)
    for step in (100, 2000, 2100, 2200, 2300):
        store.upload(directory, step, Job(10.0))
    directory.pin(100)
    assert store.prune(2, directory, 2300) == [2100, 2000]
    assert store.steps() == [2300, 2200, 100]


def test_an_upload_removes_what_the_policy_keeps_no_longer(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    """As the supervisor orders it and the agent hands it on."""
    pytest.importorskip("fsspec")
    place, url = RunDirectory(tmp_path / "runs/run"), f"file://{tmp_path}/bucket"
    place.create()
    plan = RunPlan(
        run="run", name="n", directory=str(place.root), cluster="local", active=1, spares=0, ranks_per_node=1,
        script="t", settings=Settings(object_url=url, object_keep=1),
    )  # fmt: skip
    save(directory, 2100)
    no_keeper: Any = None
    storage = NodeStorage(place, plan, no_keeper, None)
    storage.checkpoints_at(within.CheckpointsKept(directory=str(directory.root), keep=5))
    for step in (100, 2000, 2100):
        write = msg.Write(id="7", tier=OBJECT, step=step, attempt=1, ranks=(), world=1)
        order = storage.order(write, [])
        assert isinstance(order, Upload)
        upload(order, Job(10.0))
    assert ObjectStore(url, "run", place.secret()).steps() == [2100]


def test_what_an_interrupted_removal_left_in_the_store_goes_with_the_next(
    directory: CheckpointDirectory, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 2000):
        store.upload(directory, step, Job(10.0))
    with monkeypatch.context() as patch:
        patch.setattr(store._files, "rm", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("cut")))
        with pytest.raises(StorageFailure):
            store.prune(1, directory, 2000)
    assert store.steps() == [2000], "its marker goes first: half of it never counts"
    assert store.prune(1, directory, 2000) == [100]
    assert store._listed(store._base) == ["step-00002000"]


# ---- what the supervisor chooses


def test_a_shared_step_that_attempts_could_not_read_is_no_longer_planned_on() -> None:
    shared_steps = {100: 9, 2000: 9}
    plan = plan_restore(Copies(), shared_steps, ["n1"], 1)
    assert plan.step == 2000
    plan = plan_restore(Copies(), shared_steps, ["n1"], 1, {StateId(2000, 0)})
    assert plan.step == 100
    plan = plan_restore(Copies(), shared_steps, ["n1"], 1, {StateId(2000, 3)})
    assert plan.step == 2000, "it was an image of that step that could not be brought"
    plan = plan_restore(Copies(), {2000: 9}, ["n1"], 1, {StateId(2000, 0)})
    assert plan.step == 2000, "there is nothing else"


# ---- a supervisor


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("part", ["/journal", ".jsonl"])
def test_a_journal_that_cannot_be_read_is_not_that_of_a_new_run(
    tmp_path: Path, part: str, number: int
) -> None:
    """Its lines would be void from then on: the next epoch says what it has read."""
    directory = swapped().write(tmp_path / "run")
    io = RealIo(directory, Allocation("17", 0, (), "n1", 0.0), partial(replay, directory))
    known = replay(directory)
    assert known.incidents
    with failing(part, number, times=1) as hit:
        assert asyncio.run(io.replayed()) == known
    assert hit
