"""`jurymast cancel` at awkward moments: whatever is left of the run goes, and soon."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.outputs import checked
from support.runs import command_of, end_all, jurymast, local_run, processes_of, tree, wait_gone
from support.waiting import wait_until


def batch_process(directory: Path) -> psutil.Process:
    record = json.loads((directory / "slurm" / "local.json").read_text())
    return psutil.Process(record["pid"])


@contextlib.contextmanager
def until_nothing_is_left(directory: Path) -> Iterator[None]:
    try:
        yield
        wait_until("end of every process of the run", lambda: not processes_of(directory))
    finally:
        end_all(processes_of(directory))


@pytest.mark.parametrize("started", [False, True], ids=["at once", "before it can answer"])
def test_a_run_that_has_hardly_begun(tmp_path: Path, started: bool) -> None:
    with local_run(tmp_path, "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=("--steps", "1000000", "--step-time", "0.05")) as run:  # fmt: skip
        root = run.directory.root
        batch = batch_process(root)
        with until_nothing_is_left(root):
            if started:
                wait_until("supervisor", lambda: len(tree(batch.pid)) > 1)
            done = jurymast("cancel", str(root))
            assert done.returncode == 0, done.stderr
            assert "is cancelled" in done.stdout
        assert run.state().phase.value == "cancelled"
        log = (run.directory.submission / "job-local.log").read_text()
        assert "ended with code" not in log, "the supervisor got the signal before it could heed it"


def test_nothing_outlives_the_batch_process(tmp_path: Path) -> None:
    """Under Slurm the job's end would see to that."""
    started = local_run(tmp_path, "--nodes", "1", "--spares", "0", script="train_tiny.py",
                        arguments=("--steps", "1000000", "--step-time", "0.05"))  # fmt: skip
    with started as run, until_nothing_is_left(run.directory.root):
        run.wait_step(2)
        batch_process(run.directory.root).send_signal(signal.SIGKILL)
        run.wait_end()


def test_a_run_whose_supervisors_all_crash_trains_on_and_can_be_ended(tmp_path: Path) -> None:
    started = local_run(tmp_path, "--nodes", "1", "--spares", "1", script="train_tiny.py",
                        arguments=("--steps", "1000000", "--step-time", "0.05"))  # fmt: skip
    with started as run, until_nothing_is_left(run.directory.root):
        rank = psutil.Process(run.pids(run.wait_step(2).placement[0])[0])
        batch = batch_process(run.directory.root)
        log = run.directory.submission / "job-local.log"

        def kill_supervisor() -> bool:
            for child in batch.children():
                if "jurymast.supervisor" in command_of(child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            return "no supervisor stays up" in log.read_text()

        wait_until("the end of all supervisors", kill_supervisor, limit_s=240.0)
        assert rank.is_running()
        done = jurymast("cancel", str(run.directory.root))
        assert done.returncode == 0, done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def kept_full(place: Path) -> Iterator[None]:
    """Not a byte more goes in, and what is given up, as by a write that has failed, is taken at once."""
    over = threading.Event()

    def fill() -> None:
        with open(place / "theirs", "ab", buffering=0) as file:
            while not over.wait(0.01):
                with contextlib.suppress(OSError):
                    while file.write(bytes(4096)):
                        pass

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield
    finally:
        over.set()
        filler.join()


def test_a_run_that_ends_on_a_full_disk_says_so_and_can_be_let_go(tmp_path: Path, small_disk: Path) -> None:
    enough = tmp_path / "enough"
    train = ("--width", "256", "--step-time", "0.1", "--save-every", "20 steps", "--steps", "100000",
             "--until", str(enough))  # fmt: skip
    with local_run(small_disk, "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=train) as run:  # fmt: skip
        root = run.directory.root
        run.wait("a durable one", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))

        def status() -> dict[str, Any]:
            found = json.loads(jurymast("status", str(root), "--json").stdout)
            told: dict[str, Any] = checked(found, "status")
            return told

        def status_with(what: str, shown: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            (told,) = wait_until(what, lambda: [*filter(shown, [status()])], limit_s=240.0)
            return told

        def journal_warnings(told: dict[str, Any]) -> list[str]:
            return [text for text in told["warnings"] if "cannot be written" in text]

        with kept_full(small_disk):
            durable = run.state().saved["shared"].step or 0
            # By then copies to storage have failed more than once, and the next try is not at once.
            status_with("some failures", lambda told: told["step"] > durable + 200)
            # Before that, the run's end might still fit into the rest of the journal's last page.
            status_with("word that the journal is full", lambda told: bool(journal_warnings(told)))
            enough.touch()
            told = status_with("word that it has ended", lambda told: told["state"] == "succeeded")
            assert told["exit_code"] is None, (told, run.story())
            assert "is on its way to" in told["next"]
            assert told["step"] > durable
            (warned,) = journal_warnings(told)
            assert "No space left on device" in warned
        done = jurymast("cancel", str(root))
        assert "no longer waits for" in done.stdout, (done, run.story())
        wait_gone(root)
        assert status()["state"] == "succeeded", run.story()
        assert status()["exit_code"] == 0
        assert "ended the wait for it" in run.state().notes[-1][1]
