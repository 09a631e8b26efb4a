"""A loop with Hugging Face's Accelerate. Its own checkpoints are not needed."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast_accelerate
from small import Points, finish, options, pace, small_model


def main() -> None:
    asked = options(__doc__)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = StatefulDataLoader(Points(), batch_size=8, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index)

    checkpoint = jurymast_accelerate.checkpointer(accelerator)
    first = checkpoint.restore()
    batches = iter(loader)
    for step in range(first, asked.steps):
        started = time.monotonic()
        inputs, targets = next(batches)
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        checkpoint.step(step + 1)
        pace(started, asked.step_time)
    finish(accelerator.unwrap_model(model).state_dict(), accelerator.process_index, asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
