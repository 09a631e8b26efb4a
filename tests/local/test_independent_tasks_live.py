"""Tasks that are each for themselves, when one of their nodes is lost: real agents and tasks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase
from support.runs import local_run, wait_gone

pytestmark = pytest.mark.torch

# Only a batch script's step makes such a run, under Slurm.
SUBMITS = """import runpy, sys
from dataclasses import replace
from jurymast.cluster import slurm
submit = slurm.submit
slurm.submit = lambda request: submit(replace(request, plan=replace(request.plan, guessed=True)))
sys.argv = sys.argv[3:]
runpy.run_module("jurymast", run_name="__main__", alter_sys=True)
"""
TASK = """import os, sys, time
rank = int(os.environ["RANK"])
with open(f"{sys.argv[1]}/{rank}", "a") as file:
    file.write("started ")
if rank % 3 == 0:
    sys.exit(3 if rank == 3 else 0)
while not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.05)
with open(f"{sys.argv[1]}/{rank}", "a") as file:
    file.write("done")
"""


def test_a_lost_node_does_not_have_ended_tasks_done_again(tmp_path: Path) -> None:
    """Of three nodes with two tasks each, the last is lost: 0 is done, 3 has failed, the others run."""
    (tmp_path / "task.py").write_text(TASK)
    with local_run(
        tmp_path / "runs", "--nodes", "3", "--spares", "1", "--nproc-per-node", "2",
        script=str(tmp_path / "task.py"), arguments=(str(tmp_path),), within=(sys.executable, "-c", SUBMITS),
    ) as run:  # fmt: skip
        run.wait("the ends of two tasks", lambda s: s.done == {0} and bool(s.findings.failures))
        os.killpg(run.agent_pid(run.state().placement[2]), signal.SIGKILL)
        run.wait("the next attempt", lambda s: s.attempt == 2 and s.phase is Phase.RUNNING)
        (tmp_path / "go").touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    done = [rank for event in run.events() if isinstance(event, ev.RanksEnded) for rank in event.ranks]
    assert sorted(done) == [0, 1, 2, 4, 5], "each once, and never the one that failed"
    told = [(tmp_path / str(rank)).read_text() for rank in range(6)]
    assert [told[0], told[3]] == ["started ", "started "], run.story()
    assert {told[rank] for rank in (1, 2, 4, 5)} == {"started started done"}, run.story()
    assert (state.attempt, state.exit_code) == (2, 3), run.story()
