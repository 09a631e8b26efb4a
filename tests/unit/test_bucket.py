"""What somebody else has put into a bucket: it names no file outside of a checkpoint, and fills no memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from jurymast.checkpoint.directory import (
    MANIFEST,
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
)
from jurymast.storage import object_store
from jurymast.storage.object_store import SEAL, BucketKey, ObjectStore
from jurymast.storage.orders import Job, StorageFailure

STEP = 100
LOOT = b"ssh-ed25519 AAAA mallory"
SECRET = b"s" * 32


def bucket(folder: Path, manifest: bytes) -> ObjectStore:
    """With a step that has this manifest, and nothing else."""
    place = folder / f"bucket/run-1/step-{STEP:08d}"
    place.mkdir(parents=True)
    (place / MANIFEST).write_bytes(manifest)
    return ObjectStore(f"file://{folder}/bucket", "run-1", SECRET)


OUTSIDE = "OUTSIDE"


@pytest.mark.parametrize(
    "name", [OUTSIDE, "../../../../.bashrc", "a/b", "..", ".", "", MANIFEST, "a\x00", "a\x1b"]
)
def test_no_file_outside_of_the_checkpoint_is_written(tmp_path: Path, name: str) -> None:
    """All hashes fit: whoever can write to the bucket makes them."""
    outside = tmp_path / "home/.bashrc"
    name = str(outside) if name == OUTSIDE else name
    record = FileRecord(name, len(LOOT), xxhash.xxh3_64_hexdigest(LOOT))
    store = bucket(tmp_path / "deep", CheckpointManifest(STEP, 1, 1, "2.13.0", (record,)).to_bytes())
    inside = tmp_path / f"deep/bucket/run-1/step-{STEP:08d}{outside}"
    for source in (tmp_path / ".bashrc", inside):  # where these names lead to in the bucket
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_bytes(LOOT)
    checkpoints = CheckpointDirectory(tmp_path / "home/runs/run-1/checkpoints")
    with pytest.raises(StorageFailure, match="names a file that does not belong to a checkpoint"):
        store.fetch(STEP, checkpoints, Job(10.0))
    assert not outside.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"step": "100"}, {"step": -1}, {"attempt": 1.5}, {"world_size": None}, {"entries": []}, {"torch": 2},
        {"files": [{"name": 7, "size_bytes": 0, "xxh3_64": ""}]},
        {"files": [{"name": "a", "size_bytes": "0", "xxh3_64": ""}]},
        {"files": [{"name": "a", "size_bytes": -1, "xxh3_64": ""}]},
    ],
)  # fmt: skip
def test_a_manifest_of_other_kinds_is_refused(change: dict[str, object]) -> None:
    values = json.loads(CheckpointManifest(STEP, 1, 1, "2.13.0", ()).to_bytes())
    del values["manifest_xxh3_64"]
    values |= change
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["manifest_xxh3_64"] = xxhash.xxh3_64_hexdigest(text.encode())
    with pytest.raises(BadCheckpoint):
        CheckpointManifest.from_bytes(json.dumps(values).encode())


def test_a_manifest_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "SMALL_BYTES_MAX", 1000)
    with pytest.raises(StorageFailure, match="has 1001 bytes, at most 1000 are allowed"):
        bucket(tmp_path, b" " * 1001).manifest(STEP)


def saved(root: Path, data: bytes, step: int = STEP) -> CheckpointDirectory:
    """A complete checkpoint of one file."""
    directory = CheckpointDirectory(root)
    place = directory.begin(step, 1)
    (place / ".metadata").write_bytes(data)
    record = FileRecord(".metadata", len(data), xxhash.xxh3_64_hexdigest(data))
    directory.seal(place, CheckpointManifest(step, 1, 1, "2.13.0", (record,)))
    directory.publish(place, step)
    return directory


def not_sealed(_place: Path, seal: Path) -> None:
    seal.unlink()


def sealed_by_another_run(place: Path, seal: Path) -> None:
    manifest = (place / MANIFEST).read_bytes()
    seal.write_bytes(BucketKey(b"m" * 32, "run-1").seal(STEP, manifest, {".metadata": "00"}))


def of_another_step(_place: Path, seal: Path) -> None:
    seal.write_bytes(seal.read_bytes().replace(b'"step": 100', b'"step": 101'))


def swapped(place: Path, _seal: Path) -> None:
    """With a hash that fits: xxh3 is no secret."""
    (place / ".metadata").write_bytes(LOOT)
    record = FileRecord(".metadata", len(LOOT), xxhash.xxh3_64_hexdigest(LOOT))
    (place / MANIFEST).write_bytes(CheckpointManifest(STEP, 1, 1, "2.13.0", (record,)).to_bytes())


@pytest.mark.parametrize("change", [not_sealed, sealed_by_another_run, of_another_step, swapped])
def test_what_the_run_has_not_put_there_is_not_taken(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    """It would be unpickled."""
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    store.upload(saved(tmp_path / "run", b"right"), STEP, Job(10.0))
    back = CheckpointDirectory(tmp_path / "back")
    store.fetch(STEP, back, Job(10.0))
    back.set_aside(STEP)
    place = tmp_path / f"bucket/run-1/step-{STEP:08d}"
    change(place, place / SEAL)
    with pytest.raises(StorageFailure, match="this run's key does not vouch for step 100"):
        store.fetch(STEP, back, Job(10.0))
    assert back.steps() == []
    store.fetch(STEP, back, Job(10.0), unsealed=True)
    assert back.steps() == [STEP]


def endless(place: Path, _seal: Path) -> None:
    with (place / MANIFEST).open("ab") as file:
        file.truncate(object_store.SMALL_BYTES_MAX + 1)


def no_manifest(place: Path, _seal: Path) -> None:
    (place / MANIFEST).write_bytes(b"{}")


@pytest.mark.parametrize("change", [not_sealed, sealed_by_another_run, of_another_step, endless, no_manifest])
def test_what_the_run_has_not_put_there_is_not_taken_for_its_upload(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    """Else the run had no checkpoint there: nothing of this step could be fetched."""
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    run = saved(tmp_path / "run", b"right")
    store.upload(run, STEP, Job(10.0))
    assert store.upload(run, STEP, Job(10.0)).existing
    place = tmp_path / f"bucket/run-1/step-{STEP:08d}"
    change(place, place / SEAL)
    assert not store.upload(run, STEP, Job(10.0)).existing
    store.fetch(STEP, CheckpointDirectory(tmp_path / "back"), Job(10.0))


@pytest.mark.parametrize("manifest", [b"{}", CheckpointManifest(STEP + 1, 1, 1, "2.13.0", ()).to_bytes()])
def test_newer_checkpoints_that_others_put_there_drive_none_of_the_run_s_out(
    tmp_path: Path, manifest: bytes
) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    run = saved(tmp_path / "run", b"right")
    store.upload(run, STEP, Job(10.0))
    theirs = tmp_path / f"bucket/run-1/step-{STEP + 1:08d}"
    theirs.mkdir()
    (theirs / MANIFEST).write_bytes(manifest)
    assert store.prune(1, run, STEP + 2) == []
    assert store.steps() == [STEP + 1, STEP]


def test_however_many_steps_others_put_there_an_upload_ends_soon_and_what_is_old_is_removed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    run = saved(tmp_path / "run", b"right")
    store.upload(run, STEP, Job(10.0))
    place = tmp_path / "bucket/run-1"
    for step in range(STEP + 1, STEP + 301):
        (place / f"step-{step:08d}").mkdir()
        (place / f"step-{step:08d}" / MANIFEST).write_bytes(b"{}")
    newest = STEP + 301
    store.upload(saved(run.root, b"right", newest), newest, Job(10.0))
    looked: list[int] = []
    is_complete = ObjectStore._is_complete

    def look(self: ObjectStore, step: int) -> bool:
        looked.append(step)
        return is_complete(self, step)

    monkeypatch.setattr(ObjectStore, "_is_complete", look)
    monkeypatch.setattr(object_store, "time", SimpleNamespace(monotonic=lambda: float(len(looked))))
    for _ in range(100):
        before = len(looked)
        removed = store.prune(1, run, newest)
        assert len(looked) - before <= object_store.PRUNE_LIMIT_S + 3
        if removed:
            break
    assert removed == [STEP]
    assert len(list(place.iterdir())) == 301


@pytest.mark.parametrize(
    "sealed", [b"", b"{}", b"[]", b"null", b'{"seal": ""}', b'{"seal": null}', b'{"seal": 0}']
)
def test_a_seal_of_nothing_is_none(sealed: bytes) -> None:
    with pytest.raises(StorageFailure, match="is not of this run"):
        BucketKey(SECRET, "run-1").vouched(STEP, b"{}", sealed)


def test_a_file_that_the_seal_does_not_name_is_not_taken(tmp_path: Path) -> None:
    """By a seal of the run's own key: what is absent proves nothing."""
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    store.upload(saved(tmp_path / "run", b"right"), STEP, Job(10.0))
    place = tmp_path / f"bucket/run-1/step-{STEP:08d}"
    (place / SEAL).write_bytes(BucketKey(SECRET, "run-1").seal(STEP, (place / MANIFEST).read_bytes(), {}))
    with pytest.raises(StorageFailure, match="is not what this run uploaded"):
        store.fetch(STEP, CheckpointDirectory(tmp_path / "back"), Job(10.0))


