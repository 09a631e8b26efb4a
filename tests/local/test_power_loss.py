"""A power loss leaves small files of the run directory empty; the supervisors that follow handle failures as
before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from jurymast.core.state import events as ev
from jurymast.wire import endpoint
from support.runs import RunUnderTest, local_run
from support.waiting import wait_until

pytestmark = pytest.mark.torch


def supervisor_of(run: RunUnderTest) -> psutil.Process:
    place = wait_until("a supervisor", lambda: endpoint.find(run.directory.epochs))
    assert place is not None
    return psutil.Process(place.pid)


def test_with_its_small_files_empty_a_run_goes_on(tmp_path: Path) -> None:
    train = ("--steps", "100000", "--step-time", "0.02", "--save-every", "10 steps")
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=train) as run:  # fmt: skip
        run.wait_saved(20)
        supervisor = supervisor_of(run)
        supervisor.suspend()  # it writes none of them again
        files = [run.directory.attempt_file, run.directory.allocation_file]
        files += [run.directory.epochs / name for name in (endpoint.PULSE, endpoint.NEWEST)]
        for path in files:
            path.write_bytes(b"")
        supervisor.kill()
        run.wait("the attempt after the one that may have been", lambda s: s.attempt == 3 and s.step > 0)
        found = [e for e in run.events() if isinstance(e, ev.AttemptFound)]
        assert [(e.node, e.attempt) for e in found] == [("", 2)], run.story()
        assert run.directory.newest_attempt() == 3
        assert all(path.stat().st_size for path in files)
        os.kill(run.pids("local-1")[0], signal.SIGKILL)
        state = run.wait("the recovery", lambda s: s.attempt == 4 and s.incident is None and s.step > 0)
        assert state.incidents[-1].cause == "worker_killed", run.story()
