"""What somebody else has put into a bucket: it names no file outside of a checkpoint, and fills no memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from jurymast.checkpoint.directory import MANIFEST, BadCheckpoint, CheckpointDirectory, FileRecord, Manifest
from jurymast.storage import object_store
from jurymast.storage.job import Job, StorageFailure
from jurymast.storage.object_store import ObjectStore

STEP = 100
LOOT = b"ssh-ed25519 AAAA mallory"


def bucket(folder: Path, manifest: bytes) -> ObjectStore:
    """With a step that has this manifest, and nothing else."""
    place = folder / f"bucket/run-1/step-{STEP:08d}"
    place.mkdir(parents=True)
    (place / MANIFEST).write_bytes(manifest)
    return ObjectStore(f"file://{folder}/bucket", "run-1")


OUTSIDE = "OUTSIDE"


@pytest.mark.parametrize(
    "name", [OUTSIDE, "../../../../.bashrc", "a/b", "..", ".", "", MANIFEST, "a\x00", "a\x1b"]
)
def test_no_file_outside_of_the_checkpoint_is_written(tmp_path: Path, name: str) -> None:
    """All hashes fit: whoever can write to the bucket makes them."""
    outside = tmp_path / "home/.bashrc"
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/.bashrc").write_bytes(LOOT)
    name = str(outside) if name == OUTSIDE else name
    record = FileRecord(name, len(LOOT), xxhash.xxh3_64_hexdigest(LOOT))
    store = bucket(tmp_path, Manifest(STEP, 1, 1, "2.13.0", (record,)).to_bytes())
    checkpoints = CheckpointDirectory(tmp_path / "home/runs/run-1/checkpoints")
    with pytest.raises(StorageFailure, match="names a file that is none of a checkpoint's"):
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
    values = json.loads(Manifest(STEP, 1, 1, "2.13.0", ()).to_bytes())
    del values["manifest_xxh3_64"]
    values |= change
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["manifest_xxh3_64"] = xxhash.xxh3_64_hexdigest(text.encode())
    with pytest.raises(BadCheckpoint):
        Manifest.from_bytes(json.dumps(values).encode())


def test_a_manifest_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MANIFEST_BYTES_MAX", 1000)
    with pytest.raises(StorageFailure, match="has 1001 bytes, most is 1000"):
        bucket(tmp_path, b" " * 1001).manifest(STEP)
