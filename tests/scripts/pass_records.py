"""One of two ranks that pass their records on to each other. What the first one keeps it gives back.

Arguments: this rank, the file of the store, and its keys, with which it passes on and takes back. It prints
the steps that it keeps, and the second rank then what came back, or why nothing did.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from jurymast.checkpoint.ward import Ward
from jurymast.errors import CheckpointError

STEPS = (4, 5, 6)


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    passing, taking = (Ward(key.encode()) for key in sys.argv[3:])
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    passing.begin(rank, 1, [100, 100])
    for step in STEPS:
        passing.pass_on(step, f"{rank} after {step}".encode())
    passing.end()
    print(sorted(passing.steps))
    if passing.steps and rank == 0:
        passing.give(STEPS[-1])
    elif passing.steps:
        try:
            print(taking.take(rank, STEPS[-1], 0).decode())
        except CheckpointError as error:
            print(error)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
