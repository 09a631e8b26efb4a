"""What ranks leave behind is gone when the next attempt starts, and at the end of the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from support.ports import free_port
from support.runs import jurymast, local_run, wait_gone
from support.waiting import wait_until

pytestmark = pytest.mark.torch


def left_by_ranks(place: Path) -> list[psutil.Process]:
    """The children that ranks of any attempt have started; each names the place."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "time.sleep(100000)" in " ".join(command) and command[-1] == str(place):
            found.append(process)
    return found


def test_what_ranks_leave_behind_is_gone_with_the_attempt(tmp_path: Path) -> None:
    """It ends in order, is killed, and at last the run is cancelled."""
    place = tmp_path / f"place-{os.getpid()}"
    place.mkdir()
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="leaves_behind.py",
                   arguments=(str(place), str(free_port()))) as run:  # fmt: skip
        before: set[int] = set()
        for attempt in (1, 2, 3):
            state = run.wait(f"attempt {attempt}", lambda s, n=attempt: s.attempt >= n and s.step > 20)  # type: ignore[misc]
            assert state.attempt == attempt, run.story()
            wait_until("its steps", (place / f"attempt-{attempt}").exists)
            here = {process.pid for process in left_by_ranks(place)}
            assert len(here) == 3
            assert not here & before
            before = here
            if attempt == 1:
                assert jurymast("restart", str(run.directory.root)).returncode == 0
            elif attempt == 2:
                os.kill(run.pids("local-1")[0], signal.SIGKILL)
        assert jurymast("cancel", str(run.directory.root)).returncode == 0
        wait_gone(run.directory.root)
        wait_until("the end of what the last attempt left", lambda: not left_by_ranks(place))
        assert not Path("/dev/shm", f"jurymast-{place.name}").exists()
