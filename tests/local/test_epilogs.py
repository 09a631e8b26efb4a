"""What runs after each rank, in place of Slurm's task epilogs: real agents and ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.runs import local_run, wait_gone

pytestmark = pytest.mark.torch

# Only a batch script's step makes such a run, under Slurm.
SUBMITS = """import runpy, sys
from dataclasses import replace
from jurymast.cluster import slurm
submit, folder, sys.argv = slurm.submit, sys.argv[1], sys.argv[4:]
programs = {"prologs": (f"{folder}/before",), "epilogs": (f"{folder}/after", f"{folder}/site")}
slurm.submit = lambda request: submit(replace(request, plan=replace(request.plan, **programs)))
runpy.run_module("jurymast", run_name="__main__", alter_sys=True)
"""
# The first takes its time: what must come after it comes much earlier if nothing waits.
PROGRAMS = {"before": "", "after": "sleep 1", "site": ""}
TASK = """import os, time
if os.environ["JURYMAST_ATTEMPT"] == "1":
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(3600)
"""


def test_epilogs_run_once_after_each_rank_of_each_attempt(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    for name, first in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n{first}\necho {name} $JURYMAST_ATTEMPT >> "{tmp_path}/$RANK"\n')
        program.chmod(0o755)
    with local_run(
        tmp_path / "runs", "--nodes", "1", "--nproc-per-node", "2", script=str(tmp_path / "task.py"),
        within=(sys.executable, "-c", SUBMITS, str(tmp_path)),
    ) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.attempt, state.exit_code) == (2, 0), run.story()
    expected = [f"{name} {attempt}" for attempt in (1, 2) for name in PROGRAMS]
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text().splitlines() == expected, run.story()
