"""The process that waits to become the next supervisor: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jurymast.cluster.allocation import Allocation
from jurymast.core.state import events as ev
from jurymast.core.supervision.batch import SUPERSEDED
from jurymast.journal import JournalWriter, read, replay
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint
from support.node_model import plan
from support.waiting import wait_until

LIMIT_S = 90.0


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run whose supervisor on n1, of epoch 1, is gone."""
    made = RunDirectory(tmp_path / "run")
    made.create()
    made.save_plan(plan())
    Allocation("17", 0, ("n1", "n2", "n3"), "n1", 0.0).save(made)
    assert endpoint.claim_epoch(made.epochs) == 1
    writer = JournalWriter(made.journal, 1)
    writer.event(ev.SupervisorStarted(t=1.0, epoch=1, node="n1"))
    writer.close()
    return made


def standby(directory: RunDirectory, *around: str) -> subprocess.Popen[str]:
    command = [*around, sys.executable, "-m", "jurymast.supervisor.standby", str(directory.root), "n2"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_it_ends_quietly_with_its_agent(directory: RunDirectory) -> None:
    with standby(directory) as process:
        out, _ = process.communicate("", timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "")


def test_it_is_none_if_another_was_first(directory: RunDirectory) -> None:
    assert endpoint.claim(directory.epochs, 2)
    with standby(directory) as process:
        out, _ = process.communicate("1 1.5\n", timeout=LIMIT_S)
    assert process.returncode == SUPERSEDED, out
    assert [entry["event"] for entry in read(directory)] == ["SupervisorStarted"]


def test_once_called_it_supervises(directory: RunDirectory) -> None:
    """In a job that is nice already, where only root could make a thread less nice."""
    around = ["nice", "-n", "10"]
    if os.geteuid() == 0:
        around += ["setpriv", "--bounding-set", "-sys_nice"]
    with standby(directory, *around) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        silent_since = time.time() - 1.5
        process.stdin.write(f"1 {time.monotonic() - 1.5}\n")
        process.stdin.flush()

        def started() -> bool:
            place = endpoint.find(directory.epochs)
            known = place is not None and (place.epoch, place.node) == (2, "n2")
            return known and replay(directory).epoch == 2

        try:
            wait_until("the next supervisor", started, limit_s=LIMIT_S)
        finally:
            process.kill()
        assert "Traceback" not in process.stdout.read()
    state = replay(directory)
    assert (state.supervised_on, [*state.abandoned]) == ("n2", ["n1"])
    assert state.abandoned["n1"] == pytest.approx(silent_since, abs=0.3), "however long its start took"
