"""How long a rank that trains waits for the first batch of a loader with two workers, forked and spawned.

Each rank writes the seconds of every start, by context, as JSON into `loader-N.json` where it runs.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STARTS = {"fork": 20, "spawn": 1}
WORKERS = 2


def seconds_to_first_batch(data: Any, context: str) -> float:
    loader = DataLoader(data, batch_size=8, num_workers=WORKERS, multiprocessing_context=context)
    dist.barrier()
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - began
    for _batch in batches:  # workers that are through end at once
        pass
    return seconds


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    data = TensorDataset(torch.rand(64, 16))
    found = {name: [seconds_to_first_batch(data, name) for _ in range(n)] for name, n in STARTS.items()}
    name = f"loader-{dist.get_rank()}.json"
    with open(f"{name}.new", "w") as file:
        json.dump(found, file)
    os.replace(f"{name}.new", name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
