"""Trainings of `scripts/train_adapter.py`, and whether two of them did the same in each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from jurymast.checkpoint.batch import BATCH_VARIABLE, RANKS_VARIABLE
from support.runs import SCRIPTS

SCRIPT = SCRIPTS / "train_adapter.py"
WANTED = 3  # ranks
# The order in which float32 numbers are added is all that differs: a few of the last bits, after some steps.
ORDER = 1e-4


@dataclass
class Step:
    """What all ranks together did when it was done last."""

    attempt: int = -1
    ranks: set[int] = field(default_factory=set)
    samples: list[int] = field(default_factory=list)  # each as often as it was used
    losses: dict[int, float] = field(default_factory=dict)


def train(out: Path, framework: str, ranks: int, *options: str, policy: str = "global") -> str:
    """Train by torchrun, without agents. Return what the ranks wrote."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("JURYMAST")}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            str(SCRIPT), framework, "--out", str(out), *options,
        ],
        env={
            **variables, "JURYMAST_CHECKPOINTS": str(out / "checkpoints"), "OMP_NUM_THREADS": "1",
            RANKS_VARIABLE: str(WANTED), BATCH_VARIABLE: policy, "PYTHONWARNINGS": "ignore",
        },
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def steps(out: Path) -> dict[int, Step]:
    found: dict[int, Step] = {}
    for path in sorted(out.glob("*.samples")):
        for line in path.read_text().splitlines():
            number, attempt, ranks, samples, losses = json.loads(line)
            step = found.setdefault(number, Step())
            if attempt > step.attempt:
                step = found[number] = Step(attempt)
            if attempt == step.attempt:
                step.ranks.add(ranks)
                step.samples += samples
                step.losses.update(zip(samples, losses, strict=True))
    return found


def compare(apart: Path, whole: Path) -> None:
    """The training that was on three ranks and on two did what the undisturbed one did."""
    found, expected = steps(apart), steps(whole)
    assert found.keys() == expected.keys()
    assert {count for one in found.values() for count in one.ranks} == {WANTED, WANTED - 1}
    for number, one in found.items():
        assert len(one.ranks) == 1, number
        assert sorted(one.samples) == sorted(expected[number].samples), number
        assert one.losses == pytest.approx(expected[number].losses, rel=ORDER, abs=1e-6), number
    _compare_ends(torch.load(apart / "end.pt"), torch.load(whole / "end.pt"))


def _compare_ends(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weights, rtol=ORDER, atol=1e-6)
    assert found["curve"], "of the newest attempt"
    for step, values in found["curve"].items():
        assert values == pytest.approx(expected["curve"][step], rel=ORDER), step
    assert found.get("tokens") == expected.get("tokens")
