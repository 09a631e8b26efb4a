"""Files that another user could have made: nothing of theirs is believed, waited for, or run."""

from __future__ import annotations

import errno
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from jurymast import foreign
from jurymast.checkpoint.directory import CheckpointDirectory, CheckpointManifest, FileRecord, hash_file
from jurymast.checkpoint.group import Group
from jurymast.checkpoint.shared_tier import SharedTier
from jurymast.checkpoint.state import ScriptState
from jurymast.cli.main import main
from jurymast.cli.options import find_run, run_ids
from jurymast.cluster.earlier import forgiven_file, forgiven_nodes, past_runs, summary_file
from jurymast.rundir import RunDirectory
from jurymast.storage.export import export
from support.commands import RUN, Place, swapped

MALLORY, ADA = 65533, 65534
FORGED = "20991231-235959-newer-ffff"
JOB = "4711"
as_others = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


class Runs:
    """Pickled as a call that makes this directory: what an attacker would have run."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory that all users may write to, as many sites have for a project."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is root's alone
        place = Path(folder)
        place.chmod(0o1777)
        yield place


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def give(path: Path, uid: int) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)


def malicious_checkpoint(run: RunDirectory, proof: Path) -> None:
    """A checkpoint that passes every check, of which the metadata is a program."""
    directory = CheckpointDirectory(run.checkpoints)
    place = directory.begin(100, 1)
    (place / ".metadata").write_bytes(pickle.dumps(Runs(proof)))
    size, digest = hash_file(place / ".metadata")
    files = (FileRecord(".metadata", size, digest),)
    directory.seal(place, CheckpointManifest(100, 1, 1, torch.__version__, files))
    directory.publish(place, 100)


@pytest.fixture
def shared(common: Path) -> Place:
    """Ada's run of a Slurm job, and beside it a newer one by Mallory that claims the same job."""
    place = Place(common)
    runs = {RUN: ADA, FORGED: MALLORY}
    for name, uid in runs.items():
        run = place.story(swapped(), name)
        (run.submission / "jobs").mkdir(parents=True, exist_ok=True)
        (run.submission / "jobs" / JOB).touch()
        run.checkpoints.mkdir(exist_ok=True)
        if uid == MALLORY:
            malicious_checkpoint(run, common / "proof")
            for path in (run.root, *run.root.rglob("*")):
                path.chmod(0o755)
        give(run.root, uid)
    place.runs.chmod(0o1777)
    common.chmod(0o1777)
    return place


@as_others
@pytest.mark.parametrize("forged", [FORGED, JOB])
def test_a_forged_run_of_my_job_is_not_taken_for_mine(shared: Place, forged: str) -> None:
    """Nor a directory that has the job's number for its name."""
    (shared.runs / FORGED).rename(shared.runs / forged)
    with acting_as(ADA):
        assert run_ids(shared.runs) == [RUN]
        assert find_run(JOB, shared.runs).root.name == RUN


