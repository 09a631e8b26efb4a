"""Checkpoints in an object store, by a real S3-compatible server that comes and goes."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.checkpoint.directory import CheckpointDirectory, CheckpointManifest, FileRecord, hash_file
from jurymast.rundir import RunDirectory
from jurymast.storage import object_store
from jurymast.storage.object_store import ObjectStore
from jurymast.storage.orders import Done, Job, StorageFailure, Upload
from support import s3_server
from support.checkpoints import flip
from support.images import StorageProcess
from support.s3_server import S3Server

pytestmark = pytest.mark.skipif(
    not s3_server.installed(), reason="no object store to test with: pip install swift s3fs"
)

BUCKET = "s3://checkpoints/team"
SECRET = b"s" * 32


def make_checkpoint(
    root: Path, step: int, attempt: int = 1, sizes: tuple[int, ...] = (300_000, 7, 0)
) -> None:
    """A complete checkpoint of random files; what is in them does not matter here."""
    directory = CheckpointDirectory(root)
    place = directory.begin(step, attempt)
    records = []
    for number, size in enumerate([*sizes, 50]):
        name = f"__{number}_0.distcp" if number < len(sizes) else ".metadata"
        (place / name).write_bytes(os.urandom(size))
        records.append(FileRecord(name, *hash_file(place / name), number))
    directory.seal(place, CheckpointManifest(step, attempt, len(sizes), "2.13.0", tuple(records)))
    directory.publish(place, step)


def job() -> Job:
    return Job(60.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("swift"))
    server.start()
    try:
        importlib.import_module("fsspec").filesystem("s3", **server.storage_options()).mkdir("checkpoints")
        yield server
    finally:
        server.stop()


@pytest.fixture
def store(server: S3Server, request: pytest.FixtureRequest) -> ObjectStore:
    return ObjectStore(BUCKET, request.node.name, SECRET, server.storage_options())


def test_there_and_back(tmp_path: Path, store: ObjectStore) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        make_checkpoint(root, step)
        done = store.upload(CheckpointDirectory(root), step, job())
        assert (done.existing, done.bytes) == (False, 300_057)
    assert store.upload(CheckpointDirectory(root), 10, job()).existing
    assert store.steps() == [20, 10]
    back = CheckpointDirectory(tmp_path / "back")
    store.fetch(20, back, job())
    assert back.manifest(20) == CheckpointDirectory(root).manifest(20)
    assert back.check_files(20, back.manifest(20).files) == []
    assert os.listdir(back.root) == ["step-00000020"]
    store.remove(20)
    assert store.steps() == [10]


def test_large_files_go_in_parts(tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    root = tmp_path / "checkpoints"
    make_checkpoint(root, 1, sizes=(17_000_000, 12_000_001))
    store.upload(CheckpointDirectory(root), 1, job())
    store.fetch(1, CheckpointDirectory(tmp_path / "back"), job())


def test_what_is_incomplete_or_damaged_does_not_count(tmp_path: Path, store: ObjectStore) -> None:
    root = tmp_path / "checkpoints"
    make_checkpoint(root, 1)
    flip(root / "step-00000001" / "__0_0.distcp")
    with pytest.raises(
        StorageFailure, match="__0_0.distcp is corrupt: its hash does not match, so it is not up"
    ):
        store.upload(CheckpointDirectory(root), 1, job())
    assert store.steps() == []
    shutil.rmtree(root)
    make_checkpoint(root, 1)
    store.upload(CheckpointDirectory(root), 1, job())
    store._files.rm_file(store._path(1, "__1_0.distcp"))
    with pytest.raises(StorageFailure, match="there is no such object or bucket"):
        store.fetch(1, CheckpointDirectory(tmp_path / "back"), job())
    assert not store.upload(CheckpointDirectory(root), 1, job()).existing
    store._files.pipe_file(store._path(1, "__0_0.distcp"), b"x" * 300_000)
    with pytest.raises(StorageFailure, match="__0_0.distcp is corrupt: its hash does not match; restore"):
        store.fetch(1, CheckpointDirectory(tmp_path / "back"), job())
    assert os.listdir(tmp_path / "back") == []


def test_another_attempts_checkpoint_is_replaced(tmp_path: Path, store: ObjectStore) -> None:
    for attempt, sizes in ((1, (10, 20, 30)), (2, (11, 21))):
        root = tmp_path / f"checkpoints-{attempt}"
        make_checkpoint(root, 5, attempt, sizes)
        store.upload(CheckpointDirectory(root), 5, job())
    assert store.manifest(5).attempt == 2
    names = {
        name.rpartition("/")[2] for name in store._files.ls(store._path(5, "").rstrip("/"), detail=False)
    }
    assert names == {"__0_0.distcp", "__1_0.distcp", ".metadata", "jurymast.json", "jurymast.seal"}


@pytest.mark.long
def test_a_store_that_is_down_and_back_again(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    root = run.checkpoints
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def upload(step: int) -> Upload:
        return Upload(
            root=str(root), step=step, url=BUCKET, run="down", run_directory=str(run.root), limit_s=100.0
        )

    with StorageProcess() as process:
        for step in (1, 2):
            make_checkpoint(root, step)
        process.done(upload(1))
        server.stop()
        why = process.failure(upload(2))
        assert f"{BUCKET.removeprefix('s3://')}/down" in why
        assert "check that it is up" in why
        # back before it gives up: that only takes longer
        process.give(upload(2))
        server.start()
        assert isinstance(process.answer(), Done)


def test_no_bucket_and_no_credentials(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    make_checkpoint(root, 1)
    nowhere = ObjectStore("s3://nowhere", "run", SECRET, server.storage_options())
    with pytest.raises(StorageFailure, match="no such object or bucket"):
        nowhere.upload(CheckpointDirectory(root), 1, job())
    stranger = ObjectStore(BUCKET, "run", SECRET, {**server.storage_options(), "secret": "wrong"})
    with pytest.raises(StorageFailure, match="check the credentials"):
        stranger.upload(CheckpointDirectory(root), 1, job())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    nobody = ObjectStore(BUCKET, "run", SECRET, {"endpoint_url": server.endpoint})
    with pytest.raises(StorageFailure, match=r"locate credentials.*check the credentials"):
        nobody.upload(CheckpointDirectory(root), 1, job())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StorageFailure, match=r"abfs://x needs a package .*: pip install 'jurymast\[object\]'"
    ):
        ObjectStore("abfs://x", "run", SECRET)
    with pytest.raises(StorageFailure, match="nonsense://x cannot be used: ValueError"):
        ObjectStore("nonsense://x", "run", SECRET)


def test_any_store_of_fsspec_will_do(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_checkpoint(root, 1)
    store = ObjectStore(f"file://{tmp_path}/store", "run", SECRET)
    store.upload(CheckpointDirectory(root), 1, job())
    store.fetch(1, CheckpointDirectory(tmp_path / "back"), job())
    assert store.steps() == [1]
