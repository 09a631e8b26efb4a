"""Fully sharded training (FSDP2): each rank saves its shards, and takes them back from memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast
from jurymast.checkpoint import RandomState
from small import Points, finish, options, pace, small_model


def all_ranks(kind: str) -> DeviceMesh:
    """All ranks hold a shard each. See hsdp.py for another one."""
    return init_device_mesh(kind, (dist.get_world_size(),))


def train(mesh_of: Callable[[str], DeviceMesh] = all_ranks) -> None:
    asked = options(__doc__)
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = small_model().to(device)
    fully_shard(model, mesh=mesh_of(device.type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(Points(), shuffle=False)
    loader = StatefulDataLoader(Points(), batch_size=8, sampler=sampler, generator=torch.Generator())
    torch.manual_seed(dist.get_rank())

    checkpoint = jurymast.Checkpointer(
        {"model": model, "optimizer": optimizer, "data": loader, "random": RandomState()}
    )
    first = checkpoint.restore()
    batches = iter(loader)
    for step in range(first, asked.steps):
        started = time.monotonic()
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.step(step + 1)
        pace(started, asked.step_time)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    finish(whole, dist.get_rank(), asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
