"""Hybrid sharding (HSDP): the ranks of a node shard the model, and nodes hold copies of each other."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import train


def by_node(kind: str) -> DeviceMesh:
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(kind, (dist.get_world_size() // each, each), mesh_dim_names=("copy", "shard"))


if __name__ == "__main__":
    train(by_node)
