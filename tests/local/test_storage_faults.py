"""Runs short of memory, or whose storage is full, over quota, down or hangs: the trainings go on."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support import s3_server
from support.cgroups import limit_file
from support.hanging import hanging
from support.runs import SCRIPTS, RunUnderTest, jurymast, local_run, result, wait_gone
from support.s3_server import S3Server

pytestmark = pytest.mark.torch

MIB = 1 << 20
Limited = tuple[Path, tuple[str, ...]]  # where there is no room, and the command that makes room
# An image of 2.7 MB
TRAIN = ("--width", "256", "--step-time", "0.05", "--save-every", "10 steps")


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)


def shown(run: RunUnderTest, word: str) -> list[str]:
    """Lines of what `status` shows."""
    lines = jurymast("status", str(run.directory.root)).stdout.splitlines()
    return [line for line in lines if word in line]


def saved_to(run: RunUnderTest) -> dict[str, int]:
    """How often ranks or agents saved to each tier."""
    tiers = [e.tier for e in run.events() if isinstance(e, ev.Saved) and e.ok]
    return {tier: tiers.count(tier) for tier in tiers}


# ---- memory


def test_a_node_without_memory_is_named_before_the_first_step(tmp_path: Path, memory_cgroup: Path) -> None:
    limit = limit_file(memory_cgroup)
    limit.write_text(str(514 * MIB))  # 512 MiB of it are the reserve
    gate, out = tmp_path / "gate", tmp_path / "out.json"
    os.mkfifo(gate)
    train = (str(gate), str(SCRIPTS / "train_tiny.py"), *TRAIN, "--steps", "100", "--out", str(out))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="gated.py",
                   arguments=train) as run:  # fmt: skip
        run.wait("both ranks", lambda s: len(s.started) == 2)
        poor = run.state().placement[1]
        (memory_cgroup / "cgroup.procs").write_text(str(run.agent_pid(poor)))
        opened = os.open(gate, os.O_RDWR)
        run.wait("a checkpoint", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
        assert shown(run, f"{poor}: checkpoints will take ")
        state = run.wait_end()
        os.close(opened)
        wait_gone(run.directory.root)
    assert (state.exit_code, state.incidents, result(out)["steps"]) == (0, [], 100), run.story()
    assert set(saved_to(run)) == {"shared"}
    assert state.saved["shared"].step == 100
    foreseen, refused = (e for e in run.events() if isinstance(e, ev.Noted))
    assert (foreseen.node, refused.node) == (poor, poor)
    assert all(str(limit) in note.message for note in (foreseen, refused))
    assert all("ask Slurm for more --mem" in note.message for note in (foreseen, refused))
    assert "(two images of each rank 5 MiB)" in foreseen.message
    assert "no memory for two slots of " in refused.message
    first_step = next(e.t for e in run.events() if isinstance(e, ev.Progress) and e.step > 0)
    assert foreseen.t < first_step


@pytest.mark.long
def test_a_full_dev_shm_concerns_nobody(tmp_path: Path) -> None:
    """Nothing of a checkpoint lies there."""
    mounting = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    within = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mounting, "sh")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--steps", "60"), within=within) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert saved_to(run).get("memory", 0) >= 3
    notes = [e.message for e in run.events() if isinstance(e, ev.Noted)]
    assert [note for note in notes if "paused for" not in note] == []  # that is the machine's load


# ---- storage


@contextmanager
def loop_mounted(place: Path, kind: str, mib: int) -> Iterator[Path]:
    """A file system of its own in a file, for checkpoints only."""
    image = place.with_name(f"{place.name}.img")
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(mib * MIB)
    make = ["mkfs.btrfs", "-q", "-M"] if kind == "btrfs" else ["mkfs.ext4", "-q"]
    for command in ([*make, str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no {kind} can be mounted here: {error}")
    try:
        yield place
    finally:
        do("umount", str(place))


@contextmanager
def quota(tmp_path: Path) -> Iterator[Limited]:
    """EDQUOT; of the usual file systems only btrfs' quota counts for root as well."""
    with loop_mounted(tmp_path / "quota", "btrfs", 128) as place:
        do("btrfs", "quota", "enable", str(place))
        do("btrfs", "qgroup", "limit", "1M", str(place))
        yield place, ("btrfs", "qgroup", "limit", "none", str(place))


