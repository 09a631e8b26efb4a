"""Load a checkpoint as anybody would who has never heard of jurymast; prints what was loaded as JSON.

load_stock.py DIRECTORY [RANK SIZE STORE]: with these, as one of SIZE ranks with the table sharded over them.
"""

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = 4

warnings.simplefilter("ignore")
directory, *ranks = sys.argv[1:]
table = torch.zeros(ROWS, 3)
if ranks:
    rank, size, store = int(ranks[0]), int(ranks[1]), ranks[2]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    table = distribute_tensor(table, init_device_mesh("cpu", (size,)), [Shard(0)])
state: dict[str, Any] = {
    "model": {"weight": torch.zeros(1000), "bias": torch.zeros(7), "table": table},
    "data": {"rank-00000": {"position": 0}, "rank-00001": {"position": 0}},
    "epoch": 0,
}
dcp.load(state, checkpoint_id=directory)
model = state["model"]
whole = model["table"].full_tensor() if ranks else model["table"]
print(
    json.dumps(
        {
            "weight": [model["weight"].min().item(), model["weight"].max().item()],
            "bias": model["bias"].tolist(),
            "table": whole.tolist(),
            "data": state["data"],
            "epoch": state["epoch"],
            # torch itself imports the rendezvous of any package that has one
            "jurymast": any(
                name.startswith(("jurymast.checkpoint", "jurymast.storage")) for name in sys.modules
            ),
        }
    )
)
if ranks:
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's threads now and then abort the end of a plain interpreter
