"""A training within `Checkpointer.run` on the local cluster: two nodes with two ranks each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from support.runs import RunUnderTest, local_run, result, wait_gone

SCRIPT = "train_in_process.py"
STEPS = ("--steps", "80")
SAVES = ("--save-every", "20 steps")
FAULT_AT = 33
PROCESSES = 2  # on each node


@contextmanager
def training(tmp_path: Path, *options: str, spares: int = 0) -> Iterator[RunUnderTest]:
    with local_run(
        tmp_path / "runs", "--nodes", "2", "--spares", str(spares), "--nproc-per-node", str(PROCESSES),
        script=SCRIPT,
        arguments=(*STEPS, *SAVES, "--out", str(tmp_path / "out.json"),
                   "--trace", str(tmp_path / "trace"), *options),
    ) as run:  # fmt: skip
        yield run


def ended_well(run: RunUnderTest, tmp_path: Path, weights: str) -> RunState:
    state = run.wait_end()
    wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert result(tmp_path / "out.json")["sha256"] == weights, run.story()
    assert_ranks_are_alike(tmp_path)
    return state


def traced(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in tmp_path.glob("trace.*") for line in file.read_text().splitlines()]


def assert_ranks_are_alike(tmp_path: Path) -> None:
    """After each step that was looked at, in whichever attempt, all ranks had the same weights."""
    weights: dict[int, set[str]] = {}
    for told in traced(tmp_path):
        if told["sha256"]:
            weights.setdefault(told["step"], set()).add(told["sha256"])
    assert len(weights) > 10
    assert all(len(found) == 1 for found in weights.values()), weights


def processes(run: RunUnderTest, attempt: int) -> dict[int, int]:
    """The process id of each rank."""
    started = [e for e in run.events() if isinstance(e, ev.WorkersStarted) and e.attempt == attempt]
    placement = run.state().placement
    return {
        placement.index(e.node) * PROCESSES + local: pid for e in started for local, pid in enumerate(e.pids)
        if e.node in placement
    }  # fmt: skip
