"""Loads data by one worker process, which in the first attempt stops before the first step; no main guard.
With an argument the loader is torchdata's."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

if sys.argv[1:]:
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader  # type: ignore[no-redef, unused-ignore]

FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class Numbers(Dataset):  # type: ignore[misc, type-arg, unused-ignore]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if FIRST and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((4,), float(index))


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for batch in DataLoader(Numbers(), batch_size=4, num_workers=1, collate_fn=lambda rows: torch.stack(rows)):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write("done\n")
dist.destroy_process_group()
