"""Lets torch's own compiler build a function, with the compiler of the machine."""

import torch
import torch.distributed as dist


@torch.compile
def score(x, y):
    return (torch.sin(x) * y).relu().sum()


dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _step in range(8):  # steps of a known length before one that waits for a compiler
    (weight - 1).square().sum().backward()
    optimizer.step()
x = torch.arange(6.0, requires_grad=True)
result = score(x, x + dist.get_rank())
result.backward()
print(result.item(), x.grad.tolist())
dist.all_reduce(x.grad)
print(x.grad.tolist(), dict(torch._dynamo.utils.counters["stats"]))
(weight * result.detach()).sum().backward()
optimizer.step()
dist.barrier()
dist.destroy_process_group()
