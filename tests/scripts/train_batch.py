"""A training whose steps have the same batch on any number of ranks (`Checkpointer.batch`): the loss of each
step is that of one process that trains on the whole batch, but for the order in which floats are added."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import jurymast
from jurymast.checkpoint.batch import RankBatch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--samples", type=int, default=48, help="of a step, on all ranks together")
parser.add_argument("--save-every", default="10 steps")
parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")
parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
parser.add_argument(
    "--out", type=Path, required=True, help="the end's JSON; beside it .losses, a line a step"
)

WIDTH = 32


def batch_of(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1).tanh()


def wrapped(model: nn.Module, sharded: bool) -> nn.Module:
    if not dist.is_initialized():
        return model
    if not sharded:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def synchronise(model: nn.Module, last: bool) -> None:
    """Gradients are averaged over ranks after the last micro-batch of a step only."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)


def train_step(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, mine: RankBatch) -> float:
    """Return the mean loss of all samples."""
    inputs, targets = batch_of(step, mine.samples)
    total = torch.zeros(())
    for number, (part, scale) in enumerate(zip(mine.micro, mine.scales, strict=True), 1):
        rows = slice(part.start, part.stop)
        synchronise(model, number == mine.accumulation)
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows]) * scale
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total) / mine.ranks


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(1)
    model = wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), args.sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    checkpoint = jurymast.Checkpointer({"model": model, "optimizer": optimizer}, every=args.save_every)
    start = checkpoint.restore()
    mine = checkpoint.batch(args.samples)
    with args.out.with_suffix(".losses").open("a" if start else "w") as losses:
        for step in range(start, args.steps):
            began = time.monotonic()
            loss = train_step(step, model, optimizer, mine)
            if first:
                print(step + 1, repr(loss), mine.ranks, file=losses, flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
            checkpoint.step(step + 1)
    if first:
        args.out.write_text(json.dumps({"steps": args.steps, "restored": start}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