def test_a_used_up_quota_is_told_and_caught_up_with(tmp_path: Path) -> None:
    """A full file system is tried on the real cluster."""
    why = "the disk quota is used up"
    with quota(tmp_path) as (place, make_room):
        checkpoints = place / "checkpoints"
        train = (*TRAIN, "--steps", "1000", "--checkpoints", str(checkpoints))
        with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                       arguments=train) as run:  # fmt: skip
            state = run.wait("the failure", lambda s: "shared" in s.saved and s.saved["shared"].failures > 0)
            assert why in state.saved["shared"].error, run.story()
            (warned,) = shown(run, "copying to the shared tier failed")
            assert why in warned
            assert "nothing is there yet" in warned
            run.wait_saved((state.saved["memory"].step or 0) + 10)
            do(*make_room)
            state = run.wait("catching up", lambda s: bool(s.saved["shared"].step))
            assert (state.saved["shared"].failures, state.incidents) == (0, [])
            assert jurymast("cancel", str(run.directory.root)).returncode == 0
            wait_gone(run.directory.root)
        assert {name for name in os.listdir(checkpoints) if name.startswith("step-")}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An object store with a bucket, which is down."""
    if not s3_server.installed():
        pytest.skip("no object store to test with: pip install swift s3fs")
    server = S3Server(tmp_path / "swift")
    for name, value in {**server.environment, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        server.start()
        importlib.import_module("fsspec").filesystem("s3", **server.storage_options()).mkdir("bucket")
        server.stop()
        yield server
    finally:
        server.stop()


def test_an_object_store_that_is_down_is_told_and_caught_up_with(tmp_path: Path, s3: S3Server) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text('checkpoint: {tiers: {object: {url: "s3://bucket/runs", every: 1s}}}\n')
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py", arguments=(*TRAIN, "--steps", "10000")) as run:  # fmt: skip
        state = run.wait("the failure", lambda s: "object" in s.saved and s.saved["object"].failures > 0)
        (warned,) = shown(run, "copying to the object tier failed")
        assert "check that it is up" in warned
        assert (state.saved["shared"].failures, state.incidents) == (0, [])
        run.wait_saved((state.saved_step or 0) + 10)
        s3.start()
        state = run.wait("catching up", lambda s: bool(s.saved["object"].step))
        assert state.saved["object"].failures == 0
        assert jurymast("cancel", str(run.directory.root)).returncode == 0
        wait_gone(run.directory.root)
        fetched = jurymast("checkpoints", str(run.directory.root), "--json").stdout
    assert any("object" in row["where"] for row in json.loads(fetched)["checkpoints"])


def test_storage_that_hangs_holds_up_nothing_but_its_own_tier(tmp_path: Path) -> None:
    """A frozen file system keeps writers waiting where no signal reaches them, as a dead NFS server does."""
    out = tmp_path / "out.json"
    with loop_mounted(tmp_path / "disk", "ext4", 64) as disk:
        train = (*TRAIN, "--steps", "2000", "--checkpoints", str(disk / "checkpoints"), "--out", str(out))
        with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                       arguments=train) as run:  # fmt: skip
            state = run.wait("a first one", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
            assert os.path.ismount(disk)  # nothing else must ever be frozen
            do("fsfreeze", "--freeze", str(disk))
            try:
                os.kill(run.pids(state.placement[1])[0], signal.SIGKILL)
                state = run.wait("the restart", lambda s: s.attempt == 2 and s.first_step_at is not None)
                assert set(state.incidents[-1].tiers) == {"memory"}
                state = run.wait("word of it", lambda s: s.saved["shared"].failures > 0, limit_s=240.0)
                (warned,) = shown(run, "copying to the shared tier failed")
                assert "the storage is slow or hangs" in warned
                run.wait_saved((state.saved["memory"].step or 0) + 10)
            finally:
                do("fsfreeze", "--unfreeze", str(disk))
            behind = state.saved["shared"].step or 0
            state = run.wait("catching up", lambda s: (s.saved["shared"].step or 0) > behind)
            assert state.saved["shared"].failures == 0
            assert jurymast("cancel", str(run.directory.root)).returncode == 0
            wait_gone(run.directory.root)


def test_a_restore_from_storage_that_hangs_is_told_and_goes_on(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir(mode=0o700)
    train = (*TRAIN, "--steps", "20", "--checkpoints", str(checkpoints), "--out", str(tmp_path / "out.json"))
    with ExitStack() as held:
        held.enter_context(hanging(checkpoints))
        with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                       arguments=train) as run:  # fmt: skip
            state = run.wait("word of it", lambda s: bool(s.alerts))
            assert state.first_step_at is None
            (told,) = shown(run, "alert")
            assert f"rank 0 restores from {checkpoints}, whose storage does not answer" in told
            held.close()
            state = run.wait_end()
            assert (state.exit_code, state.attempt) == (0, 1)
