"""What a power cut leaves of a directory of checkpoints, at each moment of each change of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from jurymast import Checkpointer
from jurymast.checkpoint import directory
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
)
from jurymast.checkpoint.owner import Owner, claim, owner
from jurymast.core.state.messages import WritePhase
from jurymast.keeper.copies import StoredCopy, local_copies
from jurymast.keeper.manifest import blocks_of, is_intact
from jurymast.rundir import RunDirectory
from jurymast.storage import local, shared
from jurymast.storage.export import export
from jurymast.storage.object_store import ObjectStore
from jurymast.storage.orders import Continue, Job
from support.images import simple_images, to_local, to_shared
from support.stories import Story

CALLS = ("rename", "fsync", "mkdir", "rmdir", "unlink")


@dataclass
class Disk:
    """What of the tree below `root` is on disk: contents and names that were synced. Of names that were not,
    a journal may have brought all to disk already, or none (`names_last`)."""

    root: Path
    names_last: bool
    contents: dict[int, bytes] = field(default_factory=dict)  # by inode
    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)  # by inode of the directory

    def synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self.names[status.st_ino] = _names(path)
        else:
            self.contents[status.st_ino] = path.read_bytes()

    def after_a_cut(self, target: Path) -> Path:
        shutil.rmtree(target, ignore_errors=True)
        self._restore(self.root, self.root.stat().st_ino, target)
        return target

    def _restore(self, place: Path | None, inode: int, target: Path) -> None:
        target.mkdir()
        live = _names(place) if place is not None and place.is_dir() else {}
        names = live if self.names_last else self.names.get(inode, {})
        for name, (of, is_directory) in names.items():
            there = place / name if place is not None and live.get(name, (0,))[0] == of else None
            if is_directory:
                self._restore(there, of, target / name)
            else:
                (target / name).write_bytes(self.contents.get(of, b""))


def _names(path: Path) -> dict[str, tuple[int, bool]]:
    return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}


@contextmanager
def cut_everywhere(root: Path, target: Path, check: Callable[[Path], object]) -> Iterator[list[str]]:
    """After each call that changes the tree, check what a power cut at that moment would leave."""
    disks = [Disk(root, names_last=False), Disk(root, names_last=True)]
    cuts: list[str] = []

    def followed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def follow(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            for disk in disks:
                if name == "fsync":
                    disk.synced(arguments[0])
                with mock.patch.multiple(os, **calls):
                    check(disk.after_a_cut(target))
            cuts.append(name)
            return result

        return follow

    calls = {name: getattr(os, name) for name in CALLS}
    with ExitStack() as patches:
        for name, call in calls.items():
            patches.enter_context(mock.patch.object(os, name, followed(name, call)))
        yield cuts


def save(directory: CheckpointDirectory, step: int) -> None:
    place = directory.begin(step, 1)
    with NewFile(place / "data") as file:
        file.write(b"%d" % step)
    record = FileRecord("data", file.size, file.hexdigest)
    directory.seal(place, CheckpointManifest(step, 1, 1, "2.13.0", (record,), run=directory.run))
    directory.publish(place, step)


def whole_after(cut: Path) -> list[int]:
    """The steps that would be restored; whichever it is, all of it is right."""
    found = CheckpointDirectory(cut / "shared/checkpoints", "run", patience_s=0.0)
    steps = found.complete()
    for step in steps:
        assert found.check_files(step, found.manifest(step).files) == []
    return steps


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_a_step_is_whole_or_absent_and_stays_once_it_is_published(root: Path, tmp_path: Path) -> None:
    directory = CheckpointDirectory(root / "shared/checkpoints", "run")
    published: list[int] = []

    def check(cut: Path) -> None:
        assert set(whole_after(cut)) >= set(published)

    with cut_everywhere(root, tmp_path / "cut", check) as cuts:
        for step in (1, 2):
            save(directory, step)
            published.append(step)
            check(tmp_path / "cut")
    assert cuts.count("fsync") >= 8


def test_retention_leaves_the_newest_whole_and_no_half_of_an_older_one(root: Path, tmp_path: Path) -> None:
    directory = CheckpointDirectory(root / "shared/checkpoints", "run")

    def check(cut: Path) -> None:
        if ready:
            assert whole_after(cut)[0] == 3

    ready: list[bool] = []
    with cut_everywhere(root, tmp_path / "cut", check):
        for step in (1, 2, 3):
            save(directory, step)
        ready.append(True)
        for gone in directory.retire(1):
            with pytest.raises(BadCheckpoint):
                directory.manifest(int(gone.name.split("-")[1].split(".")[0]))
            shutil.rmtree(gone)
    assert directory.complete() == [3]


def test_a_claim_a_pin_and_a_rollback_outlive_the_cut_that_follows_them(root: Path, tmp_path: Path) -> None:
    directory = CheckpointDirectory(root / "shared/checkpoints", "run")
    done: list[str] = []

    def check(cut: Path) -> None:
        there = CheckpointDirectory(cut / "shared/checkpoints", "run", patience_s=0.0)
        if "claim" in done:
            found = owner(there.root)
            assert found is not None
            assert found.run == "run"
        if "pin" in done:
            assert there.pinned() == {1}
        if "rollback" in done:
            assert there.void(2, 1)
            assert there.complete() == [1]
        whole_after(cut)

    with cut_everywhere(root, tmp_path / "cut", check):
        claim(directory.root, Owner("run", str(tmp_path)))
        done.append("claim")
        save(directory, 1)
        save(directory, 2)
        directory.pin(1)
        done.append("pin")
        directory.rollback(1, attempt=1)
        done.append("rollback")
        check(tmp_path / "cut")


def test_the_model_of_a_cut_shows_a_rename_that_came_before_the_contents(root: Path, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def check(cut: Path) -> None:
        seen.extend(path.read_bytes() for path in cut.glob("file"))

    with cut_everywhere(root, tmp_path / "cut", check):
        (root / "new").write_bytes(b"content")
        os.rename(root / "new", root / "file")
    assert seen == [b""]


def test_an_image_on_a_node_s_own_disk_is_whole_or_absent_and_stays_once_it_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first one on a new disk."""
    monkeypatch.setattr("jurymast.keeper.copies.PATIENCE_S", 0.0)
    written: list[int] = []

    def check(cut: Path) -> None:
        found: list[StoredCopy] = []
        with suppress(OSError):  # nothing is there
            found = local_copies(cut / "disk/jurymast-0/run")
        assert {one.manifest.step for one in found} >= set(written)
        for one in found:
            data = memoryview(Path(one.path).read_bytes())
            assert all(is_intact(data, block) for block in blocks_of(one.manifest))

    place = root / "disk/jurymast-0/run"
    with cut_everywhere(root, tmp_path / "cut", check):
        for step in (1, 2):
            images = simple_images(tmp_path / "images", step=step)
            local.write(to_local(place, images, step=step), Job(100.0))
            written.append(step)
            check(tmp_path / "cut")
    assert len(local_copies(place)) == 2


