"""Trains a little, then lets torch's own compiler build the model, which takes many times a step's time."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(model, steps):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item())


dist.init_process_group("gloo")
torch.manual_seed(2)
layer = torch.nn.Linear(4, 2)
train(layer, 12)
train(torch.compile(torch.nn.Sequential(layer, torch.nn.Sigmoid())), 3)
print(dict(torch._dynamo.utils.counters["stats"]))
dist.barrier()
dist.destroy_process_group()