def test_a_seal_is_for_its_step_alone() -> None:
    """Else another checkpoint of the run could be put into the place of this one, with all that is its."""
    key = BucketKey(SECRET, "run-1")
    sealed = key.seal(STEP, b"{}", {"a": "00"})
    assert key.vouched(STEP, b"{}", sealed) == {"a": "00"}
    with pytest.raises(StorageFailure):
        key.vouched(STEP + 1, b"{}", sealed)


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody had found files of the same hash: with 128 bytes of their choice that is possible."""

    class Colliding:
        def update(self, _data: object) -> None:
            return None

        def hexdigest(self) -> str:
            return "0" * 16

    monkeypatch.setattr(xxhash, "xxh3_64", Colliding)
    monkeypatch.setattr(xxhash, "xxh3_64_hexdigest", lambda data: "0" * 16)


@pytest.mark.usefixtures("colliding")
def test_a_file_of_the_same_hash_is_not_taken_for_the_runs(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    store.upload(saved(tmp_path / "run", b"right"), STEP, Job(10.0))
    (tmp_path / f"bucket/run-1/step-{STEP:08d}/.metadata").write_bytes(b"wrong")
    with pytest.raises(StorageFailure, match="is not what this run uploaded"):
        store.fetch(STEP, CheckpointDirectory(tmp_path / "back"), Job(10.0))


@pytest.mark.usefixtures("colliding")
def test_a_file_of_another_step_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """With the word of the run's key for it."""
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    run = saved(tmp_path / "run", b"right")
    store.upload(run, STEP, Job(10.0))
    here, other = (tmp_path / f"bucket/run-1/step-{step:08d}" for step in (STEP, STEP + 1))
    (run.path(STEP) / ".metadata").write_bytes(b"older")
    here.rename(other)
    store.upload(run, STEP, Job(10.0))
    theirs = json.loads((other / SEAL).read_bytes())
    seal = json.loads((here / SEAL).read_bytes()) | {"files": theirs["files"]}
    (here / SEAL).write_bytes(json.dumps(seal).encode())
    (here / ".metadata").write_bytes((other / ".metadata").read_bytes())
    with pytest.raises(StorageFailure, match="this run's key does not vouch for step 100"):
        store.fetch(STEP, CheckpointDirectory(tmp_path / "back"), Job(10.0))


def test_no_more_is_fetched_than_was_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object that somebody has made longer, and none of it stays on the disk."""
    store = ObjectStore(f"file://{tmp_path}/bucket", "run-1", SECRET)
    store.upload(saved(tmp_path / "run", b"right"), STEP, Job(10.0))
    with (tmp_path / f"bucket/run-1/step-{STEP:08d}/.metadata").open("ab") as file:
        file.truncate(1 << 32)  # 4 GiB, of which the disk has 5 bytes
    job = Job(10.0)
    with pytest.raises(StorageFailure, match="longer than what was uploaded"):
        store.fetch(STEP, CheckpointDirectory(tmp_path / "back"), job)
    assert job.bytes < 1000