def test_a_step_that_agents_write_is_whole_or_absent_and_stays_once_it_is_published(
    root: Path, tmp_path: Path
) -> None:
    published: list[int] = []

    def check(cut: Path) -> None:
        assert set(whole_after(cut)) >= set(published)

    with cut_everywhere(root, tmp_path / "cut", check) as cuts:
        for step in (1, 2):
            images = simple_images(tmp_path / "images", step=step)
            job = Job(100.0)
            for phase in WritePhase:  # nobody else writes
                job.go_on(Continue(id=0, phase=phase, parts=(0,)))
            place, run = root / "shared/checkpoints", tmp_path / "run"
            run.mkdir(exist_ok=True)
            order = to_shared(place, images, world=1, lead=True, step=step)
            order = msgspec.structs.replace(order, run="run", run_directory=str(run))
            assert shared.write(order, job).published
            published.append(step)
            check(tmp_path / "cut")
    assert cuts.count("fsync") >= 8


def test_a_step_that_ranks_write_is_whole_or_absent_and_stays_once_it_is_saved(
    root: Path, tmp_path: Path
) -> None:
    saved: list[int] = []

    def check(cut: Path) -> None:
        assert set(whole_after(cut)) >= set(saved)

    with cut_everywhere(root, tmp_path / "cut", check) as cuts:
        model = torch.nn.Linear(4, 4)
        training = Checkpointer({"model": model}, directory=root / "shared/checkpoints", every=1_000_000)
        training.restore()
        for step in (1, 2):
            assert training.save(step)
            saved.append(step)
            check(tmp_path / "cut")
    assert cuts.count("fsync") >= 8


