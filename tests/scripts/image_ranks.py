"""Ranks that train as those of `checkpoint_ranks` do, and leave images of their state as files."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jurymast.checkpoint.image import ImagePlanner, Window
from jurymast.checkpoint.state import ScriptState
from jurymast.keeper.manifest import Manifest

RANKS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("checkpoint_ranks.py")))


def train_and_leave(place: str, steps: int, sharded: bool = False) -> Any:
    training = RANKS["Training"](1, sharded)
    for number in range(steps):
        training.step(number)
    state = ScriptState(training.state())
    image_plan = ImagePlanner(state).plan_image(state.trees())
    buffer = bytearray(image_plan.size_bytes)
    Window(buffer).stage(image_plan)
    data = image_plan.manifest(steps, 1, training.rank, dist.get_world_size())
    manifest = Manifest.from_bytes(data).with_blocks(memoryview(buffer))
    path = Path(place) / f"image-{training.rank}"
    path.write_bytes(buffer)
    return {
        "image": {"rank": training.rank, "path": str(path), "manifest": manifest.to_bytes().decode()},
        "weights": training.weights(),
        "moments": training.moments(),
        "buffers": training.buffers(),
        "counter": training.counter.value,
    }


if "CALL" in globals():
    RANKS["_run"].__globals__["train_and_leave"] = train_and_leave
    RANKS["_run"](globals()["CALL"])