@as_others
@pytest.mark.parametrize(
    "words", [["checkpoints", FORGED, "export", "100", "out"], ["cancel", FORGED], ["restart", FORGED]]
)
def test_nothing_is_done_about_anothers_run(
    shared: Place, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
    main([words[0], "--help"])  # the interpreter's own files may be root's alone
    with acting_as(ADA):
        assert main(words) == 73
    assert f"{FORGED} belongs to {foreign.user_name(MALLORY)}" in capsys.readouterr().err
    assert not (shared.root / "proof").exists()


@as_others
def test_a_colleagues_run_is_shown_with_whose_it_is_and_nothing_of_it_is_run(
    shared: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_RUNS", str(shared.runs))
    looks = (["status"], ["report"], ["events"], ["checkpoints"], ["checkpoints", "verify"])
    for command, *words in looks:
        main([command, RUN, *words])
    (shared.runs / FORGED / "slurm/jobs/4712").write_bytes(b"\xff\0")  # a cluster's name
    os.mkfifo(shared.runs / FORGED / "slurm/jobs/4713", 0o644)
    capsys.readouterr()
    with acting_as(ADA):
        for command, *words in looks:
            assert main([command, FORGED, *words]) == 0
            told = capsys.readouterr()
            assert f"this run belongs to {foreign.user_name(MALLORY)}" in told.err
            assert told.out
    assert not (shared.root / "proof").exists()


@as_others
def test_anothers_checkpoint_is_not_unpickled(shared: Place) -> None:
    tier_root = shared.runs / FORGED / "checkpoints"
    tier = SharedTier(tier_root, Group(), keep=3, attempt=1, stale=lambda: "")
    with acting_as(ADA):
        found, _ = tier.candidates()
        assert "is not private to this user" in tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
        with pytest.raises(foreign.NotOurs):
            export(CheckpointDirectory(tier_root).path(100), shared.root / "out", "torch")
    assert not (shared.root / "proof").exists()
    with acting_as(MALLORY):
        tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
    assert (shared.root / "proof").exists(), "the attack is none, and this test shows nothing"


@as_others
def test_a_file_of_a_checkpoint_that_others_can_write_to_is_not_unpickled(common: Path) -> None:
    """Although its directory is this user's own, and what was hashed was right."""
    run = RunDirectory(common / "run")
    run.create()
    malicious_checkpoint(run, common / "proof")
    give(run.root, ADA)
    metadata = CheckpointDirectory(run.checkpoints).path(100) / ".metadata"
    with acting_as(ADA):
        tier = SharedTier(run.checkpoints, Group(), keep=3, attempt=1, stale=lambda: "")
        found, _ = tier.candidates()
        metadata.chmod(0o666)
        refused = tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
        assert f"{metadata} is not private to this user" in refused
        with pytest.raises(CheckpointException):
            export(metadata.parent, common / "out", "torch")
        assert not (common / "proof").exists()
        metadata.chmod(0o600)
        tier.load(found[0], ScriptState({"x": torch.zeros(1)}))
    assert (common / "proof").exists(), "the attack is none, and this test shows nothing"


@as_others
def test_anothers_runs_say_nothing_about_nodes_and_hang_nothing(shared: Place) -> None:
    """Not even with a pipe in place of a plan, or of what was kept of earlier runs."""
    pipe = shared.runs / "20990101-000000-pipe-0000"
    pipe.mkdir(mode=0o755)
    os.mkfifo(pipe / "plan.json", 0o666)
    give(pipe, MALLORY)
    with acting_as(ADA):
        kept = summary_file(shared.runs)
    os.mkfifo(kept, 0o666)
    os.chown(kept, MALLORY, MALLORY)
    with acting_as(ADA):
        assert [run.run for run in past_runs(shared.runs)] == [RUN]
        assert run_ids(shared.runs) == [RUN]
        with pytest.raises(OSError, match="not an ordinary file"):
            foreign.read(pipe / "plan.json")


@as_others
def test_anothers_word_on_which_nodes_are_forgiven_is_not_believed(shared: Place) -> None:
    with acting_as(ADA):
        word = forgiven_file(shared.runs)
    word.write_text('{"v": 1, "entries": {"n3": 1.0}}')
    for owner, believed in ((MALLORY, {}), (ADA, {"n3": 1.0})):
        os.chown(word, owner, owner)
        with acting_as(ADA):
            assert forgiven_nodes(shared.runs) == believed


def test_only_what_this_user_alone_can_write_is_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "file").write_bytes(b"x")
    assert foreign.owns(own)
    assert foreign.read_own(own / "file") == b"x"
    with foreign.own_directory(own) as place:
        own.rename(tmp_path / "elsewhere")
        assert (place / "file").read_bytes() == b"x"
    own = tmp_path / "elsewhere"
    (tmp_path / "own").symlink_to(own)
    with pytest.raises(OSError), foreign.own_directory(tmp_path / "own"):
        pass
    for path in (own, own / "file"):
        path.chmod(0o770)
    assert not foreign.owns(own)
    with pytest.raises(foreign.NotOurs, match="chmod go-w"):
        foreign.read_own(own / "file")
    with pytest.raises(foreign.NotOurs), foreign.own_directory(own):
        pass
    (tmp_path / "link").symlink_to(own / "file")
    with pytest.raises(OSError) as caught:
        foreign.read_own(tmp_path / "link")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="has 1 bytes, at most 0 are allowed"):
        foreign.read(own / "file", 0)
