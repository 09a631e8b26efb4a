"""A loop with Lightning's Fabric, and the state that `fabric.save` would take."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast_lightning
from jurymast.checkpoint import RandomState
from small import Points, finish, options, pace, small_model


def main() -> None:
    asked = options(__doc__)
    fabric = Fabric(
        accelerator="cpu",
        strategy=DDPStrategy(find_unused_parameters=True),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    fabric.launch()
    model = small_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = StatefulDataLoader(
        Points(),
        batch_size=8,
        sampler=DistributedSampler(Points(), shuffle=False),
        generator=torch.Generator(),
    )
    torch.manual_seed(fabric.global_rank)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "seen": 0}
    state["random"] = RandomState()
    checkpoint = jurymast_lightning.checkpointer(state)
    first = checkpoint.restore()
    batches = iter(loader)
    for step in range(first, asked.steps):
        started = time.monotonic()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        fabric.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        state["seen"] += len(inputs)
        checkpoint.step(step + 1)
        pace(started, asked.step_time)
    assert state["seen"] == asked.steps * 8
    finish(model.module.state_dict(), fabric.global_rank, asked.out)


if __name__ == "__main__":
    main()
