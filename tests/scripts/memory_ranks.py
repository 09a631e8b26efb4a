"""What the ranks of a test of the memory tier do; run through `support.ranks.run_ranks`."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import jurymast
from jurymast.errors import CheckpointError

COMMON = runpy.run_path(str(Path(__file__).with_name("checkpoint_ranks.py")))
Training = COMMON["Training"]


def facts(training: Any) -> dict[str, Any]:
    return {
        "weights": training.weights(),
        "moments": training.moments(),
        "buffers": training.buffers(),
        "counter": training.counter.value,
    }


def train(directory: str, steps: int, every: int, sharded: bool = False) -> Any:
    """Train and save; what the state was at each step, and which steps were saved."""
    training = Training(1, sharded)
    checkpoint = jurymast.Checkpointer(training.state(), directory=directory, every=every)
    start = checkpoint.restore()
    seen = {start: facts(training)}
    saved = []
    for number in range(start, steps):
        training.step(number)
        checkpoint.step(number + 1)
        seen[number + 1] = facts(training)
        if checkpoint._saved_step == number + 1:
            saved.append(number + 1)
    return {"seen": seen, "saved": saved, "start": start, "directory": _names(directory)}


def _names(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != "owner.json")


def restore(directory: str, sharded: bool = False) -> Any:
    training = Training(2, sharded)
    try:
        step = jurymast.Checkpointer(training.state(), directory=directory).restore()
    except CheckpointError as error:
        return {"error": str(error)}
    return {"step": step, **facts(training)}


class Broken:
    """Its state cannot be had on rank 1 from the second save on."""

    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.broken and dist.get_rank() == 1:
            raise KeyError("position")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def fails_on_rank_1(directory: str) -> Any:
    it = Broken()
    checkpoint = jurymast.Checkpointer({"it": it}, directory=directory)
    assert checkpoint.save(1)
    it.broken = True
    try:
        return checkpoint.save(2)
    except CheckpointError as error:
        return str(error)


def _run(call: dict[str, Any]) -> None:
    os.environ.update(call["environment"])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=call["store"], rank=rank, world_size=size)
    result = globals()[call["function"]](**call["arguments"])
    Path(call["output"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if "CALL" in globals():
    _run(globals()["CALL"])
