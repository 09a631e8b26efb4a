"""The directory of checkpoints: its format, damage, retention, failing storage; and what the agent hears."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import jurymast
from jurymast.checkpoint.directory import MANIFEST, VERIFIED, CheckpointDirectory, final_name
from jurymast.errors import CheckpointError
from jurymast.rundir import RunDirectory
from jurymast.worker import link
from support.checkpoints import Holder, flip, same, truncate
from support.hanging import hanging
from support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]


def weights(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value)}


def save_steps(directory: Path, *steps: int, keep: int = 9) -> None:
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=directory, keep=keep)
    for step in steps:
        state["weight"].fill_(float(step))
        assert checkpoint.save(step)


def test_a_step_is_a_stock_directory_that_only_its_owner_reads(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    net = nn.Linear(3, 2)
    jurymast.Checkpointer({"net": net, "epoch": 4}, directory=directory).save(123)
    path = directory / "step-00000123"
    assert sorted(os.listdir(directory)) == ["owner.json", path.name]
    assert {file.name for file in path.iterdir()} == {".metadata", "__0_0.distcp", MANIFEST}
    assert {oct(p.stat().st_mode & 0o777) for p in (directory, path)} == {"0o700"}
    assert {oct(p.stat().st_mode & 0o777) for p in path.iterdir()} == {"0o600"}
    stock: dict[str, Any] = {"net": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "epoch": 0}
    dcp.load(stock, checkpoint_id=path)
    assert same(stock, {"net": dict(net.state_dict()), "epoch": 4})
    manifest = CheckpointDirectory(directory).manifest(123)
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.torch) == (
        123,
        0,
        1,
        torch.__version__,
    )
    assert CheckpointDirectory(directory).check_files(123, manifest.files) == []
    assert sorted(file.name for file in manifest.files) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", MANIFEST])
def test_a_damaged_checkpoint_is_passed_over_and_kept(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / final_name(3) / name)
    before = {path.name: path.read_bytes() for path in (tmp_path / final_name(3)).iterdir()}
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, keep=1)
    assert checkpoint.restore() == 2
    assert same(state, weights(2.0))
    assert "step 3: " in caplog.text
    # from now on it does not count for those either who look at names and sizes only
    directory = CheckpointDirectory(tmp_path)
    assert (directory.complete(), directory.retire(keep=2)) == ([2, 1], [])
    assert directory.marked(2)[0] is not None
    # a new one of that step takes its place, and the damaged one stays as it is
    assert checkpoint.save(3)
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 3
    assert same(state, weights(2.0))
    (aside,) = tmp_path.glob("step-00000003.damaged-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before


def test_none_readable_is_an_error_that_names_each(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / final_name(1) / "__0_0.distcp")
    truncate(tmp_path / final_name(2) / "__0_0.distcp")
    (tmp_path / final_name(3) / MANIFEST).unlink()
    state = weights(7.0)
    with pytest.raises(CheckpointError) as caught:
        jurymast.Checkpointer(state, directory=tmp_path).restore()
    text = str(caught.value)
    assert "step 1: __0_0.distcp is corrupt" in text
    assert "step 2: __0_0.distcp has " in text
    assert f"step 3: it has no {MANIFEST}" in text
    assert same(state, weights(7.0))
    assert len(CheckpointDirectory(tmp_path).steps()) == 3


def test_a_verified_step_is_never_written_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    inode = (tmp_path / final_name(5)).stat().st_ino
    state = weights(9.0)
    assert jurymast.Checkpointer(state, directory=tmp_path).save(5)
    assert (tmp_path / final_name(5)).stat().st_ino == inode
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 5
    assert same(state, weights(5.0))


def test_retention_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert CheckpointDirectory(tmp_path).complete() == [5, 4]
    flip(tmp_path / final_name(5) / "__0_0.distcp")
    state = weights(0.0)
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, keep=1)
    assert checkpoint.restore() == 4
    # 5 is known to be bad: it must not count as the one to keep
    (tmp_path / final_name(4)).rename(tmp_path / final_name(2))
    manifest = tmp_path / final_name(2) / MANIFEST
    manifest.unlink()
    assert checkpoint.save(3)
    assert set(CheckpointDirectory(tmp_path).steps()) == {5, 3, 2}
    assert jurymast.Checkpointer(state, directory=tmp_path).restore() == 3


def test_leftovers_of_earlier_attempts_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)
    for name in (
        ".saving-00000002.a0002.0a1b2c3d",
        ".saving-00000003.a0004.0a1b2c3d",
        ".deleting-00000000.ff00ff00",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".saving-notes").write_text("a user's own")
    monkeypatch.setenv("JURYMAST_ATTEMPT", "3")
    assert jurymast.Checkpointer(weights(0.0), directory=tmp_path).restore() == 1
    wait_until("the deletion", lambda: not list(tmp_path.glob(".deleting-*")))
    # attempt 4 is newer than we are
    assert {p.name for p in tmp_path.iterdir()} == {
        ".saving-00000003.a0004.0a1b2c3d",
        ".saving-notes",
        "owner.json",
        VERIFIED,
        final_name(1),
    }


def test_what_cannot_be_deleted_yet_holds_no_restore_up(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    left = tmp_path / ".saving-00000002.a0000.0a1b2c3d"
    left.mkdir()
    restored: list[int] = []
    with hanging(left):
        restore = jurymast.Checkpointer(weights(0.0), directory=tmp_path).restore
        rank = threading.Thread(target=lambda: restored.append(restore()), daemon=True)
        rank.start()
        rank.join(240)
        assert restored == [1]
        assert not left.exists()
        assert list(tmp_path.glob(".deleting-*"))
    wait_until("the deletion", lambda: not list(tmp_path.glob(".deleting-*")))


def test_a_stale_attempt_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(run.root))
    monkeypatch.setenv("JURYMAST_ATTEMPT", "2")
    run.attempt_file.write_text("2\n")
    checkpoint = jurymast.Checkpointer(weights(1.0))
    assert checkpoint.save(1)
    run.attempt_file.write_text("3\n")
    assert not checkpoint.save(2)
    assert sorted(os.listdir(run.checkpoints)) == ["owner.json", final_name(1)]
    assert "attempt 2 is stale: attempt 3 has started" in caplog.text
    assert CheckpointDirectory(run.checkpoints).manifest(1).attempt == 2


def test_an_attempt_that_cannot_tell_whether_it_is_the_newest_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(run.root))
    monkeypatch.setenv("JURYMAST_ATTEMPT", "2")
    run.attempt_file.mkdir()  # reading it fails
    checkpoint = jurymast.Checkpointer(weights(1.0))
    assert not checkpoint.save(1)
    assert CheckpointDirectory(run.checkpoints).steps() == []
    assert "cannot find out whether a newer attempt has started" in caplog.text
    run.attempt_file.rmdir()
    run.attempt_file.write_text("2\n")
    assert checkpoint.save(2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_the_checkpoint_not_the_training(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.ones(60_000)}
    directory = small_disk / "checkpoints"
    checkpoint = jurymast.Checkpointer(state, directory=directory, every=1)
    checkpoint.step(1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(650_000))
    for step in (2, 3):
        checkpoint.step(step)
        assert sorted(os.listdir(directory)) == ["owner.json", final_name(1)]
    assert "step 2 was not saved (shared tier): rank 0: " in caplog.text
    assert "No space left on device" in caplog.text
    filler.unlink()
    checkpoint.step(4)
    assert jurymast.Checkpointer(state, directory=directory).restore() == 4


def test_a_read_only_disk_costs_the_checkpoint_not_the_training(small_disk: Path) -> None:
    state = weights(1.0)
    checkpoint = jurymast.Checkpointer(state, directory=small_disk, every=1)
    checkpoint.step(1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    checkpoint.step(2)
    assert not checkpoint.save(3)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    checkpoint.step(4)
    assert CheckpointDirectory(small_disk).complete() == [4, 1]


# ---- under jurymast


class Agent:
    """The other end of a rank's link: a page of slots and a pipe, as the agent makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory = os.memfd_create("page")
        os.ftruncate(self._memory, mmap.PAGESIZE)
        self._page = mmap.mmap(self._memory, mmap.PAGESIZE)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        monkeypatch.setenv(link.PAGE_VARIABLE, f"/proc/self/fd/{self._memory}")
        monkeypatch.setenv(link.EVENTS_VARIABLE, f"/proc/self/fd/{self._writer}")
        monkeypatch.setenv("LOCAL_RANK", "0")

    def slot(self) -> link.RankBeat:
        return link.read_slot(self._page, 0)

    def events(self) -> list[dict[str, Any]]:
        """What the rank told of its saves and restores; when it wants to save is another matter."""
        told = [json.loads(line) for line in os.read(self._reader, 1 << 16).splitlines()]
        return [event for event in told if event["event"] != "Cadence"]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)
        os.close(self._memory)
        self._page.close()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(monkeypatch)
    yield agent
    agent.close()


