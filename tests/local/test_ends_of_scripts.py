"""What people are told of a script that ends itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.core import events as ev
from support.runs import jurymast, local_run, wait_gone

pytestmark = pytest.mark.torch


def test_the_message_of_an_exit_is_told_as_the_cause(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('loading')\nsys.exit('no data at /data')\n")
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script=str(script)) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    failed = [event for event in run.events() if isinstance(event, ev.WorkerFailed)]
    assert {(event.exit_code, event.error, event.log) for event in failed} == {(1, "", "no data at /data")}
    assert state.exit_code == 1
    shown = jurymast("status", str(run.directory.root)).stdout
    assert "evidence   rank 0 on local-1: exit code 1; its log ends: no data at /data\n" in shown
