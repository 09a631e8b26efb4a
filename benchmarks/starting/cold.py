"""Trains after it has set a variable, computed by itself, that torch reads when it is imported."""

import os

os.environ["OMP_NUM_THREADS"] = str(2 * int(os.environ["LOCAL_WORLD_SIZE"]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
for _step in range(10):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