def test_the_agent_hears_of_steps_saves_and_restores(tmp_path: Path, agent: Agent) -> None:
    phases = []

    class Spy(Holder):
        def state_dict(self) -> dict[str, Any]:
            phases.append(agent.slot().phase)
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            phases.append(agent.slot().phase)
            super().load_state_dict(state)

    checkpoint = jurymast.Checkpointer({"it": Spy(1), "t": torch.ones(5)}, directory=tmp_path, every=10)
    assert checkpoint.restore() == 0
    assert (agent.slot().step, agent.slot().beats, agent.slot().phase) == (0, 0, "starting")
    for step in range(1, 11):
        checkpoint.step(step)
    assert (agent.slot().step, agent.slot().beats, agent.slot().phase) == (10, 10, "stepping")
    again = jurymast.Checkpointer({"it": Spy(), "t": torch.zeros(5)}, directory=tmp_path)
    assert again.restore() == 10
    assert (agent.slot().step, agent.slot().beats) == (10, 10)
    assert phases == ["saving", "restoring"]
    fresh, place, kept, saved, restored = agent.events()
    assert (place["event"], place["directory"]) == ("SavesTo", str(tmp_path))
    assert (kept["event"], kept["directory"], kept["keep"]) == ("CheckpointsKept", str(tmp_path), 3)
    assert (fresh["event"], fresh["step"], fresh["skipped"]) == ("Restored", 0, [])
    assert (saved["event"], saved["step"], saved["tier"], saved["ok"]) == ("Saved", 10, "shared", True)
    assert (saved["error"], saved["stall_s"] > 0) == ("", True)
    size = sum(file.stat().st_size for file in (tmp_path / final_name(10)).iterdir() if file.name != MANIFEST)
    assert saved["size_bytes"] == restored["size_bytes"] == size
    assert (restored["event"], restored["step"], restored["tier"]) == ("Restored", 10, "shared")


