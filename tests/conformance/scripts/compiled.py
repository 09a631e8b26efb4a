"""Compiles a small model in several ways and trains it."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
graphs = []


def counting(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph.forward


for backend in ("eager", "aot_eager", counting, *sys.argv[1:]):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    trained = DistributedDataParallel(torch.compile(model, backend=backend))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        with torch.profiler.record_function("step"):
            loss = trained(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(getattr(backend, "__name__", backend), loss.item(), [p.sum().item() for p in model.parameters()])
print(torch._dynamo.utils.counters["graph_break"])
step = torch.compile(optimizer.step, backend="eager", fullgraph=False)
step()
print("compiled optimizer", [p.sum().item() for p in model.parameters()])
print(graphs, torch._dynamo.utils.counters["stats"])
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
