"""Who writes what of a checkpoint; pins, rollbacks and marks of the shared directory."""

from __future__ import annotations

import errno
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jurymast.checkpoint.contents import Contents, Described, Item
from jurymast.checkpoint.directory import (
    ROLLBACK,
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    hash_file,
)
from jurymast.checkpoint.layout import Layout, decide
from jurymast.core.checkpoints.commit import superfluous
from jurymast.keeper import manifest as keeper
from jurymast.keeper.manifest import BLOCK_BYTES, BadImage
from jurymast.storage.local import ImageSource, merged
from jurymast.storage.orders import DamagedImage, StorageFailure, explain
from jurymast.storage.shared import ranges


def tensor(name: str, length: int, *, at: int = 0, **more: Any) -> Item:
    shape = more.pop("shape", (length,))
    more = {"offsets": (0,) * len(shape), "sizes": shape, **more}
    return Item(name, tuple(name.split(".")), at, length, "uint8", shape, raw=at, **more)


def packed(common: list[Item], own: list[Item], fill: int = 1, **more: Any) -> Described:
    """An image with these items back to back, hashed as if its bytes were `fill`."""
    items, at, common_bytes = [], 0, 0
    for number, item in enumerate([*common, *own]):
        if number == len(common):
            common_bytes = at
        raw = at if item.is_tensor else -1
        items.append(msgspec.structs.replace(item, at=at, raw=raw))
        at += item.length
    common_bytes = common_bytes if own else at
    contents = Contents(more.pop("entries", {}), tuple(items))
    values = {"step": 1, "attempt": 1, "rank": 0, "world": 1, **more}
    found = keeper.Manifest(torch="2.13.0", size_bytes=at, common_bytes=common_bytes, **values)
    return Described(found.with_blocks(memoryview(bytes([fill]) * at)), contents)


def decided(*images: Described) -> Layout:
    return decide(dict(enumerate(images)))


def written(layout: Layout) -> dict[int, list[str]]:
    return {
        rank: sorted(layout.images[rank].items[number].name for number in numbers)
        for rank, numbers in layout.writes.items()
    }


def test_replicas_are_spread_by_size() -> None:
    common = [tensor("m.a", 600), tensor("m.b", 500), tensor("m.c", 400), tensor("m.d", 100)]
    layout = decided(*(packed(common, [], rank=rank, entries={"m": {}}) for rank in range(3)))
    assert written(layout) == {0: ["m.a"], 1: ["m.b"], 2: ["m.c", "m.d"]}
    offsets = {one.item.name: (one.file, one.offset) for one in layout.stored()}
    assert offsets["m.d"] == ("__2_0.distcp", 400)


def test_replicas_that_differ_are_not_mixed() -> None:
    common = [tensor("m.a", 600), tensor("m.b", 500)]
    layout = decided(packed(common, [], fill=1), packed(common, [], fill=2, rank=1))
    assert written(layout) == {0: ["m.a", "m.b"], 1: []}


def test_of_other_copies_the_lowest_ranks_is_taken() -> None:
    chunks = [
        tensor("m.t", 5, shape=(10,), offsets=(5 * half,), sizes=(5,)) for half in (0, 1)
    ]  # two ways sharded, twice replicated
    manifests = [
        packed([], [chunks[rank % 2], Item("m.v", ("m", "v"), 0, 3)], rank=rank) for rank in range(4)
    ]
    assert written(decided(*manifests)) == {0: ["m.t", "m.v"], 1: ["m.t"], 2: [], 3: []}


def test_entries_that_differ_are_written_by_each_rank() -> None:
    items = [Item("data.at", ("data", "at"), 0, 3), Item("epoch", ("epoch",), 0, 4)]
    manifests = [
        packed([], items, rank=rank, entries={"data": {"kind": "stateful", "digest": str(rank)},
                                              "epoch": {"kind": "value", "digest": "1"}})
        for rank in range(2)
    ]  # fmt: skip
    layout = decided(*manifests)
    assert [(one.item.name, one.item.path, one.file) for one in layout.stored()] == [
        ("data.rank-00000.at", ("data", "rank-00000", "at"), "__0_0.distcp"),
        ("epoch", ("epoch",), "__0_0.distcp"),
        ("data.rank-00001.at", ("data", "rank-00001", "at"), "__1_0.distcp"),
    ]
    assert layout.entries == {
        "data": {"kind": "stateful", "per_rank": True},
        "epoch": {"kind": "value", "per_rank": False},
    }