def test_a_failed_save_is_an_event_and_is_tried_again(tmp_path: Path, agent: Agent) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("where the directory should be")
    checkpoint = jurymast.Checkpointer(weights(1.0), directory=blocked / "checkpoints", every=1)
    checkpoint.step(1)
    *_, event = agent.events()
    assert (event["event"], event["step"], event["ok"]) == ("Saved", 1, False)
    assert event["error"].startswith("NotADirectoryError: ")
    assert "\n" not in event["error"]
    assert agent.slot().phase == "stepping"
    blocked.unlink()
    checkpoint.step(2)
    assert [(e["step"], e["ok"]) for e in agent.events()] == [(2, True)]


def test_where_and_when_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def saved_steps(**options: Any) -> list[int]:
        checkpoint = jurymast.Checkpointer(weights(1.0), **options)
        for step in range(1, 10):
            checkpoint.step(step)
        steps = CheckpointDirectory(checkpoint._directory).steps()
        shutil.rmtree(checkpoint._directory, ignore_errors=True)
        return steps

    assert saved_steps() == []
    monkeypatch.setenv("JURYMAST_CADENCE_STEPS", "2")
    assert saved_steps() == [8, 6, 4]
    monkeypatch.setenv("JURYMAST_KEEP", "1")
    assert saved_steps() == [8]
    assert saved_steps(every="3 steps", keep=5) == [9, 6, 3]
    monkeypatch.delenv("JURYMAST_CADENCE_STEPS")
    monkeypatch.setenv("JURYMAST_CADENCE_S", "1e-9")
    assert saved_steps() == [9]
    monkeypatch.setenv("JURYMAST_CHECKPOINTS", str(tmp_path / "elsewhere"))
    assert jurymast.Checkpointer(weights(1.0))._directory == tmp_path / "elsewhere"
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(tmp_path / "run"))
    assert jurymast.Checkpointer(weights(1.0))._directory == tmp_path / "run" / "checkpoints"
    for options in ({"every": "often"}, {"every": 0}, {"keep": 0}):
        with pytest.raises(CheckpointError):
            jurymast.Checkpointer(weights(1.0), **options)


def test_several_ranks_without_a_process_group_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="no process group"):
        jurymast.Checkpointer(weights(1.0), directory=tmp_path).restore()


def of_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, attempt: int = 1) -> RunDirectory:
    """From now on this process is a rank of that run."""
    run = RunDirectory(folder / name)
    if not run.root.exists():
        run.create()
    run.attempt_file.write_text(str(attempt))
    monkeypatch.setenv("JURYMAST_RUN", name)
    monkeypatch.setenv("JURYMAST_RUN_DIR", str(run.root))
    monkeypatch.setenv("JURYMAST_ATTEMPT", str(attempt))
    return run


def test_two_runs_do_not_save_to_one_directory_but_one_may_start_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = tmp_path / "common"
    first = of_run("first", tmp_path, monkeypatch)
    assert jurymast.Checkpointer(weights(1.0), directory=common).save(1)
    being_saved = CheckpointDirectory(common).begin(2, 1)

    of_run("second", tmp_path, monkeypatch, attempt=7)
    tuned = weights(0.0)
    theirs = jurymast.Checkpointer(tuned, directory=common)
    assert theirs.restore() == 1
    assert tuned["weight"][0] == 1.0
    assert being_saved.is_dir()  # it is the other's, whatever its attempt
    match = r"run first .*, which may not have ended, saves to .*: run second"
    with pytest.raises(CheckpointError, match=match):
        theirs.save(3)
    assert jurymast.Checkpointer(tuned, directory=tmp_path / "own").save(3)

    of_run("first", tmp_path, monkeypatch, attempt=2)  # after a requeue, say
    again = jurymast.Checkpointer(weights(0.0), directory=common)
    assert again.restore() == 1
    assert not being_saved.exists()
    assert again.save(4)

    first.outcome_file.write_text('{"state": "failed", "exit_code": 1}')
    of_run("second", tmp_path, monkeypatch, attempt=8)
    assert jurymast.Checkpointer(weights(2.0), directory=common).save(5)
    of_run("first", tmp_path, monkeypatch, attempt=3)
    with pytest.raises(CheckpointError, match=r"run second .*, which may not have ended, saves to"):
        jurymast.Checkpointer(weights(0.0), directory=common).save(6)
