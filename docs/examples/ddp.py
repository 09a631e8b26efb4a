"""Data-parallel training (DDP) with a loader that has a state: what was read is not read again."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast
from jurymast.checkpoint import RandomState
from small import Points, finish, options, pace, small_model


def main() -> None:
    asked = options(__doc__)
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Without find_unused_parameters DDP sums gradients in another order after a restart than before it.
    model = DistributedDataParallel(small_model().to(device), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.steps)
    sampler = DistributedSampler(Points(), shuffle=False)
    # Of its own generator it draws a number when it begins, at a restart as well: not of the one for dropout.
    loader = StatefulDataLoader(Points(), batch_size=8, sampler=sampler, generator=torch.Generator())
    torch.manual_seed(dist.get_rank())

    checkpoint = jurymast.Checkpointer(
        {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "data": loader,
            "random": RandomState(),
        }
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
        schedule.step()
        checkpoint.step(step + 1)
        pace(started, asked.step_time)
    finish(model.module.state_dict(), dist.get_rank(), asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