def test_empty_chunks_are_left_out_and_empty_tensors_are_not() -> None:
    full = tensor("m.t", 5, shape=(5,))
    nothing = tensor("m.t", 0, shape=(5,), offsets=(5,), sizes=(0,))
    empty = tensor("m.e", 2, shape=(0,))
    layout = decided(packed([], [full, empty]), packed([], [nothing, empty], rank=1))
    assert written(layout) == {0: ["m.e", "m.t"], 1: []}


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (tensor("m.t", 5), tensor("m.t", 6), r"ranks 0 and 1 do not agree on m.t: .*\[5\] and uint8\[6\]"),
        (tensor("m.t", 5), Item("m.t", ("m", "t"), 0, 5), "do not agree on m.t: .*uint8.* and not a tensor"),
        (
            tensor("m.t", 5, shape=(12,), offsets=(0,), sizes=(5,)),
            tensor("m.t", 5, shape=(12,), offsets=(6,), sizes=(5,)),
            "m.t, of which rank 0 has a part, has 10 of 12 elements",
        ),
        (
            tensor("m.t", 5, shape=(10,), offsets=(0,), sizes=(5,)),
            tensor("m.t", 5, shape=(10,), offsets=(7,), sizes=(5,)),
            "rank 1 has a part of m.t outside its shape",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(mine: Item, theirs: Item, why: str) -> None:
    with pytest.raises(BadImage, match=why):
        decided(packed([], [mine]), packed([], [theirs], rank=1))


def test_a_sharded_entry_that_differs_is_refused() -> None:
    part = tensor("data.t", 5, shape=(10,), offsets=(0,), sizes=(5,))
    manifests = [packed([], [part], rank=rank, entries={"data": {"digest": str(rank)}}) for rank in range(2)]
    with pytest.raises(BadImage, match="the entry 'data' differs between ranks and has sharded tensors"):
        decided(*manifests)


def test_padding_goes_with_its_item() -> None:
    items = (tensor("m.a", 60, at=0), tensor("m.b", 10, at=64), tensor("m.c", 5, at=128))
    manifest = keeper.Manifest(1, 1, 0, 1, "2.13.0", 1000, 0, 192)
    image = Described(manifest, Contents({}, items))
    assert ranges(image, [0, 1]) == [(0, 128)]
    assert ranges(image, [0, 2]) == [(0, 64), (128, 192)], "not the contents"
    assert merged([(0, 1), (1, 2), (4, 4), (5, 6)]) == [(0, 2), (5, 6)]


def test_only_the_blocks_that_are_needed_are_read_and_checked(tmp_path: Path) -> None:
    size = 2 * BLOCK_BYTES + 100
    data = bytearray(os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
    common = BLOCK_BYTES // 2
    manifest = keeper.Manifest(1, 1, 0, 1, "2.13.0", size, common).with_blocks(memoryview(data))
    wanted = [(3, common - 1), (common + 5, common + 9), (common + BLOCK_BYTES - 7, size)]
    (tmp_path / "image").write_bytes(data)
    with closing(ImageSource(str(tmp_path / "image"), manifest)) as source:
        assert b"".join(source.read(wanted)) == b"".join(data[start:end] for start, end in wanted)
        assert list(source.read([])) == []
    data[-1] ^= 1
    (tmp_path / "image").write_bytes(data)
    with closing(ImageSource(str(tmp_path / "image"), manifest)) as source:
        assert b"".join(source.read(wanted[:2])) == b"".join(data[start:end] for start, end in wanted[:2])
        with pytest.raises(DamagedImage, match="block 1 of its own part") as caught:
            list(source.read(wanted))
        assert caught.value.rank == manifest.rank
    os.truncate(tmp_path / "image", size - 1)
    with pytest.raises(StorageFailure, match="the image of rank 0 has more"):
        ImageSource(str(tmp_path / "image"), manifest)


def test_an_image_whose_parts_lie_in_two_files_is_read_from_both(tmp_path: Path) -> None:
    common, size = 1000, 3000
    data, own, other = os.urandom(size), tmp_path / "own", tmp_path / "other"
    manifest = keeper.Manifest(1, 1, 0, 1, "2.13.0", size, common).with_blocks(memoryview(data))
    own.write_bytes(bytes(common) + data[common:])
    other.write_bytes(data[:common])
    with closing(ImageSource(str(own), manifest, str(other))) as source:
        assert b"".join(source.read([(0, size)])) == data
        assert b"".join(source.read([(900, 1100)])) == data[900:1100]
    other.write_bytes(bytes(common))
    with (
        closing(ImageSource(str(own), manifest, str(other))) as source,
        pytest.raises(DamagedImage, match="in .*/other is corrupt: block 0 of its common part"),
    ):
        list(source.read([(0, size)]))
    other.write_bytes(data[: common - 1])
    with pytest.raises(StorageFailure, match="the image of rank 0 has more"):
        ImageSource(str(own), manifest, str(other))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, r"no space left at /a/b \(.* free\): make room there"),
        (errno.EDQUOT, "the disk quota is used up at /a/b: make room there"),
        (errno.EROFS, "/a/b is on a read-only file system: remount it"),
        (errno.EACCES, "no permission for /a/b: check its owner and mode"),
        (errno.EIO, "Input/output error at /a/b: the storage is failing"),
        (errno.ENOTDIR, "Not a directory at /a/b"),
    ],
)
def test_what_storage_says_is_explained(number: int, why: str) -> None:
    assert re.match(why, explain(OSError(number, os.strerror(number)), "/a/b"))


