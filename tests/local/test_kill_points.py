"""Deaths at each point of a save: a process stops itself in a function (`support/stopping`); there, somebody
dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from jurymast.core.state.run import RunState
from support import stopping
from support.runs import RunUnderTest, local_run, result, wait_gone
from support.saves import check_restores
from support.waiting import wait_until

pytestmark = pytest.mark.torch

TRAIN = (
    "--steps", "100000", "--step-time", "0.1", "--save-every", "2 steps", "--buffer-mib", "4",
)  # fmt: skip
# Where a save is, by the function that some thread is in, and the process whose thread that is.
COPYING, HASHING, REPLICATING, WRITING = "Window.stage", "_read_image", "_receive", "_Part._write_rank"


Who = Callable[[RunUnderTest, str], list[int]]


def ranks(run: RunUnderTest, node: str) -> list[int]:
    return list(run.pids(node))


def agents(run: RunUnderTest, node: str) -> list[int]:
    return [run.agent_pid(node)]


def storage_processes(run: RunUnderTest, node: str) -> list[int]:
    return agents(run, node)  # theirs are children of it


def spares_agents(run: RunUnderTest, node: str) -> list[int]:
    """Of the nodes that may hold the others' replicas."""
    state = run.state()
    return [run.agent_pid(node) for node in state.nodes if node not in state.placement]


def placed(run: RunUnderTest, victim: Who) -> str:
    """Where somebody is to die: not the supervisor's agent, and not ranks of one node twice in a row, or the
    node would have to go."""
    state = run.state()
    others = [node for node in state.placement if node != state.host]
    return state.placement[len(state.incidents) % 2] if victim is ranks else others[0]


POINTS = [(COPYING, ranks), (HASHING, agents), (WRITING, storage_processes), (REPLICATING, spares_agents)]


@pytest.mark.parametrize(("victim", "spares"), [pytest.param(ranks, 1, marks=pytest.mark.long), (agents, 4)])
def test_whoever_dies_at_any_point_of_a_save_costs_no_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained_plainly: Callable[..., str],
    victim: Who,
    spares: int,
) -> None:
    """One death at each point; an agent's costs a spare."""
    out, enough, stops = tmp_path / "out.json", tmp_path / "enough", tmp_path / "stops"
    stops.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(stopping.__path__[0])))
    monkeypatch.setenv("STOP_IN", str(stops))
    arguments = (*TRAIN, "--until", str(enough), "--out", str(out))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", str(spares), script="train_tiny.py",
                   arguments=arguments) as run:  # fmt: skip
        safe = 4
        for number, (point, where) in enumerate(POINTS, 1):
            run.wait_safe(safe)
            node = placed(run, victim)
            stopped = stop_in(point, stops, where(run, node))
            for pid in victim(run, node):
                psutil.Process(pid).kill()
            if where is not victim:
                with suppress(ProcessLookupError):  # the victim's child
                    os.kill(stopped, signal.SIGCONT)
            state = run.wait(f"recovery from {point}", partial(recovered, number))
            safe = (state.incidents[-1].step_restored or 0) + 4
        enough.touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    found = result(out)
    assert found["sha256"] == trained_plainly("--steps", str(found["steps"])), run.story()
    check_restores(run)


def recovered(number: int, state: RunState) -> bool:
    return len(state.incidents) >= number and state.incident is None


def stop_in(function: str, folder: Path, pids: list[int]) -> int:
    """The process that has stopped there: one of these, or a child of one."""
    armed = folder / function
    written = folder / "written"
    written.write_text(" ".join(map(str, pids)))
    written.rename(armed)

    def stopped() -> int:
        found = [int(path.suffix[1:]) for path in folder.glob(f"{function}.*")]
        return found[0] if found and psutil.Process(found[0]).status() == psutil.STATUS_STOPPED else 0

    pid = wait_until(f"process in {function}", stopped, limit_s=240.0)
    (folder / f"{function}.{pid}").unlink()
    return pid
