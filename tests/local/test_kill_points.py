"""Deaths at each point of a save: a process is stopped and its stack looked at; there, somebody dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from jurymast.core.run.state import RunState
from support.runs import RunUnderTest, local_run, result, wait_gone
from support.saves import check_restores

# Alone: on a busy machine a look with py-spy takes longer than what it looks for.
pytestmark = [pytest.mark.torch, pytest.mark.alone, pytest.mark.timeout(1500)]

PY_SPY = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
TRAIN = (
    "--steps", "100000", "--step-time", "0.05", "--save-every", "1 step", "--buffer-mib", "96",
)  # fmt: skip
LIMIT_S = 360.0  # found by chance: on a busy machine after many looks
# Where a save is, by the function that some thread is in, and the process whose thread that is.
COPYING, HASHING, REPLICATING, DRAINING = "Window.stage", "_read_image", "_receive", "_Meeting._write_rank"


Who = Callable[[RunUnderTest, str], list[int]]


def ranks(run: RunUnderTest, node: str) -> list[int]:
    return list(run.pids(node))


def agents(run: RunUnderTest, node: str) -> list[int]:
    return [run.agent_pid(node)]


def drainers(run: RunUnderTest, node: str) -> list[int]:
    children = psutil.Process(run.agent_pid(node)).children()
    return [child.pid for child in children if "jurymast.storage" in child.cmdline()]


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


POINTS = [(COPYING, ranks), (HASHING, agents), (DRAINING, drainers), (REPLICATING, spares_agents)]


@pytest.mark.parametrize(("victim", "spares"), [(ranks, 1), (agents, 4)])
def test_whoever_dies_at_any_point_of_a_save_costs_no_bit(
    tmp_path: Path, trained_plainly: Callable[..., str], victim: Who, spares: int
) -> None:
    """One death at each point; an agent's costs a spare."""
    out, enough = tmp_path / "out.json", tmp_path / "enough"
    arguments = (*TRAIN, "--until", str(enough), "--out", str(out))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", str(spares), script="train_tiny.py",
                   arguments=arguments) as run:  # fmt: skip
        safe = 4
        for number, (point, where) in enumerate(POINTS, 1):
            run.wait_safe(safe)
            node = placed(run, victim)
            stopped = stop_in(point, run, where, node)
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


def stop_in(function: str, run: RunUnderTest, where: Who, node: str) -> int:
    """A process of which a thread is in that function: stopped there. One that is only looked at goes on."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for pid in where(run, node):
            if not is_in(function, pid):
                continue
            os.kill(pid, signal.SIGSTOP)
            if is_in(function, pid):
                return pid
            os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"nobody was found in {function} within {LIMIT_S:.0f} s\n{run.story()}")


def is_in(function: str, pid: int) -> bool:
    if PY_SPY is None:
        pytest.skip("py-spy is not installed")
    command = [PY_SPY, "dump", "--nonblocking", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if "ermission" in done.stderr:
        pytest.skip("py-spy may not look at other processes here")
    return f" {function} (" in done.stdout