# ---- the shared directory


def save(directory: CheckpointDirectory, step: int, attempt: int = 1) -> None:
    place = directory.begin(step, attempt)
    (place / "file").write_bytes(b"content")
    records = (FileRecord("file", *hash_file(place / "file")),)
    directory.seal(place, CheckpointManifest(step, attempt, 1, "2.13.0", records))
    directory.publish(place, step)


def test_the_newest_checkpoints_stay_and_pinned_and_damaged_ones() -> None:
    def gone(keep: int, *, pinned: tuple[int, ...] = (), bad: tuple[int, ...] = ()) -> list[int]:
        return superfluous([50, 40, 30, 20, 10], keep, set(pinned), set(bad))

    assert gone(3) == [20, 10]
    assert gone(0) == [40, 30, 20, 10], "one always stays"
    assert gone(2, pinned=(50, 20)) == [30, 10]
    assert gone(2, bad=(50, 10)) == [20]


def test_pinned_steps_stay(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        save(directory, step)
    directory.pin(2)
    assert directory.pinned() == {2}
    assert len(directory.retire(1)) == 2
    assert directory.steps() == [4, 2]
    assert directory.unpin(2)
    assert not directory.unpin(2)
    directory.retire(1)
    assert directory.steps() == [4]
    with pytest.raises(BadCheckpoint):
        directory.pin(1)
    assert directory.pinned() == set()


def test_what_was_rolled_back_does_not_come_back(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3):
        save(directory, step)
    directory.pin(3)
    renamed = directory.rollback(1, attempt=4)
    assert [name.partition(".")[0] for name in renamed] == ["step-00000003", "step-00000002"]
    assert sorted(path.name for path in directory.rolled_back()) == sorted(renamed)
    assert (directory.complete(), directory.pinned()) == ([1], set())
    # ranks of that attempt still save: void; the next attempt's count
    save(directory, 2, attempt=4)
    assert directory.complete() == [1]
    with pytest.raises(BadCheckpoint, match="it was rolled back"):
        directory.manifest(2)
    save(directory, 3, attempt=5)
    assert directory.complete() == [3, 1]
    assert [directory.void(step, attempt) for step, attempt in ((1, 1), (2, 4), (9, 3), (2, 5))] == [
        False,
        True,
        True,
        False,
    ]
    (tmp_path / ROLLBACK).write_text("{")
    with pytest.raises(BadCheckpoint, match=ROLLBACK):
        directory.void(1, 1)


def test_rolling_back_to_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 5)
    with pytest.raises(BadCheckpoint):
        directory.rollback(4, attempt=1)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_a_mark_of_verification_is_of_what_is_there_now(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 5)
    assert directory.marked(5)[0] is None
    directory.mark(5)
    assert directory.marked(5)[0] is not None
    directory.set_aside(5)
    save(directory, 5, attempt=2)
    assert directory.marked(5)[0] is None


def test_sweeping_what_is_half_written_leaves_everything_else(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    save(directory, 5)
    kept = {"step-00000005", ".saving-00000006.a0009.0a", ".writing-notes"}
    for name in (*kept, directory.writing(6, 9, "0b").name):
        (tmp_path / name).mkdir(exist_ok=True)
    # ranks that start sweep too, while the nodes write what an earlier attempt saved
    assert directory.sweep(attempt=8) == []
    assert directory.sweep_unfinished() == [".writing-00000006.a0009.0b"]
    assert set(os.listdir(tmp_path)) == kept
