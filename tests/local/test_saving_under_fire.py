"""Saves every few steps, and faults at random moments: nothing torn, mixed or stale is ever restored.

The state is large enough that copying, hashing, replicating and writing are under way most of the time. A
failure prints its seed: `JURYMAST_TEST_SEED=<seed>` runs that one again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jurymast.core.state.run import RunState
from support.runs import RunUnderTest, command_of, hosts, local_run, result, wait_gone
from support.saves import check_restores

pytestmark = pytest.mark.torch

SEEDS = [int(os.environ["JURYMAST_TEST_SEED"])] if "JURYMAST_TEST_SEED" in os.environ else [1]
TRAIN = (
    "--steps",
    "160",
    "--width",
    "384",
    "--layers",
    "3",
    "--step-time",
    "0.03",
    "--save-every",
    "3 steps",
)
FAULTS = 3


def kill_rank(run: RunUnderTest, state: RunState, chance: random.Random) -> None:
    psutil.Process(chance.choice(run.pids(chance.choice(state.placement)))).kill()


def kill_agent(run: RunUnderTest, state: RunState, chance: random.Random) -> None:
    """And with it, like a node that crashes, everything that runs there."""
    psutil.Process(run.agent_pid(chance.choice(state.placement[1:]))).kill()


def kill_host(run: RunUnderTest, state: RunState, chance: random.Random) -> None:
    for host in hosts(run.agent_pid(chance.choice(state.placement))):
        host.kill()


def kill_storage_processes(run: RunUnderTest, state: RunState, chance: random.Random) -> None:
    for node in state.placement:
        kill_children(run, node, "jurymast.storage")


def kill_children(run: RunUnderTest, node: str, name: str) -> None:
    """Of the node's agent."""
    for child in psutil.Process(run.agent_pid(node)).children():
        if name in command_of(child):
            with suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_at_random_moments_of_saves_cost_no_bit(tmp_path: Path, undisturbed: str, seed: int) -> None:
    print(f"JURYMAST_TEST_SEED={seed}")
    chance = random.Random(seed)
    out = tmp_path / "out.json"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "2", script="train_tiny.py",
                   arguments=(*TRAIN, "--out", str(out))) as run:  # fmt: skip
        goal = 0
        for _ in range(FAULTS):
            goal += chance.randint(15, 40)
            state = run.wait_step(goal, limit_s=240.0)
            fault = chance.choice([kill_rank, kill_agent, kill_host, kill_storage_processes])
            before = len(state.incidents)
            fault(run, state, chance)
            if fault is not kill_storage_processes:
                wait_recovered(run, before, fault.__name__)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert result(out)["sha256"] == undisturbed, run.story()
    check_restores(run)


def wait_recovered(run: RunUnderTest, before: int, what: str) -> None:
    run.wait(what, lambda state: len(state.incidents) > before and state.incident is None)
