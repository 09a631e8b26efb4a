"""Ranks that hang on the local cluster: where each of them stood, taken from the real processes."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from jurymast.core.judges.stacks import WAITING
from jurymast.core.state import events as ev
from support.runs import local_run, wait_gone

pytestmark = pytest.mark.torch

TRAIN = ("--steps", "80", "--step-time", "0.02", "--save-every", "10 steps")


def test_the_rank_that_never_came_to_the_collective_is_named(tmp_path: Path) -> None:
    """Rank 1 waits for nobody in its own code, the other for its gradients."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("detect: {hang: 6s}\n")  # a rank in its own code may have good reasons for long
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py",
                   arguments=(*TRAIN, "--rest-once", "25:1:1000")) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    culprit = state.placement[1]
    assert (incident.cause, incident.action) == ("hang", "restart")
    assert (incident.rank, incident.node) == (1, culprit), incident.evidence
    assert "rank 1 in misbehave at train_tiny.py:" in incident.evidence
    (at,) = [event for event in run.events() if isinstance(event, ev.StacksTaken) and event.node != culprit][
        :1
    ]
    assert at.kinds[0] in WAITING, at
    assert (
        "rank 1 never reached the place where the others wait; stacks in evidence/attempt-0001"
        in incident.evidence
    )
    parts = incident.seconds()
    assert parts["diagnose"] < 6, "the look is short"
    folder = run.directory.evidence(1)
    files = sorted(folder.glob("stacks-*.txt"))
    assert [file.name for file in files] == [f"stacks-{r:05d}-{r:05d}.txt" for r in range(2)], run.story()
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert "threading.py" in files[1].read_text()
    assert "torch" in files[0].read_text()


def test_a_stopped_rank_does_not_hold_the_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # where no py-spy is
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=TRAIN) as run:  # fmt: skip
        victim = run.wait_safe(20).placement[1]
        os.kill(run.pids(victim)[0], signal.SIGSTOP)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.rank, incident.node) == ("rank_frozen", 1, victim)
    assert "rank 1 without a stack (state T" in incident.evidence
    taken = [event for event in run.events() if isinstance(event, ev.StacksTaken)]
    assert {event.node for event in taken} == set(state.placement)
    assert incident.seconds()["diagnose"] < 6


@pytest.mark.parametrize("arguments", [(), pytest.param(("stateful",), marks=pytest.mark.long)])
def test_a_loader_worker_that_stops_before_the_first_step_is_named(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The ranks themselves are well; the others wait for the one, that for its worker."""
    if arguments:
        pytest.importorskip("torchdata")
    with local_run(
        tmp_path / "runs", "--nodes", "2", "--spares", "0", script="loader_stops.py", arguments=arguments
    ) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.action, incident.rank) == ("hang", "restart", 1), incident.evidence
    # On a machine that is too busy for the rank to answer in time, at least this can be seen from outside.
    where = r"waiting at loader_stops\.py:\d+|without a stack .*, may wait"
    why = r"for its DataLoader worker 0, which is stopped \(state T\)"
    assert re.search(rf"rank 1 ({where}) {why}", incident.evidence), incident.evidence