def test_an_exported_file_stays_once_it_is_there(root: Path, tmp_path: Path) -> None:
    training = Checkpointer({"model": torch.nn.Linear(4, 4)}, directory=tmp_path / "from", every=1_000_000)
    training.restore()
    assert training.save(1)
    exported: list[bytes] = []

    def check(cut: Path) -> None:
        if exported:
            assert (cut / "model.pt").read_bytes() == exported[0]

    with cut_everywhere(root, tmp_path / "cut", check):
        export(CheckpointDirectory(tmp_path / "from").path(1), root / "model.pt", "torch")
        exported.append((root / "model.pt").read_bytes())
        (root / "anything").mkdir()


def test_a_step_that_is_fetched_stays_once_it_is_published(root: Path, tmp_path: Path) -> None:
    """Into a directory that there is not yet; whoever fetches it may remove the object then."""
    directory = CheckpointDirectory(tmp_path / "run", "run")
    save(directory, 1)
    store = ObjectStore(f"file://{tmp_path}/bucket", "run", b"k" * 32)
    store.upload(directory, 1, Job(100.0))
    fetched: list[int] = []

    def check(cut: Path) -> None:
        assert set(whole_after(cut)) >= set(fetched)

    with cut_everywhere(root, tmp_path / "cut", check):
        store.fetch(1, CheckpointDirectory(root / "shared/checkpoints", "run"), Job(100.0))
        fetched.append(1)
        (root / "anything").mkdir()


def test_a_run_that_is_about_to_be_submitted_outlives_the_cut(root: Path, tmp_path: Path) -> None:
    """Slurm has its job by then, which finds nothing otherwise."""
    plan = Story().plan
    ready: list[str] = []

    def check(cut: Path) -> None:
        if ready:
            there = RunDirectory(cut / "runs/run")
            assert there.plan() == plan
            assert there.secret_file.read_bytes() == run.secret_file.read_bytes()
            assert all(place.is_dir() for place in (there.epochs, there.journal, there.logs))

    with cut_everywhere(root, tmp_path / "cut", check):
        run = RunDirectory(root / "runs/run")
        run.create()
        run.save_plan(plan)
        ready.append("ready")
        (root / "anything").mkdir()


@pytest.mark.parametrize(("pieces", "asks"), [(2, False), (1, False), (1, True)])
def test_what_the_disk_refuses_while_more_is_written_fails_the_file(
    root: Path, monkeypatch: pytest.MonkeyPatch, pieces: int, asks: bool
) -> None:
    """The kernel tells of it once: to the sync in the background, and no later one."""
    asked = []

    def refused(descriptor: int) -> None:
        asked.append(descriptor)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write() -> None:
        with NewFile(root / "file") as file:
            for _ in range(pieces):
                file.write(b"bytes")
            if asks:
                os.fsync(file.fileno())

    monkeypatch.setattr(directory, "SYNC_BYTES", 2)
    monkeypatch.setattr(os, "fdatasync", refused)
    with pytest.raises(OSError, match="Input/output error"):
        write()
