"""A fleet of many runs is read in several processes, which may be killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from jurymast.core.fleet import RunSummary
from jurymast.report import fleet
from jurymast.report.fleet import kept_file, read_fleet
from jurymast.rundir import RunDirectory
from support.stories import Story


def test_a_process_that_is_killed_while_many_runs_are_read_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for want of memory: the fleet is told all the same."""
    for number in range(4):
        Story().running(60 + number).finished().write(tmp_path / f"20261117-10000{number}-gpt-abcd")
        plan = tmp_path / f"20261117-10000{number}-gpt-abcd" / "plan.json"
        plan.write_text(json.dumps({**json.loads(plan.read_text()), "run": f"run-{number}"}))
    alone = read_fleet([tmp_path])
    kept_file(tmp_path).unlink()
    read, here = fleet._replayed, os.getpid()

    def killed(directory: RunDirectory) -> RunSummary:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(directory)

    monkeypatch.setattr(fleet, "_replayed", killed)
    monkeypatch.setattr(fleet, "MANY", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert read_fleet([tmp_path]) == alone
    assert len(alone.runs) == 4
