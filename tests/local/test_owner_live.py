"""Whose a directory of checkpoints is: its owners train, die without a word, and others follow them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.checkpoint.owner import owner
from jurymast.jobs import await_ended
from support.runs import SCRIPTS, RunUnderTest, end_all, jurymast, local_run, tree, wait_gone
from support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.torch


def training(checkpoints: Path, steps: int) -> tuple[str, ...]:
    return ("--steps", str(steps), "--step-time", "0.02", "--save-every", "10 steps", "--width", "16",
            "--checkpoints", str(checkpoints))  # fmt: skip


def steps(checkpoints: Path) -> list[int]:
    return CheckpointDirectory(checkpoints).complete() if checkpoints.is_dir() else []


def killed(run: RunUnderTest) -> None:
    """As by a power cut, or by Slurm's SIGKILL: nothing says how it ended."""
    pid = json.loads((run.directory.submission / "local.json").read_text())["pid"]
    end_all(tree(pid))
    assert await_ended([pid], LIMIT_S)
    assert not run.directory.outcome_file.exists()


def test_the_run_after_one_that_was_killed_saves_and_no_other_run_does_beside_it(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    one_node = ("--nodes", "1", "--spares", "0")
    with local_run(tmp_path / "runs", *one_node, script="train_tiny.py",
                   arguments=training(checkpoints, 10**6)) as first:  # fmt: skip
        wait_until("a checkpoint", lambda: steps(checkpoints))
        with local_run(tmp_path / "runs", *one_node, script="train_tiny.py",
                       arguments=training(checkpoints, 10**6)) as refused:  # fmt: skip
            state = refused.wait_end()
            log = refused.directory.rank_log(state.attempt, 0).read_text()
        assert state.exit_code != 0
        assert (
            f"run {first.directory.root.name} ({first.directory.root}), which has not ended, saves to" in log
        )
        killed(first)
    half = CheckpointDirectory(checkpoints, first.directory.root.name).begin(10**7, 9)
    before = steps(checkpoints)[0]
    with local_run(tmp_path / "runs", *one_node, script="train_tiny.py",
                   arguments=training(checkpoints, before + 200)) as second:  # fmt: skip
        state = second.wait_end()
        wait_gone(second.directory.root)
    assert state.exit_code == 0, second.story()
    assert steps(checkpoints)[0] == before + 200
    found = owner(checkpoints)
    assert found is not None
    assert found.run == second.directory.root.name
    assert not half.exists(), "what the dead run left half-written"
    listed = json.loads(jurymast("checkpoints", str(second.directory.root), "--json").stdout)
    assert listed["directory"] == str(checkpoints)
    assert [row["step"] for row in listed["checkpoints"]] == steps(checkpoints)


@contextmanager
def plainly(checkpoints: Path, count: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The same training without jurymast's agents."""
    command = [sys.executable, str(SCRIPTS / "train_tiny.py"), *training(checkpoints, count)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JURYMAST_")}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_plain_trainings_save_to_one_directory_only_one_after_the_other(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with plainly(checkpoints, 10**6, tmp_path / "first") as first:
        wait_until("a checkpoint", lambda: steps(checkpoints))
        with plainly(checkpoints, 10**6, tmp_path / "refused") as refused:
            assert refused.wait(120) != 0
        told = (tmp_path / "refused").read_text()
        assert f"a training of process {first.pid} on " in told
        assert "which has not ended, saves to" in told
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = steps(checkpoints)[0]
    with plainly(checkpoints, before + 20, tmp_path / "second") as second:
        assert second.wait(120) == 0, (tmp_path / "second").read_text()
    assert steps(checkpoints)[0] > before
