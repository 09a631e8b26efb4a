"""A rank is killed, and the script goes on from its own checkpoint: as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from conformance.harness import LIMIT_S, Case, jurymast_run, torchruns_weights
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase
from jurymast.jobs import await_ended
from support.runs import RunUnderTest, wait_gone
from support.waiting import wait_until

pytestmark = pytest.mark.torch

RESTARTED = "failures: {restarts: {application: 3 per 1h}}\n"
GONE_S = 4.0
OURS = ("--jurymast",)
# What the adapters save: every second step, every third.
RESTORED = {"trainer_hf.py": 4, "trainer_lightning.py": 3}


def _weights(folder: Path) -> str:
    return (folder / "work" / "weights.txt").read_text()


def _assert_one_rank_was_killed(run: RunUnderTest) -> None:
    failed = [event for event in run.events() if isinstance(event, ev.WorkerFailed)]
    assert [(event.rank, event.exit_code, event.attempt) for event in failed][:1] == [(1, -signal.SIGKILL, 1)]
    assert run.state().attempt == 2


@pytest.mark.parametrize(
    ("script", "needs", "more"),
    [
        pytest.param("trainer_hf.py", "transformers", (), id="hf-own"),
        pytest.param("trainer_hf.py", "transformers", OURS, id="hf-jurymast's", marks=pytest.mark.long),
        pytest.param("trainer_lightning.py", "lightning", (), id="lightning-own", marks=pytest.mark.long),
        pytest.param("trainer_lightning.py", "lightning", OURS, id="lightning-jurymast's"),
    ],
)
def test_a_trainer_goes_on_from_its_newest_checkpoint(
    script: str, needs: str, more: tuple[str, ...], tmp_path: Path, session_folder: Path
) -> None:
    pytest.importorskip(needs)
    killed = Case(script, (script,), (script, "--stop-at", "5", *more))
    with jurymast_run(killed, tmp_path / "jurymast", policy=RESTARTED) as run:
        wait_until("step 5", (tmp_path / "jurymast" / "work" / "stopped").exists, limit_s=LIMIT_S)
        os.kill(run.pids("local-1")[1], signal.SIGKILL)
        state = run.wait_end(LIMIT_S)
        wait_gone(run.directory.root)
    assert state.phase is Phase.SUCCEEDED, run.story()
    _assert_one_rank_was_killed(run)
    assert not [event for event in run.events() if isinstance(event, ev.ColdStart)]
    assert [i.step_restored for i in state.incidents] == [RESTORED[script] if more else None]
    assert _weights(tmp_path / "jurymast") == torchruns_weights(script, session_folder)


def test_loader_workers_of_a_killed_rank_are_gone_soon(tmp_path: Path, session_folder: Path) -> None:
    script = "loader_killed.py"
    stopping = Case(script, (script,), (script, "--stop"))
    with jurymast_run(stopping, tmp_path / "jurymast", policy=RESTARTED) as run:
        work = tmp_path / "jurymast" / "work"
        wait_until("its stop", (work / "stopped").exists, limit_s=LIMIT_S)
        workers = [
            int(pid) for rank in range(2) for pid in (work / f"workers-{rank}-0.txt").read_text().split()
        ]
        assert len(workers) == 4
        assert all(psutil.pid_exists(pid) for pid in workers)
        os.kill(run.pids("local-1")[1], signal.SIGKILL)
        assert await_ended(workers, GONE_S), "loader workers"
        state = run.wait_end(LIMIT_S)
        wait_gone(run.directory.root)
    assert state.phase is Phase.SUCCEEDED, run.story()
    _assert_one_rank_was_killed(run)
    assert _weights(tmp_path / "jurymast") == torchruns_weights(script, session_folder)
