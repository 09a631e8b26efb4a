"""Whose a directory of checkpoints is, as runs claim it, end, and find it damaged."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from jurymast.checkpoint.owner import OWNER, Owner, claim, is_foreign, owner, this_host
from jurymast.core.state.messages import WritePhase
from jurymast.errors import CheckpointError
from jurymast.jobs import began_at, has_ended
from jurymast.report.liveness import record_cancel
from jurymast.storage import shared
from jurymast.storage.orders import Continue, Job, StorageFailure, WriteShared
from support.images import simple_images, to_shared
from support.storage_faults import ALWAYS, failing
from support.stories import Story


def a_run(folder: Path, name: str) -> Owner:
    (folder / "runs" / name).mkdir(parents=True)
    return Owner(name, str(folder / "runs" / name))


def ends(run: Owner, state: str = "succeeded") -> None:
    (Path(run.directory) / "outcome.json").write_text(json.dumps({"state": state, "exit_code": 0}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "checkpoints"


def test_the_first_run_that_writes_owns_the_directory(tmp_path: Path, root: Path) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    assert owner(root) is None
    claim(root, first)
    claim(root, first)  # its next attempt, or after a requeue
    assert owner(root) == first
    assert os.listdir(root) == [OWNER]
    assert (root / OWNER).stat().st_mode & 0o777 == 0o600
    with pytest.raises(CheckpointError) as raised:
        claim(root, second)
    assert f"run first ({first.directory}), which may not have ended, saves to" in str(raised.value)
    assert "run second cannot save there" in str(raised.value)
    assert str(root / OWNER) in raised.value.hint
    assert (is_foreign(root, first), is_foreign(root, second)) == (False, True)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_a_run_that_has_ended_gives_way(tmp_path: Path, root: Path, state: str) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    ends(first, "requeued")
    with pytest.raises(CheckpointError):
        claim(root, second)
    ends(first, state)
    claim(root, second)
    assert owner(root) == second
    assert os.listdir(root) == [OWNER]


def test_a_run_without_a_supervisor_gives_way_once_it_is_cancelled(tmp_path: Path, root: Path) -> None:
    directory = Story().running().write(tmp_path / "runs" / "first")
    first, second = Owner("first", str(directory.root)), a_run(tmp_path, "second")
    claim(root, first)
    with pytest.raises(CheckpointError):
        claim(root, second)
    record_cancel(directory, by="ada")
    claim(root, second)
    assert owner(root) == second


def test_a_run_that_was_removed_gives_way_but_not_one_whose_storage_is_away(
    tmp_path: Path, root: Path
) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    runs = tmp_path / "runs"
    runs.rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError):
        claim(root, second)
    (tmp_path / "unmounted").rename(runs)
    (runs / "first").rmdir()
    claim(root, second)
    assert owner(root) == second


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "x"}', "\udcff"])
def test_a_damaged_owner_is_named_and_nobody_writes(tmp_path: Path, root: Path, text: str) -> None:
    us = a_run(tmp_path, "us")
    claim(root, us)
    (root / OWNER).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match="is damaged") as raised:
        claim(root, us)
    assert str(root / OWNER) in str(raised.value)
    assert raised.value.hint.endswith(f"rm {root / OWNER}")
    assert is_foreign(root, us)
    (root / OWNER).unlink()
    claim(root, us)


def test_a_training_that_is_no_run_keeps_off_and_owns_nothing(tmp_path: Path, root: Path) -> None:
    claim(root, None)
    assert owner(root) is None
    first = a_run(tmp_path, "first")
    claim(root, first)
    with pytest.raises(CheckpointError, match="this training cannot save there"):
        claim(root, None)
    ends(first)
    claim(root, None)
    assert owner(root) == first


@pytest.mark.parametrize("owned", [True, False])
def test_of_many_that_claim_at_once_one_owns_it(tmp_path: Path, root: Path, owned: bool) -> None:
    if owned:
        before = a_run(tmp_path, "before")
        claim(root, before)
        ends(before)
    runs = [a_run(tmp_path, f"run-{number}") for number in range(8)]
    start, refused = threading.Barrier(len(runs)), []

    def try_it(run: Owner) -> None:
        start.wait()
        try:
            claim(root, run)
        except CheckpointError:
            refused.append(run)

    threads = [threading.Thread(target=try_it, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [run for run in runs if run not in refused]
    assert [owner(root)] == won


def test_a_claim_that_was_cut_short_is_named(tmp_path: Path, root: Path) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    root.mkdir(parents=True)
    half = root / f".{OWNER}.after-"
    half.write_text(json.dumps(asdict(first)))
    with pytest.raises(CheckpointError, match="another run is claiming") as raised:
        claim(root, second)
    assert raised.value.hint.endswith(f"rm {half}*")
    claim(root, first)
    assert os.listdir(root) == [OWNER]


def test_a_claim_that_found_no_room_or_was_cut_short_keeps_nobody_out(tmp_path: Path, root: Path) -> None:
    run = a_run(tmp_path, "first")
    root.mkdir(parents=True)
    half = root / f".{OWNER}.after-"
    half.touch()
    with pytest.raises(CheckpointError, match="is damaged"):
        claim(root, run)
    os.utime(half, (0, 0))
    claim(root, run)
    assert (owner(root), os.listdir(root)) == (run, [OWNER])


def test_a_claim_on_a_full_disk_leaves_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            claim(root, a_run(tmp_path, "first"))
    assert os.listdir(root) == []
    claim(root, a_run(tmp_path, "second"))


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """squeue, as slurmctld answers it: what it says is in this file."""
    squeue = folder / "bin" / "squeue"
    squeue.parent.mkdir()
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    return squeue


def answers(squeue: Path, body: str) -> None:
    squeue.write_text(f"#!/bin/sh\n{body}\n")
    squeue.chmod(0o755)


AWAY = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
GONE = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
NO_STEP = 'echo "squeue: error: Invalid job_step id: 17.4294967290" >&2; exit 1'


def test_while_slurm_is_silent_an_owner_is_neither_gone_nor_alive(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no refusal, which would end the training: it is a trouble of the moment."""
    squeue = slurm(tmp_path, monkeypatch)
    first, second = Owner("first", str(tmp_path), job="17"), a_run(tmp_path, "second")
    claim(root, first)
    answers(squeue, AWAY)
    said: list[str] = []
    with pytest.raises(TimeoutError, match="it is not known whether that has ended") as raised:
        claim(root, second, 0.1, say=said.append)
    assert raised.value.filename == str(root)
    assert "Unable to contact" in str(raised.value)
    assert len(said) == 1
    assert owner(root) == first
    answers(squeue, "echo 'RUNNING|None'")
    with pytest.raises(CheckpointError, match="which has not ended"):
        claim(root, second)
    answers(squeue, "echo 'squeue: no such option' >&2; exit 1")
    with pytest.raises(CheckpointError, match="which may not have ended"):
        claim(root, second)
    answers(squeue, GONE)
    claim(root, second)
    assert owner(root) == second


@pytest.mark.parametrize("number", [None, "-5", "4294967290"], ids=["script", "script of 26.05", "salloc"])
def test_a_training_in_a_script_or_in_the_shell_of_an_allocation_lives_as_its_job(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    """squeue takes the numbers of their steps for errors."""
    squeue = slurm(tmp_path, monkeypatch)
    for name in ("JURYMAST_RUN", "SLURM_CLUSTER_NAME", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    if number is not None:
        monkeypatch.setenv("SLURM_STEP_ID", number)
    first, second = Owner.of_environment(), a_run(tmp_path, "second")
    claim(root, first)
    answers(squeue, f"case $* in *--steps*) {NO_STEP};; *) echo 'RUNNING|None';; esac")
    with pytest.raises(CheckpointError, match="a training in step (batch|interactive) of job 17.*not ended"):
        claim(root, second)
    answers(squeue, GONE)
    claim(root, second)
    assert owner(root) == second


def test_a_step_that_squeue_does_not_understand_may_run(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = slurm(tmp_path, monkeypatch)
    claim(root, Owner("slurm-17.4294967290", job="17", step="4294967290"))
    answers(squeue, f"case $* in *--steps*) {NO_STEP};; *) echo 'RUNNING|None';; esac")
    with pytest.raises(CheckpointError, match="which may not have ended"):
        claim(root, a_run(tmp_path, "second"))


def test_an_owner_that_names_ever_so_many_jobs_is_not_asked_about_for_ever(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have put it there. That it lives is known once one of its jobs does."""
    squeue = slurm(tmp_path, monkeypatch)
    asked = tmp_path / "asked"
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    jobs = Path(first.directory, "slurm", "jobs")
    jobs.mkdir(parents=True)
    for number in range(1, 31):
        (jobs / str(number)).touch()
    answers(squeue, f"echo >> {asked}; echo 'RUNNING|None'")
    with pytest.raises(CheckpointError, match="its job 30 is RUNNING"):
        claim(root, second)
    assert asked.read_text().count("\n") == 1
    answers(squeue, f"echo >> {asked}; {GONE}")
    for limit, value in (("WAIT_S", -1.0), ("JOBS_MAX", 29)):
        with monkeypatch.context() as patch:
            patch.setattr(f"jurymast.checkpoint.owner.{limit}", value)
            with pytest.raises(CheckpointError, match="it names 30 jobs"):
                claim(root, second)
    assert asked.read_text().count("\n") == 1
    claim(root, second)
    assert owner(root) == second


def test_a_training_goes_on_while_slurm_is_silent_and_saves_once_it_answers(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is not asked at each save, for which ranks would stand still."""
    shared_tier = pytest.importorskip("jurymast.checkpoint.shared_tier")
    squeue = slurm(tmp_path, monkeypatch)
    asked = tmp_path / "asked"
    claim(root, Owner("first", str(tmp_path), job="17"))
    answers(squeue, f"echo >> {asked}; {AWAY}")
    monkeypatch.setattr(shared_tier, "WAIT_S", 0.0)
    alone = shared_tier.Group()
    tier = shared_tier.SharedTier(root, alone, keep=1, attempt=1, stale=lambda: "")
    for _ in range(3):
        assert "it is not known whether that has ended" in tier.claim()
    assert asked.read_text().count("\n") == 1
    answers(squeue, GONE)
    assert tier.claim() != ""
    monkeypatch.setattr(tier, "_ask_again_at", 0.0)
    assert tier.claim() == ""
    assert tier.claimed


def test_what_agents_write_is_for_the_owner_too(tmp_path: Path, root: Path) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    theirs = root / ".writing-00000001.a0001.00"
    theirs.mkdir()
    order = WriteShared(
        root=str(root), step=2, attempt=1, world=1, images=(), lead=True, nonce="01", keep=1, run=second.run,
        run_directory=second.directory,
    )  # fmt: skip
    with pytest.raises(StorageFailure, match="run first .* which may not have ended"):
        shared.write(order, Job(order.limit_s))
    assert theirs.is_dir()


def without_its_batch_process(run: Owner, host: str = socket.gethostname()) -> None:
    """As a local run's directory says after a kill of the batch process, whose number nobody has."""
    folder = Path(run.directory, "slurm")
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    (folder / "jobs" / "local-17").touch()
    record = {"pid": 2**22 + 1, "started": 1.0, "host": host}
    (folder / "local.json").write_text(json.dumps(record))


def test_a_run_of_another_machine_may_live_there(tmp_path: Path, root: Path) -> None:
    """Whether its process does cannot be seen from here, where another one may have its number."""
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    without_its_batch_process(first, "elsewhere")
    with pytest.raises(CheckpointError, match="may not have ended.*it runs, or ran, on elsewhere"):
        claim(root, second)
    without_its_batch_process(first)
    claim(root, second)


def test_a_run_whose_processes_are_left_has_not_ended(tmp_path: Path, root: Path) -> None:
    """Its batch process was killed, and a rank may still write."""
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    without_its_batch_process(first)
    environment = {**os.environ, "JURYMAST_RUN_DIR": first.directory}
    with subprocess.Popen(["sleep", "600"], env=environment) as rank:
        try:
            with pytest.raises(CheckpointError, match=f"its process {rank.pid} still runs"):
                claim(root, second, 0.0)
        finally:
            rank.kill()
    claim(root, second)
    assert owner(root) == second


# What a process without a free descriptor is told, or one where others' processes are hidden.
CANNOT_LOOK = [errno.EMFILE, errno.EPERM]


@pytest.mark.parametrize("number", CANNOT_LOOK)
def test_a_process_that_cannot_be_looked_at_has_not_ended(root: Path, number: int) -> None:
    pid = os.getpid()
    first = Owner("first", host=this_host(), pid=pid, started=began_at(pid) or 0)
    second = Owner("second", host=this_host(), pid=1, started=1)
    claim(root, first)
    with failing(f"/proc/{pid}/stat", number):
        with pytest.raises(OSError, match=os.strerror(number)):
            claim(root, second, 0.0)
        assert not has_ended(pid)
    assert owner(root) == first


@pytest.mark.parametrize("file", ["cmdline", "environ"])
def test_a_runs_processes_that_cannot_be_looked_for_have_not_ended(
    tmp_path: Path, root: Path, file: str
) -> None:
    first = a_run(tmp_path, "first")
    claim(root, first)
    without_its_batch_process(first)
    with failing(f"/{file}", errno.EMFILE), pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        claim(root, a_run(tmp_path, "second"), 0.0)
    assert owner(root) == first


@pytest.mark.parametrize("who", ["the owner", "who asks"])
def test_whoever_does_not_know_its_machine_s_start_takes_nobody_for_ended(root: Path, who: str) -> None:
    pid, other = os.getpid(), this_host().replace("/", "/not-", 1)
    with failing("boot_id", errno.EMFILE):
        blind = this_host()
    claim(root, Owner("first", host=blind if who == "the owner" else other, pid=pid, started=1))
    second = Owner("second", host=this_host(), pid=pid, started=1)
    times = ALWAYS if who == "who asks" else 0
    refused = pytest.raises(CheckpointError, match="may not have ended")
    with failing("boot_id", errno.EMFILE, times), refused:
        claim(root, second, 0.0)


def test_a_claim_that_was_cut_short_by_the_end_of_its_run_keeps_nobody_out(
    tmp_path: Path, root: Path
) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    root.mkdir(parents=True)
    (root / f".{OWNER}.after-").write_text(json.dumps(asdict(first)))
    ends(first)
    claim(root, second)
    assert (owner(root), os.listdir(root)) == (second, [OWNER])


def test_a_training_that_is_started_again_owns_its_directory_as_the_new_process(root: Path) -> None:
    """As by torchrun with the same --rdzv-id; the first process is gone."""
    us = Owner("torchrun-7", host=this_host(), pid=os.getpid(), started=began_at(os.getpid()) or 0)
    with subprocess.Popen(["true"]) as first:
        claim(root, replace(us, pid=first.pid, started=1))
    claim(root, us)
    assert owner(root) == us
    with pytest.raises(CheckpointError, match=f"its process {us.pid} runs"):
        claim(root, replace(us, run="torchrun-8"))


class Taken:
    """A state during whose save another training takes the directory, as if this one were dead."""

    def __init__(self, root: Path, by: Owner) -> None:
        self._root, self._by = root, by

    def take(self) -> None:
        (self._root / OWNER).write_text(json.dumps(asdict(self._by)))

    def state_dict(self) -> dict[str, int]:
        self.take()
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


def test_nothing_is_published_by_ranks_in_a_directory_that_another_has_taken_meanwhile(
    tmp_path: Path, root: Path
) -> None:
    jurymast = pytest.importorskip("jurymast")
    state = {"taken": Taken(root, a_run(tmp_path, "second"))}
    training = jurymast.Checkpointer(state, directory=root, every=1_000_000)
    assert training.restore() == 0
    assert not training.save(1)
    assert os.listdir(root) == [OWNER]


def test_nor_by_agents(tmp_path: Path, root: Path) -> None:
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    taken = Taken(root, second)

    def reached(phase: WritePhase) -> None:
        if phase is WritePhase.WRITE:
            taken.take()

    job = Job(100.0, reached=reached)
    for phase in WritePhase:
        job.go_on(Continue(id=0, phase=phase, parts=(0,)))
    order = to_shared(root, simple_images(tmp_path / "images"), world=1, lead=True)
    order = msgspec.structs.replace(order, run=first.run, run_directory=first.directory)
    with pytest.raises(StorageFailure, match="another training owns"):
        shared.write(order, job)
    assert os.listdir(root) == [OWNER]


def test_another_user_s_process_of_any_name_keeps_no_directory(tmp_path: Path, root: Path) -> None:
    """Its arguments may name a run that has ended, which another run of the same user is to follow."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    first, second = a_run(tmp_path, "first"), a_run(tmp_path, "second")
    claim(root, first)
    place = Path(first.directory) / "slurm"
    (place / "jobs").mkdir(parents=True)
    (place / "jobs" / "local-1").touch()
    # Another process has its number.
    record = {"pid": 1, "began": 1, "boot": "another", "host": socket.gethostname()}
    (place / "local.json").write_text(json.dumps(record))
    words = ["sh", "-c", "echo; read end", "sh", first.directory]
    command = ["setpriv", "--reuid=65533", "--clear-groups", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        claim(root, second, wait_s=0.0)
        process.communicate(b"\n")
    assert owner(root) == second


def test_what_others_call_themselves_controls_no_terminal(tmp_path: Path, root: Path) -> None:
    """The error is printed by whatever script saves, and not by our commands."""
    root.mkdir(parents=True)
    evil = "x\x1b]0;gone\x07\r\njurymast: all is well\u202e"
    words: list[str] = []
    for values in (Owner(evil, f"/nowhere/{evil}"), Owner(evil, host=f"{evil}/1/2", pid=1, started=1)):
        (root / OWNER).write_text(json.dumps(asdict(values)))
        with pytest.raises(CheckpointError) as raised:
            claim(root, a_run(tmp_path, f"run-{len(words)}"), wait_s=0.0, say=words.append)
        words.append(str(raised.value))
    assert len(words) == 2
    assert all(text.isprintable() for text in words)
